"""What is scraped: the [[scrape]] tables, and target files that change under the collector."""

import json
import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfledger.collectors.scraping.config import (
    EXAMPLE,
    ScrapeConfig,
    ScrapeLimits,
    read_scrapes,
    url_of,
)
from perfledger.collectors.scraping.discovery import Discovery, file_sd_addresses
from perfledger.collectors.scraping.kubernetes import kubernetes_addresses
from perfledger.collectors.scraping.targets import make_target
from perfledger.schema.errors import UsageError

FOLDER = Path("/etc/perfledger[1]")


def read(text: str) -> tuple[ScrapeConfig, ...]:
    return read_scrapes(tomllib.loads(text).get("scrape"), FOLDER)


def test_the_example_and_every_setting_are_read() -> None:
    assert read(EXAMPLE) == (
        ScrapeConfig(
            job="vllm",
            targets=("127.0.0.1:8000", "https://inference.example/engine/metrics"),
            files=("/etc/perfledger[[]1]/targets/*.json",),
            interval_s=15.0,
            labels={"perfledger.run.id": "nightly"},
        ),
    )
    everything = """
        [[scrape]]
        job = "a"
        kubernetes_files = ["/run/pods.json"]
        interval_s = 1
        timeout_s = 0.5
        scheme = "https"
        path = "/m"
        bearer_token_file = "token"
        ca_file = "/ca.pem"
        max_bytes = 1
        max_series = 2
        max_labels = 3
        max_label_name_bytes = 4
        max_label_value_bytes = 5
        max_targets = 6
        [[scrape]]
        job = "b"
        targets = ["h:1"]
        interval_s = 5
        """
    assert read(everything) == (
        ScrapeConfig(
            job="a",
            kubernetes_files=("/run/pods.json",),
            interval_s=1.0,
            timeout_s=0.5,
            scheme="https",
            path="/m",
            bearer_token_file=FOLDER / "token",
            ca_file=Path("/ca.pem"),
            limits=ScrapeLimits(1, 2, 3, 4, 5, 6),
        ),
        ScrapeConfig(job="b", targets=("h:1",), interval_s=5.0, timeout_s=5.0),
    )


def test_no_table_or_an_empty_one_scrapes_nothing() -> None:
    assert read("") == read("[scrape]") == ()
    assert read('[scrape]\njob = "a"\ntargets = ["h:1"]') == (
        ScrapeConfig(job="a", targets=("h:1",)),
    )


ONE_JOB = '[[scrape]]\njob = "a"\ntargets = ["h:1"]\n'
WRONG = {
    "scrape = 3": "no list of tables",
    "scrape = [1]": "a job without a name",
    '[[scrape]]\ntargets = ["h:1"]': "a job without a name",
    '[[scrape]]\njob = "a"': "HOST:PORT",
    ONE_JOB + ONE_JOB: "two jobs are called 'a'",
    ONE_JOB + "interval = 3": "unknown setting: interval",
    ONE_JOB + "interval_s = 0": "interval_s must be a number from 0.1",
    ONE_JOB + "interval_s = true": "interval_s must be a number",
    ONE_JOB + "interval_s = 1\ntimeout_s = 2": "timeout_s must be a number from 0.1 to 1",
    ONE_JOB + 'scheme = "ftp"': "scheme must be http or https",
    ONE_JOB + 'path = "m"': "path must be a path",
    ONE_JOB + "labels = { a = 1 }": "labels must be a table of texts",
    ONE_JOB + "max_series = 0": "max_series must be a whole number from 1",
    ONE_JOB + "files = [1]": "files must be a list of texts",
    '[[scrape]]\njob = "a"\ntargets = ["http://u:pw@h/"]': "use bearer_token_file",
    '[[scrape]]\njob = "a"\ntargets = ["h:99999"]': "targets must be",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_setting_is_named(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(text)
    assert WRONG[text] in str(caught.value)
    assert "pw" not in str(caught.value)


def test_urls() -> None:
    assert url_of("h:1", "http", "/m") == "http://h:1/m"
    assert url_of("[::1]:1", "https", "/m") == "https://[::1]:1/m"
    assert url_of("http://h", "https", "/m") == "http://h/m"
    assert url_of("http://h/x?y=z", "https", "/m") == "http://h/x?y=z"
    for text in ("", "h:x", "h:1/m", "h:1 ", "http://", "file:///etc/passwd", "http://h:0/"):
        with pytest.raises(ValueError):
            url_of(text, "http", "/m")


@given(st.text(max_size=30))
def test_any_text_is_a_url_or_a_value_error(text: str) -> None:
    try:
        assert url_of(text, "http", "/m").startswith("http")
    except ValueError:
        assert text != "h:1"


CONFIG = ScrapeConfig(job="llm", targets=("static:1",), labels={"zone": "a"})


def test_labels_of_discovery_say_how_and_as_what_a_target_is_scraped() -> None:
    labels = {
        "__scheme__": "https",
        "__metrics_path__": "/x",
        "__meta_pod": "p",
        "job": "other",
        "zone": "b",
        "instance": "blue",
    }
    target = make_target(CONFIG, "h:1", labels)
    assert target.url == "https://h:1/x"
    assert target.resource() == {
        "service.name": "other",
        "service.instance.id": "blue",
        "zone": "b",
        "server.address": "h",
        "server.port": 1,
        "url.scheme": "https",
        "url.full": "https://h:1/x",
    }
    plain = make_target(CONFIG, "https://h/m?token=secret", {})
    assert plain.resource()["url.full"] == "https://h/m"
    assert (plain.instance, plain.resource()["server.port"]) == ("h", 443)


def written(path: Path, document: object) -> Path:
    """Write a file as a careful program does: under another name, then renamed."""
    text = document if isinstance(document, str) else json.dumps(document)
    other = path.with_suffix(".new")
    other.write_text(text)
    os.replace(other, path)
    return path


def urls(discovery: Discovery) -> list[str]:
    return [
        target.url.removeprefix("http://").removesuffix("/metrics")
        for target in discovery.targets()
    ]


def test_target_files_are_read_again_when_they_change(tmp_path: Path) -> None:
    discovery = Discovery(
        ScrapeConfig(job="llm", targets=("static:1",), files=(str(tmp_path / "*.json"),))
    )
    assert urls(discovery) == ["static:1"]
    path = written(tmp_path / "a.json", [{"targets": ["a:1", "b:1"], "labels": {"x": "1"}}])
    assert urls(discovery) == ["static:1", "a:1", "b:1"]
    assert discovery.targets()[1].labels == (("x", "1"),)
    written(path, [{"targets": ["b:1", "static:1"]}])
    assert urls(discovery) == ["static:1", "b:1"]
    for wrong in (
        "",
        "{",
        "{}",
        "[1]",
        '[{"targets": [1]}]',
        '[{"targets": [], "labels": {"a": 1}}]',
    ):
        failures = discovery.failures
        written(path, wrong)
        assert urls(discovery) == urls(discovery) == ["static:1", "b:1"]
        assert discovery.failures == failures + 1
    written(path, [{"targets": ["c:1", "not a target", "http://u:p@h/"]}])
    assert (urls(discovery), discovery.refused) == (["static:1", "c:1"], 2)
    path.unlink()
    assert (urls(discovery), discovery.refused) == (["static:1"], 0)


def test_a_projected_volume_is_followed_through_its_links(tmp_path: Path) -> None:
    """Kubernetes replaces a link to a folder, so the file's own name never changes."""
    for name, target in (("..1", "a:1"), ("..2", "b:1")):
        (tmp_path / name).mkdir()
        written(tmp_path / name / "targets.json", [{"targets": [target]}])
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "targets.json").symlink_to("..data/targets.json")
    discovery = Discovery(ScrapeConfig(job="llm", files=(str(tmp_path / "targets.json"),)))
    assert urls(discovery) == ["a:1"]
    (tmp_path / "..tmp").symlink_to("..2")
    os.replace(tmp_path / "..tmp", tmp_path / "..data")
    assert urls(discovery) == ["b:1"]


def test_more_targets_than_allowed_are_cut_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", [{"targets": [f"h:{port}" for port in range(1, 10)]}])
    limits = ScrapeLimits(max_targets=4)
    discovery = Discovery(ScrapeConfig(job="llm", files=(str(path),), limits=limits))
    assert (urls(discovery), discovery.refused) == (["h:1", "h:2", "h:3", "h:4"], 5)


def pod(name: str, **changes: object) -> dict[str, object]:
    parts: dict[str, dict[str, object]] = {
        "metadata": {
            "name": name,
            "namespace": "serving",
            "uid": f"uid-{name}",
            "annotations": {"prometheus.io/scrape": "true"},
        },
        "spec": {
            "nodeName": "node-1",
            "containers": [
                {
                    "name": "engine",
                    "ports": [
                        {"containerPort": 8000, "protocol": "TCP", "name": "http"},
                        {"containerPort": 53, "protocol": "UDP"},
                    ],
                },
                {"name": "sidecar"},
            ],
        },
        "status": {"phase": "Running", "podIP": "10.0.0.1"},
    }
    for key, values in changes.items():
        assert isinstance(values, dict)
        parts[key] = {**parts[key], **values}
    return {"apiVersion": "v1", "kind": "Pod", **parts}


ANNOTATED = {
    "prometheus.io/scrape": "true",
    "prometheus.io/port": "9090",
    "prometheus.io/path": "/custom",
    "prometheus.io/scheme": "https",
}
POD_LABELS = {
    "k8s.namespace.name": "serving",
    "k8s.pod.name": "a",
    "k8s.pod.uid": "uid-a",
    "k8s.node.name": "node-1",
}


def test_annotated_running_pods_are_targets() -> None:
    pods = [
        pod("a"),
        pod("b", metadata={"annotations": ANNOTATED}, status={"podIP": "fd00::2"}),
        pod("pending", status={"phase": "Pending"}),
        pod("no-ip", status={"podIP": None}),
        pod("silent", metadata={"annotations": None}),
        pod("off", metadata={"annotations": {"prometheus.io/scrape": "false"}}),
    ]
    found = list(kubernetes_addresses({"apiVersion": "v1", "kind": "List", "items": pods}))
    custom = {"__metrics_path__": "/custom", "__scheme__": "https"}
    assert found == [
        ("10.0.0.1:8000", POD_LABELS),
        (
            "[fd00::2]:9090",
            {**POD_LABELS, **custom, "k8s.pod.name": "b", "k8s.pod.uid": "uid-b"},
        ),
    ]
    assert list(kubernetes_addresses(pod("a"))) == [("10.0.0.1:8000", POD_LABELS)]


ENDPOINTS = {
    "kind": "Endpoints",
    "metadata": {"name": "vllm", "namespace": "serving", "annotations": ANNOTATED},
    "subsets": [
        {
            "addresses": [
                {"ip": "10.0.0.1", "targetRef": {"kind": "Pod", "name": "a"}},
                {"ip": "10.0.0.2"},
            ],
            "notReadyAddresses": [{"ip": "10.0.0.3"}],
            "ports": [{"port": 8000, "name": "http"}],
        }
    ],
}
SLICE = {
    "kind": "EndpointSlice",
    "metadata": {
        "namespace": "serving",
        "labels": {"kubernetes.io/service-name": "vllm"},
        "annotations": {"prometheus.io/scrape": "true"},
    },
    "endpoints": [
        {"addresses": ["10.0.0.1"], "conditions": {"ready": True}},
        {"addresses": ["10.0.0.2"], "conditions": {"ready": False}},
    ],
    "ports": [{"port": 8000}, {"port": 8001}],
}


def test_endpoints_and_slices_are_targets() -> None:
    said = {"k8s.namespace.name": "serving", "k8s.service.name": "vllm"}
    custom = {"__metrics_path__": "/custom", "__scheme__": "https"}
    # A list of one kind leaves the kind out of its items.
    items = [{key: value for key, value in ENDPOINTS.items() if key != "kind"}]
    assert list(kubernetes_addresses({"kind": "EndpointsList", "items": items})) == [
        ("10.0.0.1:9090", {**said, **custom, "k8s.pod.name": "a"}),
        ("10.0.0.2:9090", {**said, **custom}),
    ]
    assert list(kubernetes_addresses({"kind": "List", "items": [SLICE]})) == [
        ("10.0.0.1:8000", said),
        ("10.0.0.1:8001", said),
    ]


def test_a_pod_with_a_wrong_port_is_refused_alone(tmp_path: Path) -> None:
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": "http"}
    pods = [pod("wrong", metadata={"annotations": annotations}), pod("a")]
    path = written(tmp_path / "pods.json", {"kind": "PodList", "items": pods})
    discovery = Discovery(ScrapeConfig(job="llm", kubernetes_files=(str(path),)))
    assert (urls(discovery), discovery.refused) == (["10.0.0.1:8000"], 1)
    written(path, {"kind": "List", "items": [{"kind": "Secret", "data": {}}]})
    assert (urls(discovery), discovery.failures) == (["10.0.0.1:8000"], 1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


def mutated(document: object, data: st.DataObject) -> object:
    """Replace one part of a document, at any depth, by another."""
    if isinstance(document, dict) and document and data.draw(st.integers(0, 9)):
        key = data.draw(st.sampled_from(sorted(document)))
        return {**document, key: mutated(document[key], data)}
    if isinstance(document, list) and document and data.draw(st.integers(0, 9)):
        return [mutated(document[0], data), *document[1:]]
    return data.draw(JSON)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([pod("a"), ENDPOINTS, SLICE, [{"targets": ["h:1"], "labels": {"a": "b"}}]]),
    st.data(),
)
def test_any_document_gives_addresses_or_a_value_error(
    document: object, data: st.DataObject
) -> None:
    wrong = mutated(document, data)
    for reader in (kubernetes_addresses, file_sd_addresses):
        try:
            found = list(reader(wrong))
        except ValueError:
            continue
        assert all(isinstance(address, str) for address, _ in found)
