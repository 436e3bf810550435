"""What sampling device counters costs, at 10 Hz: the sampler alone, and the collector with it.

Where there is a GPU it is sampled as it is. Else the real binding (pynvml) calls a stand-in library
compiled from tests/data/nvml/stand_in.c, so that all is there but the driver's own time in a call.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves it out
from collect_servers import collector  # noqa: E402
from recording import write_result  # noqa: E402

GOAL = "sampling at 10 Hz takes under 0.5 % of one core"
STAND_IN = Path(__file__).parent.parent / "tests" / "data" / "nvml" / "stand_in.c"
PERIOD_S = 0.1

# Run in a process of its own: the dynamic linker reads LD_LIBRARY_PATH only at a start.
SAMPLE = """
import json, sys, time
from perfledger.collectors.device.device_sampler import DeviceSampler
from perfledger.collectors.device.device_settings import DeviceSettings

sampler = DeviceSampler(DeviceSettings(period_s=float(sys.argv[2])))
for _ in range(20):
    sampler.sample()
costs_ns, bytes_sent = [], 0
for _ in range(int(sys.argv[1])):
    time.sleep(float(sys.argv[2]))
    start_ns = time.thread_time_ns()
    bytes_sent += len(sampler.sample() or b"")
    costs_ns.append(time.thread_time_ns() - start_ns)
start_ns = time.thread_time_ns()
for _ in range(200):
    sampler.sample()
warm_us = (time.thread_time_ns() - start_ns) / 200 / 1000
absent = sorted({one.source for one in sampler.absences() if one.why_not})
print(json.dumps({"gpus": len(sampler.gpus.gpus), "costs_ns": costs_ns, "bytes": bytes_sent,
                  "back_to_back_us": warm_us, "absent": absent}))
"""


def library_folder(folder: Path) -> str:
    """Return where the NVML to use lies: "" for this machine's own, else the stand-in's folder."""
    from perfledger.collectors.device.nvml_calls import NvmlLibrary
    from perfledger.collectors.device.nvml_devices import NvmlDevices

    devices = NvmlDevices(NvmlLibrary())
    devices.look(0)
    devices.close()
    if devices.gpus:
        return ""
    compiler = shutil.which("cc")
    if compiler is None:
        raise SystemExit("no GPU here, and no C compiler for the stand-in")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, STAND_IN], check=True)
    return str(folder)


def variables(library: str, gpus: int) -> dict[str, str]:
    return {"LD_LIBRARY_PATH": library, "STAND_IN_GPUS": str(gpus)} if library else {}


def sampler_alone(library: str, gpus: int, samples: int) -> dict[str, Any]:
    """Return the CPU time of samples of the sampler's thread, paced as in a collector.

    Back to back the caches are warm: what is more in between is the machine's waking up.
    """
    command = [sys.executable, "-P", "-c", SAMPLE, str(samples), str(PERIOD_S)]
    environment = os.environ | variables(library, gpus)
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout)
    costs_us = [cost / 1000 for cost in found.pop("costs_ns")]
    mean_us = statistics.fmean(costs_us)
    return found | {
        "samples": samples,
        "us_per_sample": {
            "mean": round(mean_us, 1),
            "p10": round(statistics.quantiles(costs_us, n=10)[0], 1),
            "p50": round(statistics.median(costs_us), 1),
            "max": round(max(costs_us), 1),
        },
        "percent_of_a_core": round(100 * mean_us / 1e6 / PERIOD_S, 3),
    }


def collector_shares(library: str, gpus: int, seconds: float, folder: Path) -> list[float]:
    """Return the percent of a core that an idle collector takes, without and with counters."""
    shares = []
    for at, flags in enumerate(((), ("--gpu", "--gpu-period", str(PERIOD_S)))):
        place = folder / f"{gpus}-{at}"
        with collector(place, *flags, **variables(library, gpus)) as server:
            server.settle(5)
            before_ns, start_ns = server.cpu_ns(), time.monotonic_ns()
            time.sleep(seconds)
            used_ns, took_ns = server.cpu_ns() - before_ns, time.monotonic_ns() - start_ns
            shares.append(round(100 * used_ns / took_ns, 3))
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=30, help="to watch a collector")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8], help="of the stand-in")
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-counters-") as folder:
        library = library_folder(Path(folder))
        for gpus in asked.gpus if library else [0]:
            alone = sampler_alone(library, gpus, asked.samples)
            without, with_counters = collector_shares(library, gpus, asked.seconds, Path(folder))
            whole = {
                "without": without,
                "with": with_counters,
                "difference": round(with_counters - without, 3),
            }
            name = f"{alone['gpus']} gpus"
            found[name] = {"sampler": alone, "collector_percent": whole}
            print(name, found[name], flush=True)
    device = "stand-in library, no device" if library else "this machine's"
    write_result("counters", GOAL, {"nvml": device, "period_s": PERIOD_S, **found})


if __name__ == "__main__":
    main()
