"""The flags of `perfledger collect`, and what they say as one checked object."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perfledger.collectors.transport.address import Address
from perfledger.schema.errors import UsageError
from perfledger.selection import add_store

if TYPE_CHECKING:
    from perfledger.collectors.serving import Endpoints, Transport
    from perfledger.collectors.transport.access import Token

# Tables of the file that are no flags; each is read by what it configures. Of one there may be
# several.
TABLES: Mapping[str, object] = {
    "scrape": [],
    "host": {},
    "wait_states": {},
    "device": {},
    "sampling": {},
    "forward": {},
}
_LONGEST_SETTLE_S = 120
_LARGEST_REQUEST_MIB = 1024  # the scanner counts bytes in 32 bits
_OFF = "off"


@dataclass(frozen=True)
class CollectOptions:
    """What one `perfledger collect` is asked to do."""

    store: str
    namespace: str
    endpoints: "Endpoints"
    transport: "Transport"
    tokens: "tuple[Token, ...]"
    settle_s: float
    buffer_bytes: int
    log_bytes: int
    low_water_bytes: int
    log_folder: Path | None
    tables: Mapping[str, object]
    # Where relative paths in the tables start.
    folder: Path

    @property
    def namespaces(self) -> list[str]:
        """Return every namespace that someone may send to: the tokens', or the one named.

        The one named comes first, if it is among them, and else the first by name; what the
        collector scrapes and samples itself goes there.
        """
        found = {token.namespace for token in self.tokens} or {self.namespace}
        return sorted(found, key=lambda name: (name != self.namespace, name))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag; each is a key of `[collect]` in the file too."""
    parser.add_argument(
        "--config", default="", metavar="FILE", help="TOML file in place of perfledger.toml"
    )
    add_store(parser)
    _add_addresses(parser.add_argument_group("addresses"))
    _add_access(parser.add_argument_group("who may send"))
    _add_browsers(parser.add_argument_group("browsers"))
    _add_limits(parser.add_argument_group("limits"))
    _add_devices(parser.add_argument_group("devices"))
    parser.set_defaults(tables=dict(TABLES))


def _add_addresses(group: "argparse._ArgumentGroup") -> None:
    for flag, default, meaning in (
        ("--otlp-grpc", "127.0.0.1:4317", "where to take OTLP over gRPC"),
        ("--otlp-http", "127.0.0.1:4318", "where to take OTLP over HTTP"),
        ("--metrics", "127.0.0.1:9464", "where to show /metrics and /health, or off"),
    ):
        help_text = f"{meaning} (default {default})"
        group.add_argument(flag, default=default, metavar="HOST:PORT", help=help_text)


def _add_access(group: "argparse._ArgumentGroup") -> None:
    for flag, meaning in (
        ("--tokens-file", "TOML file of bearer tokens, which decide the namespace"),
        ("--tls-cert", "PEM certificate, for TLS"),
        ("--tls-key", "PEM key of --tls-cert"),
        ("--tls-client-ca", "PEM certificates that must have signed a client's"),
    ):
        group.add_argument(flag, default="", metavar="FILE", help=meaning)
    group.add_argument(
        "--insecure",
        action="store_true",
        help="listen beyond loopback without tokens under TLS or client certificates",
    )


def _add_browsers(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--cors-origins",
        default="",
        metavar="A,B",
        help="pages that may send from a browser, such as https://*.example.org (default none)",
    )
    group.add_argument(
        "--cors-headers",
        default="authorization,content-encoding,content-type",
        metavar="A,B",
        help="request headers that they may use (default %(default)s)",
    )
    group.add_argument(
        "--cors-max-age",
        type=int,
        default=7200,
        metavar="SECONDS",
        help="how long a browser may remember that (default %(default)s)",
    )


def _add_limits(group: "argparse._ArgumentGroup") -> None:
    for flag, kind, default, unit, meaning in (
        ("--max-request-mib", int, 64, "MIB", "largest request, inflated"),
        ("--read-timeout", float, 30.0, "SECONDS", "within which a request must be whole"),
        ("--head-timeout", float, 10.0, "SECONDS", "within which its HTTP head must be whole"),
        ("--max-connections", int, 1000, "N", "HTTP clients at once"),
        ("--settle", float, 5.0, "SECONDS", "to wait for a request's spans before its row"),
        ("--buffer-mib", int, 384, "MIB", "of requests and rows to hold in memory, then refuse"),
        ("--log-mib", int, 4096, "MIB", "that each write-ahead log may take, then refuse"),
        ("--low-water-mib", int, 256, "MIB", "free on the log's disk below which to refuse"),
    ):
        help_text = f"{meaning} (default {default:g})"
        group.add_argument(flag, type=kind, default=default, metavar=unit, help=help_text)
    group.add_argument(
        "--log-folder",
        default="",
        metavar="FOLDER",
        help="where the write-ahead log is kept (default beside the store's files, for S3 in"
        " ./perfledger-log)",
    )


def _add_devices(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--gpu",
        action="store_true",
        help="sample counters of this machine's GPUs (NVML), RAPL energy and perf events",
    )
    group.add_argument(
        "--gpu-period",
        type=float,
        default=0.1,
        metavar="SECONDS",
        help="between two samples, where [device] of the file says nothing (default %(default)s)",
    )


def _tables(args: argparse.Namespace) -> Mapping[str, object]:
    """Return the tables of the file; --gpu is an empty table [device] that is turned on."""
    tables = dict(args.tables)
    if args.gpu or tables["device"]:
        tables["device"] = {"period_s": args.gpu_period, **tables["device"]}
    return tables


def options_of(args: argparse.Namespace) -> CollectOptions:
    """Return what the flags ask for; raises UsageError where they cannot be, or are not safe."""
    from perfledger.collectors.transport.access import read_tokens

    if not 0 < args.settle <= _LONGEST_SETTLE_S:
        raise UsageError(f"--settle must be more than 0 and at most {_LONGEST_SETTLE_S} seconds")
    _check_positive(args)
    if args.max_request_mib > _LARGEST_REQUEST_MIB:
        raise UsageError(f"--max-request-mib may be at most {_LARGEST_REQUEST_MIB}")
    tokens = read_tokens(Path(args.tokens_file)) if args.tokens_file else ()
    options = CollectOptions(
        store=args.store,
        namespace=args.namespace,
        endpoints=_endpoints(args),
        transport=_transport(args),
        tokens=tokens,
        settle_s=args.settle,
        buffer_bytes=args.buffer_mib * 2**20,
        log_bytes=args.log_mib * 2**20,
        low_water_bytes=args.low_water_mib * 2**20,
        log_folder=Path(args.log_folder) if args.log_folder else None,
        tables=_tables(args),
        folder=Path(args.config).parent if args.config else Path(),
    )
    _check_exposure(options, args.insecure)
    return options


def _check_positive(args: argparse.Namespace) -> None:
    amounts = ("max_request_mib", "max_connections", "buffer_mib", "log_mib")
    for name in ("read_timeout", "head_timeout", *amounts):
        if not getattr(args, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} must be more than 0")
    if args.low_water_mib < 0:
        raise UsageError("--low-water-mib must be 0 or more")


def _endpoints(args: argparse.Namespace) -> "Endpoints":
    from perfledger.collectors.serving import Endpoints

    metrics = None if args.metrics == _OFF else Address.parse(args.metrics, "--metrics")
    return Endpoints(
        Address.parse(args.otlp_grpc, "--otlp-grpc"),
        Address.parse(args.otlp_http, "--otlp-http"),
        metrics,
    )


def _transport(args: argparse.Namespace) -> "Transport":
    from perfledger.collectors.serving import Transport
    from perfledger.collectors.transport.cors import Cors
    from perfledger.collectors.transport.tls import TlsFiles

    tls = None
    if args.tls_cert or args.tls_key or args.tls_client_ca:
        if not (args.tls_cert and args.tls_key):
            raise UsageError("TLS needs both --tls-cert and --tls-key")
        client_ca = Path(args.tls_client_ca) if args.tls_client_ca else None
        tls = TlsFiles(Path(args.tls_cert), Path(args.tls_key), client_ca)
        tls.check()
    return Transport(
        request_bytes=args.max_request_mib * 2**20,
        read_timeout_s=args.read_timeout,
        connections=args.max_connections,
        head_timeout_s=args.head_timeout,
        tls=tls,
        cors=Cors(_words(args.cors_origins), _words(args.cors_headers), args.cors_max_age),
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (word.strip() for word in text.split(","))))


def _check_exposure(options: CollectOptions, insecure: bool) -> None:
    from perfledger.collectors.transport.access import check_exposure

    endpoints, tls = options.endpoints, options.transport.tls
    checks_clients = tls is not None and tls.client_ca is not None
    for flag, address, has_tokens in (
        ("--otlp-grpc", endpoints.grpc, bool(options.tokens)),
        ("--otlp-http", endpoints.http, bool(options.tokens)),
        ("--metrics", endpoints.metrics, False),  # it asks for none
    ):
        if address is not None:
            check_exposure(
                address,
                flag,
                has_tokens=has_tokens,
                has_tls=tls is not None,
                checks_clients=checks_clients,
                insecure=insecure,
            )
