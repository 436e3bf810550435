"""The manifest: what compares, what refuses, and that no secret ever enters."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfledger.schema.errors import NotComparableError, UsageError
from perfledger.schema.host_facts import HostCounters, device_facts, host_facts, ranges
from perfledger.schema.manifest import FIELDS, Manifest, Value, compare, reference
from perfledger.schema.redaction import (
    REDACTED,
    allowed_environment,
    recorded_environment,
    redact_command,
    redact_text,
)

KNOWN: dict[str, Value] = {
    "model.weights_hash": "w1",
    "model.tokenizer_hash": "t1",
    "runtime.name": "perfledger",
    "runtime.version": "0.1.0",
    "runtime.device": "cpu",
    "runtime.max_num_seqs": 2,
    "runtime.block_size": 16,
    "runtime.kv_blocks": 100,
    "runtime.environment": {"OMP_NUM_THREADS": "1"},
    "host.cpu_model": "some CPU",
    "host.cores": 2,
    "host.affinity": "0-1",
    "workload.hash": "h",
    "workload.requests": 24,
    "run.id": "run-1",
    "run.pid": 17,
}


def manifest(**changed: Value) -> Manifest:
    return Manifest.of({**KNOWN, **{name.replace("__", "."): v for name, v in changed.items()}})


def test_every_field_says_why_it_matters_or_is_volatile() -> None:
    assert [f.name for f in FIELDS if bool(f.why) == f.volatile] == []
    assert all(f"`{f.name}`" in reference() for f in FIELDS)


def test_only_the_variable_differs() -> None:
    found = compare(
        manifest(), manifest(runtime__max_num_seqs=8, run__id="run-2", run__pid=18), VARIABLE
    )
    assert (found.levels, found.refusals, found.touched) == ((2, 8), (), ())
    assert found.require() is found
    assert found.confidence == "medium"
    assert "host.governor" in found.unknown and "run.command" not in found.unknown


def test_a_second_difference_refuses_and_names_field_values_and_reason() -> None:
    other = manifest(
        runtime__max_num_seqs=8,
        model__weights_hash="w2",
        runtime__environment={"OMP_NUM_THREADS": "2"},
    )
    with pytest.raises(NotComparableError) as refused:
        compare(manifest(), other, VARIABLE).require()
    assert str(refused.value) == (
        "the runs differ beyond runtime.max_num_seqs:\n"
        "  model.weights_hash: w1 -> w2 (other weights do other work)\n"
        "  runtime.environment: OMP_NUM_THREADS 1 -> 2 (other code takes other time)\n"
        "  try: make these fields equal, and name them where they are unknown; then run again"
    )
    assert refused.value.exit_code == 5


def test_unknown_on_one_side_refuses_and_on_both_lowers_confidence() -> None:
    known, unknown = manifest(host__governor="performance"), manifest()
    one_sided = compare(known, unknown, None)
    assert [str(d) for d in one_sided.refusals] == [
        "host.governor: performance -> unknown (the clock rate follows it)"
    ]
    nameless = manifest(model__weights_hash=None)
    both = compare(nameless, nameless, None)
    assert both.refusals == () and both.confidence == "low"
    assert "model.weights_hash" in both.unknown


def test_the_variable_must_be_known_and_differ() -> None:
    same = compare(manifest(), manifest(), VARIABLE)
    unknown = compare(manifest(runtime__max_num_seqs=None), manifest(), VARIABLE)
    assert [d.field for d in same.refusals] == [d.field for d in unknown.refusals] == [VARIABLE]
    with pytest.raises(UsageError, match="no field runtime.slots"):
        compare(manifest(), manifest(), "runtime.slots")


def test_declared_consequences_of_the_variable_do_not_refuse() -> None:
    other = manifest(runtime__block_size=32, runtime__kv_blocks=50)
    found = compare(manifest(), other, "runtime.block_size", touches=("runtime.kv_blocks",))
    assert found.refusals == ()
    assert [d.field for d in found.touched] == ["runtime.kv_blocks"]


@given(st.sampled_from([f for f in FIELDS if f.type is str]), st.text(max_size=20), st.text())
def test_compare_refuses_exactly_where_a_compared_field_differs(field, a: str, b: str) -> None:
    first, second = manifest(), manifest()
    first = Manifest.of({**first.values, field.name: a})
    second = Manifest.of({**second.values, field.name: b})
    differs = first.values[field.name] != second.values[field.name]
    assert bool(compare(first, second, None).refusals) == (differs and not field.volatile)


def test_json_is_canonical_and_reads_back() -> None:
    one = manifest()
    other = Manifest.of(dict(reversed(list(KNOWN.items()))))
    assert one.to_json() == other.to_json() and one.hash() == other.hash()
    assert Manifest.from_json(one.to_json()) == one
    assert json.loads(one.to_json())["host.governor"] is None
    changed = one.with_values(host={"cores": 4})
    assert changed.hash() != one.hash()
    assert changed.host_fingerprint() != one.host_fingerprint()
    assert one.with_values(run={"id": "z"}).host_fingerprint() == one.host_fingerprint()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"version": 2}', "not a manifest of version 1"),
        ("[]", "not a manifest of version 1"),
        ('{"version": 1, "model.colour": "red"}', "no field model.colour"),
        ('{"version": 1, "host.cores": "2"}', "host.cores is int, not str"),
        ('{"version": 1, "host.cores": true}', "host.cores is int, not bool"),
        (" " * 1_000_001, "more than 1 MB"),
    ],
)
def test_bad_manifests_are_named(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Manifest.from_json(text)


# --- Secrets ------------------------------------------------------------------------------

CANARY = "canary0123456789"
SECRET_ENVIRONMENT = {
    "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {CANARY}",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"x-api-key={CANARY}",
    "OTEL_EXPORTER_OTLP_CLIENT_KEY": f"/keys/{CANARY}",
    "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://user:{CANARY}@collector:4317/?token={CANARY}",
    "PERFLEDGER_API_KEY": CANARY,
    "PERFLEDGER_TOKEN": CANARY,
    "PERFLEDGER_STORE": f"s3://bucket/x?X-Amz-Signature={CANARY}",
    "HF_TOKEN": CANARY,
    "OPENAI_API_KEY": CANARY,
    "CUDA_PASSWORD": CANARY,
    "NCCL_COMM_ID": f"sk-{CANARY}",
    "TORCH_LOGS": f"api_key={CANARY}",
    "HOME": f"/home/{CANARY}",
}
SECRET_COMMAND = [
    "perfledger",
    "serve",
    "--api-key",
    CANARY,
    f"--hf-token={CANARY}",
    f"OPENAI_API_KEY={CANARY}",
    f"https://user:{CANARY}@host/path?sig={CANARY}#{CANARY}",
    "-H",
    f"Authorization: Bearer {CANARY}",
    "Authorization:",
    "Bearer",
    CANARY,
    f"hf_{CANARY}",
    f"ghp_{CANARY}",
    f"eyJhbGciOi.{CANARY}.{CANARY}",
    "--max-num-batched-tokens",
    "256",
]


def test_no_secret_enters_a_manifest() -> None:
    text = manifest(
        run__command=SECRET_COMMAND,
        runtime__environment=allowed_environment(SECRET_ENVIRONMENT),
        run__environment=recorded_environment(SECRET_ENVIRONMENT),
        runtime__options={"api_key": CANARY, "password": CANARY, "url": f"http://{CANARY}@h/"},
        run__url=f"http://u:{CANARY}@127.0.0.1:8000/?key={CANARY}",
        model__name=f"https://host/m?token={CANARY}",
    ).to_json()
    assert CANARY not in text
    assert "--max-num-batched-tokens" in text and '"256"' in text


def test_environment_is_an_allow_list() -> None:
    assert allowed_environment(
        {"OMP_NUM_THREADS": "1", "PATH": "/bin", "OMP_API_KEY": "x", "CUDA_VISIBLE_DEVICES": ""}
    ) == {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    assert recorded_environment(
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    ) == {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"}


def test_command_keeps_what_is_not_secret() -> None:
    assert redact_command(["serve", "--token", "--port", "80", "--key", "a", "b"]) == [
        *("serve", "--token", "--port", "80", "--key", REDACTED, "b")
    ]


@given(st.text())
def test_redaction_is_idempotent(text: str) -> None:
    assert redact_text(redact_text(text)) == redact_text(text)


# --- The machine, from captured files -------------------------------------------------------


def captured(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


MACHINE = {
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: Fast CPU\nmicrocode\t: 0x1\n"
    "flags\t\t: fpu hypervisor avx2\n\nprocessor\t: 1\nmodel name\t: Fast CPU\n",
    "proc/meminfo": "MemTotal:       16 kB\nMemFree: 1 kB\n",
    "proc/loadavg": "0.50 0.1 0.2 1/2 3\n",
    "proc/sys/kernel/osrelease": "6.1.0\n",
    "proc/sys/kernel/random/boot_id": "b-1\n",
    "proc/self/cgroup": "0::/a/b\n",
    "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
    "sys/fs/cgroup/a/b/cpu.stat": "usage_usec 5\nthrottled_usec 7\n",
    "sys/fs/cgroup/a/b/memory.max": "1024\n",
    "sys/devices/system/cpu/online": "0-3,8\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "2\n",
    "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count": "1\n",
    "sys/devices/system/cpu/intel_pstate/no_turbo": "0\n",
    "sys/devices/system/node/online": "0-1\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/class/dmi/id/bios_version": "F7\n",
    "proc/stat": "cpu  100 0 50 900 30 5 5 40 0 0\ncpu0 1 2\n",
}


def test_host_facts_of_a_captured_machine(tmp_path: Path) -> None:
    facts = host_facts(captured(tmp_path, MACHINE), affinity=[0, 1, 2, 8])
    assert facts.pop("host.cpu_flags") == host_facts(tmp_path)["host.cpu_flags"] is not None
    facts.pop("host.os")
    assert facts == {
        "host.cpu_model": "Fast CPU",
        "host.cores": 5,
        "host.affinity": "0-2,8",
        "host.numa_nodes": 2,
        "host.memory_bytes": 16384,
        "host.governor": "performance",
        "host.boost": "on",
        "host.transparent_hugepage": "madvise",
        "host.kernel": "6.1.0",
        "host.microcode": "0x1",
        "host.firmware": "F7",
        "host.virtual": True,
        "host.cgroup_cpus": "1.5",
        "host.cgroup_memory_bytes": "1024",
        "host.boot_id": "b-1",
        "host.load": "0.50",
    }
    Manifest.of(facts)


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/job\n2:cpu,cpuacct:/job\n0::/\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "200000\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.stat": "nr_periods 1\nthrottled_time 9\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
    }
    facts = host_facts(captured(tmp_path, files))
    assert (facts["host.cgroup_cpus"], facts["host.cgroup_memory_bytes"]) == ("2", "max")
    assert HostCounters.read(tmp_path).throttled_ns == 9


def test_an_unreadable_machine_is_unknown_not_guessed(tmp_path: Path) -> None:
    facts = host_facts(tmp_path)
    assert {name for name, value in facts.items() if value is not None} <= {
        "host.affinity",
        "host.os",
    }
    assert HostCounters.read(tmp_path) == HostCounters(None, None, None, None)


def test_this_machine_fits_the_declaration() -> None:
    Manifest.of({**host_facts(), **device_facts()})


def test_accelerators(tmp_path: Path) -> None:
    assert device_facts(tmp_path)["device.names"] == []
    captured(tmp_path, {"proc/driver/nvidia/version": "NVRM"})
    answer = "NVIDIA H200, 570.1, 96.00, 700.00, 1980, 33\n" * 2
    assert device_facts(tmp_path, ask=lambda command: answer) == {
        "device.names": ["NVIDIA H200"] * 2,
        "device.driver": "570.1",
        "device.firmware": ["96.00"] * 2,
        "device.power_limits": ["700000"] * 2,
        "device.max_clocks": ["1980"] * 2,
        "device.temperatures": ["33"] * 2,
    }
    assert device_facts(tmp_path, ask=lambda command: None) == {}


def test_disturbances_are_named_above_the_limit() -> None:
    before = HostCounters(1000, 100, 0, 2)
    quiet = HostCounters(2000, 140, 10_000_000, 2)
    stormy = HostCounters(2000, 400, 5_000_000_000, 5)
    assert before.disturbances(quiet, limit=0.05) == ()
    assert before.disturbances(stormy, limit=0.05) == (
        "30% of the busy CPU time was stolen by other machines",
        "the CPU quota held the run back for 5.0 s",
        "the CPU was throttled by heat 3 times",
    )
    unknown = HostCounters(None, None, None, None)
    assert unknown.disturbances(unknown, limit=0.05) == ()


def test_ranges() -> None:
    assert ranges([0, 1, 2, 3, 8, 10, 11]) == "0-3,8,10-11"


VARIABLE = "runtime.max_num_seqs"
