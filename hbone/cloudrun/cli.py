"""`hbone cloudrun`: a stand-in for Cloud Run's front end on one's own machine."""

from __future__ import annotations

import argparse
import asyncio
import logging
import shlex
import signal
import tempfile
from pathlib import Path

from hbone.cloudrun.front_end import FrontEnd
from hbone.cloudrun.instance import Instance
from hbone.cloudrun.limits import FrontEndLimits
from hbone.cloudrun.metadata import MetadataServer
from shared import loop
from shared.address import Address, check_host_name
from shared.atomic_files import PRIVATE_MODE, write_atomically
from shared.credentials.certificates.authority import Authority
from shared.credentials.token_sources.jwks import KeySet
from shared.errors import EXIT_OK, UnavailableError, UsageError
from shared.ops import log as logs
from shared.trust.jwt_check import GOOGLE_ISSUER, Issuer, TokenChecker

log = logging.getLogger("hbone.cloudrun")

CALLER = "gateway@local.iam.gserviceaccount.com"
"""The account in the metadata server's tokens."""


def run(options: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit code."""
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
        else TokenChecker(
            keys.keys if keys else issuer.public_keys, {options.audience}, options.issuer or GOOGLE_ISSUER
        )
    )
    limits = FrontEndLimits(
        request_timeout_s=options.timeout,
        streams_per_connection=options.max_streams,
        header_bytes=options.max_header_bytes,
        start_wait_s=options.start_wait,
        concurrency=options.concurrency,
    )
    container = _address("--container", options.container)
    instance = Instance(_command(options.start), container) if options.start is not None else None
    certificate, key, ca = _certificate(folder, host)
    front_end = FrontEnd(
        container,
        checker,
        limits,
        keys,
        invokers=options.invoker,
        is_internal=options.ingress == "internal",
        instance=instance,
    )
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
        if instance is not None:
            await instance.close()
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
        write_atomically(key, pair.key_pem, PRIVATE_MODE)
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


def _command(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--start {text}: {error}") from error
    if not words:
        raise UsageError("--start is empty: write the command that starts the container")
    return words


def _address(flag: str, text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text}: {error}") from error
