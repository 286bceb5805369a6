"""A whole mesh on loopback: the real commands as processes, each test choosing what is at its two ends.

Owned here: certificates for the workload and its callers, krun, the Cloud Run stand-in and hgate on free
ports, what their logs must not have in the end, and what happens where a program is missing. Not owned: how a
command is run and its lines are read (`hbone.demo.processes`), and the app and the clients, which are the
tests' (`tests/path`).

    client → hgate → hbone cloudrun → krun → its mTLS end (`inbound`) → app
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

from agent.mtls.envoy import find_binary
from bench.accounting import descendants
from hbone.demo.mesh import CLIENT_FILES, HOST, SERVICE_URL, SNI, TRUST_DOMAIN
from hbone.demo.processes import Process, Record
from shared.address import Address
from shared.credentials.certificates.authority import Authority, KeyPair
from shared.errors import EXIT_OK, EXIT_SIGTERM
from shared.ops.access_log import LOGGER as ACCESS_LOGGER
from shared.trust.spiffe import SpiffeId
from tests.support.network import free_port as free_port

PATIENCE_S = 60
"""Longer than anything on loopback takes, even on a busy machine; reached only by a test that fails."""

INBOUNDS = ("envoy", "builtin")
"""What can end the mTLS in the container."""

MAX_STREAMS = 250
"""Streams of one HTTP/2 connection, at the stand-in and at hgate: 200 tunnels are to fit."""

CONCURRENCY = 1000
"""Requests at once that the stand-in gives the container: Cloud Run's largest setting."""

WORKLOAD = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "hello")
CALLER = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "client")

_GATEWAY_FILE = f"""\
listen: ["127.0.0.1:0"]
admin: "127.0.0.1:0"
metrics: off
health: off
limits:
  streams_per_connection: {MAX_STREAMS}
routes:
  - host: "{HOST}"
    tunnel: "{SERVICE_URL}/_hbone/15003"
    connect: "{{front_end}}"
    ca: "{{ca}}"
    token: {{{{audience: "{SERVICE_URL}"}}}}
"""


def find_program(name: str) -> str:
    """The path of `name`; a test that needs what is not installed is skipped, and fails in CI."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin") or _missing(name)


def find_envoy() -> str:
    """The same for Envoy, wherever krun would find it."""
    return str(find_binary("", os.environ.get("PATH")) or _missing("envoy"))


def _missing(name: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(f"{name} is not installed")
    pytest.skip(f"{name} is not installed")


@dataclass(frozen=True, slots=True)
class Identity:
    """Files with which a caller proves who it is, and knows whom to trust."""

    certificates: Path
    key: Path
    roots: Path


@dataclass(frozen=True, slots=True)
class World:
    """The running mesh, made by `running`."""

    folder: Path
    inbound: str
    """What ends the mTLS: envoy, builtin, or none for tests of other targets."""
    mesh: Authority
    """Issues the certificates of the workload and of allowed callers."""
    caller: Identity
    """An allowed caller."""
    container: Address
    """krun's tunnel port, HTTP/2 without TLS."""
    front_end: Address
    """The Cloud Run stand-in, to whose certificate `front_end_ca` leads."""
    front_end_ca: Path
    metadata: str
    """HOST:PORT for GCE_METADATA_HOST."""
    gateway: Address
    """Where hgate takes mTLS connections."""
    admin: Address
    """hgate's admin port."""
    krun: Process
    cloudrun: Process
    hgate: Process
    killed: set[str] = field(default_factory=set)
    """Names of processes of which no order is expected any more."""

    def kill(self, process: Process) -> None:
        """Ends one of the three at once with all that it has started, as the end of a container does."""
        self.killed.add(process.name)
        for pid in descendants(process._process.pid):
            os.kill(pid, signal.SIGKILL)

    def identity(self, name: str, authority: Authority, pair: KeyPair) -> Identity:
        """Writes `pair`, and the mesh's root to trust, into files of their own under `name`."""
        authority.write(self.folder / name, pair)
        certificates, key, _ = (self.folder / name / file for file in CLIENT_FILES)
        return Identity(certificates, key, self.caller.roots)


@contextmanager
def running(
    folder: Path,
    *,
    inbound: str,
    app: Address | Sequence[str],
    environ: Mapping[str, str] | None = None,
    mesh: Authority | None = None,
) -> Iterator[World]:
    """Runs a mesh in `folder` until the block ends.

    `app` is where an app listens already, or the command with which krun is to start one. `environ` is for
    krun, beside or instead of what it is told here. `mesh` is who issues certificates, a new authority if it
    is not given. In the end each process has to stop in order, and none
    may have logged an error; AssertionError says what was wrong.
    """
    if inbound == "envoy":
        find_envoy()
    mesh = mesh or Authority.create(TRUST_DOMAIN)
    # curl and browsers want the name that they connect to; a sidecar looks at the SPIFFE ID only.
    mesh.write(folder / "workload", mesh.issue(WORKLOAD, dns_names=(SNI, HOST)))
    mesh.write(folder / "caller", mesh.issue(CALLER))
    killed: set[str] = set()
    with ExitStack() as block:
        krun = Process("krun", *_krun(folder, inbound, app, environ or {}), folder)
        # As a launcher krun ends with the app's exit code, which SIGTERM has ended (signal(7)).
        block.callback(_stop, krun, folder, killed, EXIT_OK if isinstance(app, Address) else EXIT_SIGTERM)
        container = Address.parse(word_after(krun, "tunnels on "))
        cloudrun = Process("cloudrun", _cloudrun(folder, container), {}, folder)
        block.callback(_stop, cloudrun, folder, killed)
        front_end, ca, metadata = (
            printed(cloudrun, name) for name in ("CLOUDRUN_ADDRESS", "CLOUDRUN_CA", "GCE_METADATA_HOST")
        )
        file = folder / "hgate.yaml"
        file.write_text(_GATEWAY_FILE.format(front_end=front_end, ca=ca))
        arguments = ["-m", "gateway", "--config", str(file), "--log-format", "json"]
        hgate = Process("hgate", arguments, {"GCE_METADATA_HOST": metadata}, folder)
        block.callback(
            _stop, hgate, folder, killed
        )  # called first: the client's side goes before the container's
        yield World(
            folder=folder,
            inbound=inbound,
            mesh=mesh,
            caller=Identity(*(folder / "caller" / file for file in CLIENT_FILES)),
            container=container,
            front_end=Address.parse(front_end),
            front_end_ca=Path(ca),
            metadata=metadata,
            gateway=Address.parse(word_after(hgate, "listening on ")),
            admin=Address.parse(word_after(hgate, "admin on ")),
            krun=krun,
            cloudrun=cloudrun,
            hgate=hgate,
            killed=killed,
        )


def _krun(
    folder: Path, inbound: str, app: Address | Sequence[str], environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """krun's arguments and environment."""
    where, command = (app, ()) if isinstance(app, Address) else (Address("127.0.0.1", free_port()), app)
    told = {
        "XDS_ADDR": "-",
        "HBONE_LISTEN": "127.0.0.1:0",
        "HBONE_INBOUND": inbound,
        "HBONE_INBOUND_LISTEN": "127.0.0.1:0",
        "HBONE_ENVOY_ADMIN": "127.0.0.1:0",
        "HBONE_APP": str(where),
        "HBONE_CERTS": str(folder / "workload"),
        "HBONE_ALLOW": f"spiffe://{TRUST_DOMAIN}/ns/demo/sa/*",
        "HBONE_LOG_FORMAT": "json",
    }
    if not command:
        told["HBONE_STARTUP_PROBE"] = "-"  # the app sees its clients only
    return ["-m", "agent", *command], {**told, **environ}


def _cloudrun(folder: Path, container: Address) -> list[str]:
    return [
        *("-m", "hbone", "cloudrun", "--log-format", "json", "--dir", str(folder / "cloudrun")),
        *("--listen", "127.0.0.1:0", "--metadata", "127.0.0.1:0"),
        *("--container", str(container), "--audience", SERVICE_URL),
        *("--max-streams", str(MAX_STREAMS), "--concurrency", str(CONCURRENCY)),
    ]


def _stop(process: Process, folder: Path, killed: set[str], expected_code: int = EXIT_OK) -> None:
    code = process.stop()
    if process.name in killed:
        return
    wrong = [line for line in (folder / f"{process.name}.log").read_text().splitlines() if is_error(line)]
    assert not wrong, f"{process.name} logged: {wrong[:3]}"
    assert code == expected_code, f"{process.name} ended with exit code {code}"


def is_error(line: str) -> bool:
    """A logged error or a traceback; but not the end of a tunnel, whatever its client or app did to it."""
    try:
        record: dict[str, object] = json.loads(line)
    except ValueError:
        return line.startswith("Traceback ")
    return record.get("severity") in ("ERROR", "CRITICAL") and record.get("logger") != ACCESS_LOGGER


# What processes say.


def dump(admin: Address, path: str) -> Any:
    """A dump of hgate's admin port."""
    with urllib.request.urlopen(f"http://{admin}{path}", timeout=PATIENCE_S) as answer:
        return json.load(answer)


def word_after(process: Process, beginning: str) -> str:
    """The word that follows `beginning` in the log, once it is there."""
    record = process.wait_for(lambda record: said(record).startswith(beginning), PATIENCE_S)
    return said(record).removeprefix(beginning).split()[0]


def printed(process: Process, name: str) -> str:
    """The value of a NAME=VALUE that was printed for a shell, once it is there."""
    record = process.wait_for(lambda record: said(record).startswith(f"{name}="), PATIENCE_S)
    (assignment,) = shlex.split(said(record))
    return assignment.partition("=")[2]


def count(process: Process, beginning: str, times: int) -> None:
    """Returns when a process has said something so many times."""
    seen: set[int] = set()

    def wanted(record: dict[str, Any]) -> bool:
        if said(record).startswith(beginning):
            seen.add(id(record))
        return len(seen) >= times

    process.wait_for(wanted, PATIENCE_S)


def times(process: Process, beginning: str) -> int:
    """How many times a process has said something so far."""
    return sum(said(record).startswith(beginning) for record in list(process._records))


def said(record: Record) -> str:
    """A line's text, whether it was logged or just printed."""
    return str(record.get("message") or record.get("text") or "")
