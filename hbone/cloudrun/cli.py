"""`hbone cloudrun`: a stand-in for Cloud Run's front end on one's own machine."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shlex
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hbone.cloudrun.front_end import FrontEnd, FrontEndLimits
from hbone.cloudrun.metadata import MetadataServer
from shared import loop
from shared.address import Address, check_host_name
from shared.credentials.certificates.authority import Authority
from shared.credentials.token_sources.jwks import KeySet
from shared.errors import EXIT_OK, UnavailableError, UsageError
from shared.ops import log as logs
from shared.trust.jwt_check import GOOGLE_ISSUER, Issuer, TokenChecker

T = TypeVar("T", int, float)

log = logging.getLogger("hbone.cloudrun")

CALLER = "gateway@local.iam.gserviceaccount.com"
"""Whom the metadata server's tokens name."""

MAX_TIMEOUT_S = 3600.0
"""Cloud Run's longest request timeout."""

MAX_COUNT = 1 << 20
"""What no limit of Cloud Run comes near; bytes of headers, streams, requests."""


def run(arguments: Sequence[str]) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit code."""
    options = _parser().parse_args(arguments)
    logs.setup(options.log_format, "info", component="cloudrun")
    if options.dir is not None:
        return loop.run(_serve(options, options.dir))
    with tempfile.TemporaryDirectory(prefix="hbone-cloudrun-") as folder:
        return loop.run(_serve(options, Path(folder)))


async def _serve(options: argparse.Namespace, folder: Path) -> int:
    issuer = Issuer()
    host = _host(options.audience)
    keys = _keys(options.keys)
    checker = (
        None
        if options.allow_unauthenticated
        else TokenChecker(keys.keys if keys else issuer.public_keys, {options.audience}, options.issuer)
    )
    limits = FrontEndLimits(
        request_timeout_s=options.timeout,
        streams_per_connection=options.max_streams,
        header_bytes=options.max_header_bytes,
        concurrency=options.concurrency,
    )
    certificate, key, ca = _certificate(folder, host)
    front_end = FrontEnd(_address("--container", options.container), checker, limits, keys)
    metadata = MetadataServer(issuer, CALLER)
    stop = asyncio.Event()
    running_loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        running_loop.add_signal_handler(number, stop.set)
    try:
        listening = await front_end.start(_address("--listen", options.listen), certificate, key)
        metadata_address = await metadata.start(_address("--metadata", options.metadata))
        log.info("container %s, audience %s, certificates in %s", options.container, options.audience, folder)
        # For `eval`, and for hgate's file: connect, ca, token.
        print(f"CLOUDRUN_ADDRESS={listening}")
        print(f"CLOUDRUN_CA={shlex.quote(str(ca))}")
        print(f"CLOUDRUN_URL=https://{host}")
        print(f"GCE_METADATA_HOST={metadata_address}", flush=True)
        await stop.wait()
    finally:
        front_end.close()
        await metadata.close()
    return EXIT_OK


def _certificate(folder: Path, host: str) -> tuple[Path, Path, Path]:
    """A throw-away certificate for `host` and this machine: its file, its key's, and the CA's to trust."""
    authority = Authority.create("cloudrun.local")
    names = dict.fromkeys((host, "localhost"))
    pair = authority.issue(dns_names=names, ip_addresses=("127.0.0.1", "::1"), client=False)
    certificate, key, ca = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            os.fchmod(file.fileno(), 0o600)  # it may have been there before
            file.write(pair.key_pem)
        certificate.write_bytes(pair.certificate_pem)
        ca.write_bytes(authority.root_pem)
    except OSError as error:
        raise UnavailableError(f"--dir {folder}: {error.strerror}") from error
    return certificate, key, ca


def _host(audience: str) -> str:
    scheme, _, rest = audience.partition("://")
    host = rest.partition("/")[0].partition(":")[0]
    try:
        check_host_name(host)
    except ValueError as error:
        raise UsageError(f"--audience {audience}: {error}; write the service's URL, https://HOST") from error
    if scheme != "https":
        raise UsageError(f"--audience {audience}: write the service's URL, https://HOST")
    return host


def _keys(source: str | None) -> KeySet | None:
    try:
        return KeySet(source) if source else None
    except ValueError as error:
        raise UsageError(f"--keys {source}: {error}") from error


def _address(flag: str, text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text}: {error}") from error


def _within(most: T) -> Callable[[str], T]:
    """Reads a number of `most`'s kind above 0 and up to `most`."""

    def read(text: str) -> T:
        try:
            number = type(most)(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text} is no number") from error
        if not 0 < number <= most:
            raise argparse.ArgumentTypeError(f"{text} is not above 0 and up to {most}")
        return number

    return read


def _parser() -> argparse.ArgumentParser:
    default = FrontEndLimits()
    parser = argparse.ArgumentParser(
        prog="hbone cloudrun",
        description="A stand-in for Cloud Run's front end, with its limits, and a metadata server that mints "
        "the tokens it takes. Prints what a gateway needs to reach it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--listen", default="127.0.0.1:8443", metavar="ADDR", help="TLS with HTTP/2")
    add("--container", default="127.0.0.1:15009", metavar="ADDR", help="the container's port, h2c")
    add("--metadata", default="127.0.0.1:8444", metavar="ADDR", help="the metadata server")
    add("--audience", default="https://hello.a.run.app", metavar="URL", help="the service's URL")
    add("--allow-unauthenticated", action="store_true", help="ask for no token")
    add("--keys", metavar="URL|FILE", help="take tokens of this key set (JWKS), not the metadata server's")
    add("--issuer", default=GOOGLE_ISSUER, metavar="NAME", help="who has to have made them")
    timeout_s, seconds = default.request_timeout_s, _within(MAX_TIMEOUT_S)
    add("--timeout", type=seconds, default=timeout_s, metavar="S", help="request timeout")
    streams, size, count = default.streams_per_connection, default.header_bytes, _within(MAX_COUNT)
    add("--max-streams", type=count, default=streams, metavar="N", help="streams per connection")
    add("--max-header-bytes", type=count, default=size, metavar="N", help="URL and headers")
    add("--concurrency", type=count, default=default.concurrency, metavar="N", help="requests at once")
    add("--dir", type=Path, metavar="DIR", help="where its certificates go; None: a temporary folder")
    add("--log-format", choices=("json", "text"), help="None: text on a terminal, else json")
    return parser
