"""`perfledger counters`: which device counters this machine has, and what they say."""

import argparse
import textwrap
from itertools import groupby
from typing import TYPE_CHECKING

from perfledger.nvml_files import add_recording, recorder
from perfledger.output import WIDTH, add_json, percent, print_json, print_table
from perfledger.schema.errors import NoDataError, UsageError

if TYPE_CHECKING:
    from perfledger.collectors.device.device_sampler import DeviceSampler
    from perfledger.collectors.device.watching import Seen, Watched

EXAMPLES = """\
examples:
  perfledger counters                         GPUs, CPU energy, perf events, for a second
  perfledger counters --seconds 10 --json
  perfledger counters --record gpu.jsonl --seconds 60      keep what NVML answers
  perfledger counters --replay gpu.jsonl      the same again, on any machine

What cannot be read here is named with the reason. A recording holds device and process ids and
what the devices answered, nothing else. `perfledger collect --gpu` keeps counters in the store."""
_MEANINGS = {
    "NOT_SUPPORTED": "the device has none",
    "NO_PERMISSION": "not for this user",
    "LIBRARY_NOT_FOUND": "no NVIDIA driver",
    "DRIVER_NOT_LOADED": "the NVIDIA driver is not loaded",
    "FUNCTION_NOT_FOUND": "the driver is older than it",
}
_SHORTEST_PERIOD_S, _LONGEST_S = 0.01, 86_400


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `counters`."""
    parser = commands.add_parser(
        "counters",
        help="which device counters this machine has",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, metavar="S", help="to watch (default %(default)g)"
    )
    parser.add_argument(
        "--period",
        type=float,
        default=0.1,
        metavar="S",
        help="between two samples (default %(default)g)",
    )
    add_recording(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Watch and print. Raises UsageError on a bad file, NoDataError on one without samples."""
    from perfledger.collectors.device.watching import watch

    if not 0 < args.seconds <= _LONGEST_S or not _SHORTEST_PERIOD_S <= args.period <= _LONGEST_S:
        raise UsageError(f"--seconds and --period: from {_SHORTEST_PERIOD_S} to {_LONGEST_S}")
    sampler = _sampler(args)
    watched = watch(sampler, args.seconds)
    if not watched.samples:
        raise NoDataError("the recording has no samples", where=str(args.replay))
    if args.json:
        print_json(_json(watched, sampler))
        return 0
    _print(watched, sampler)
    if args.record is not None:
        print(f"\nrecorded {watched.samples} samples in {args.record}")
    return 0


def _sampler(args: argparse.Namespace) -> "DeviceSampler":
    from perfledger.collectors.device.device_sampler import DeviceSampler
    from perfledger.collectors.device.device_settings import DeviceSettings

    settings = DeviceSettings(period_s=args.period, replay=args.replay)
    if args.record is None:
        return DeviceSampler(settings)
    return DeviceSampler(settings, recorder(args.record))


def _print(watched: "Watched", sampler: "DeviceSampler") -> None:
    print(_headline(watched, sampler))
    for device, series in watched.series.items():
        rows = [_row(seen) for seen in series.values() if _is_of_device(seen)]
        if rows:
            title = f"{watched.models[device]}  {device}" if device else "this host"
            print_table(f"\n{title}", ("counter", "now", "gained"), rows)
    for event in watched.events:
        at_s = (event.at_ns - watched.first_ns) / 1e9
        print(f"\nat {at_s:.1f} s: {event.name} {event.why}".rstrip(), event.device, sep="\n  ")
    _print_missing(watched)
    if sampler.recording is None:
        print(f"\n{_host_lines()}")


def _print_missing(watched: "Watched") -> None:
    """Print what cannot be read, a line a device and reason."""
    named: dict[tuple[str, str], list[str]] = {}
    for one in watched.unmet:
        named.setdefault((one.device, one.why_not), []).append(one.source)
    for device, group in groupby(sorted(named), key=lambda key: key[0]):
        print(f"\nnone here{': ' * bool(device)}{device}")
        for _, why_not in group:
            meaning = f" ({_MEANINGS[why_not]})" if why_not in _MEANINGS else ""
            line = f"  {why_not}{meaning}: {', '.join(named[device, why_not])}"
            print("\n".join(textwrap.wrap(line, WIDTH, subsequent_indent="    ")))


def _headline(watched: "Watched", sampler: "DeviceSampler") -> str:
    seconds = (watched.last_ns - watched.first_ns) / 1e9
    what = f"{watched.samples} samples in {seconds:.1f} s"
    recording = sampler.recording
    if recording is None:
        return what
    made_up = "synthetic: written by hand, no device said this"
    kind = made_up if recording.synthetic else "recorded"
    cut = ", and cut short" if recording.cut else ""
    note = "".join(filter(str.isprintable, recording.note))
    return "\n".join([f"{what}, replayed ({kind}{cut})", *textwrap.wrap(note, WIDTH)])


def _host_lines() -> str:
    """Return which of the host sampler's sources are here: CPU frequency, heat, NUMA and more."""
    present, absent = _host_sources()
    lines = textwrap.wrap(f"host sampler: {', '.join(present)}", WIDTH, subsequent_indent="  ")
    lines += [f"  no {name}: {why}" for name, why in absent.items()]
    return "\n".join(lines)


def _host_sources() -> tuple[list[str], dict[str, str]]:
    from perfledger.collectors.host.host_sampler import HostSampler
    from perfledger.collectors.host.host_settings import HostSettings
    from perfledger.collectors.host.host_sources import SOURCES

    sampler = HostSampler(HostSettings())
    for slow in (True, False):
        sampler.read(slow)
    sampler.close()
    return [one.name for one in SOURCES if one.name not in sampler.absent], sampler.absent


def _is_of_device(seen: "Seen") -> bool:
    return not seen.metric.name.startswith("perfledger.device.")


def _row(seen: "Seen") -> tuple[str, str, str]:
    is_gpu = ("hw.type", "gpu") in seen.attributes  # its name is in the title
    hidden = ("hw.id", "hw.type", "hw.name") if is_gpu else ("hw.id", "hw.type")
    own = [str(value) for key, value in seen.attributes if key not in hidden]
    name = seen.metric.name.removeprefix("perfledger.")
    return (
        " ".join([name, *own]),
        shown(seen.last, seen.metric.unit),
        "" if seen.change is None else shown(seen.change, seen.metric.unit),
    )


def shown(value: int | float, unit: str) -> str:
    """Return a value with a unit that suits its size; a share (a float of unit 1) as percent."""
    match unit:
        case "1":
            return percent(value) if isinstance(value, float) else str(value)
        case "By":
            return _bytes(value)
        case "By/s":
            return f"{value / 1e9:,.2f} GB/s"
        case "Hz":
            return f"{value / 1e6:,.0f} MHz"
        case "ns":
            return f"{value / 1e6:,.1f} ms"
    number = f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
    return number if unit.startswith("{") else f"{number} {'°C' if unit == 'Cel' else unit}"


def _bytes(value: float) -> str:
    for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 2**power:
            return f"{value / 2**power:,.2f} {name}"
    return f"{value:,.0f} B"


def _json(watched: "Watched", sampler: "DeviceSampler") -> dict[str, object]:
    recording = sampler.recording
    present, absent = _host_sources() if recording is None else ([], {})
    return {
        "replay": recording and {"synthetic": recording.synthetic, "cut": recording.cut},
        "samples": watched.samples,
        "seconds": (watched.last_ns - watched.first_ns) / 1e9,
        "driver": watched.driver or None,
        "devices": [
            {"id": uuid, "model": model, "counters": _counters(watched, uuid)}
            for uuid, model in watched.models.items()
        ],
        "host": {
            "counters": _counters(watched, ""),
            "sampler": {"present": present, "absent": absent},
        },
        "absent": [
            {"device": one.device or None, "source": one.source, "reason": one.why_not}
            for one in watched.absences
            if one.why_not
        ],
        "events": [
            {"name": event.name, "device": event.device, "error": event.why or None}
            for event in watched.events
        ],
    }


def _counters(watched: "Watched", device: str) -> list[dict[str, object]]:
    return [
        {
            "metric": seen.metric.name,
            "unit": seen.metric.unit,
            "attributes": dict(seen.attributes),
            "value": seen.last,
            "gained": seen.change,
        }
        for seen in watched.series.get(device, {}).values()
        if _is_of_device(seen)
    ]
