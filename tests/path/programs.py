"""Programs that are not ours: running them, what they carry, and an Envoy as the client's sidecar."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hbone.demo.mesh import SNI
from hbone.demo.processes import Process
from shared.address import Address
from tests.path.tls_client import Mesh
from tests.support.envoy_config import Json, bootstrap, cluster_of, tcp_chain, tls_socket
from tests.support.world import PATIENCE_S, WORKLOAD, Identity, find_envoy, find_program, said

MUCH_BYTES = 64 << 20
"""Many times every window and buffer on the way."""

# The demo's processes are Pythons; this one turns into the program that its arguments name.
_BECOME = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"


def run(*command: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Runs a program to its end; its output is kept, and its exit code is the caller's to check."""
    return subprocess.run(command, input=stdin, capture_output=True, timeout=PATIENCE_S)


def start(name: str, command: Sequence[str | Path], folder: Path) -> Process:
    """Starts a program; its lines go to `folder`/`name`.log and are records with `text`."""
    return Process(name, ["-c", _BECOME, *map(str, command)], {}, folder)


def random_file(path: Path, size: int) -> Path:
    """Writes `size` bytes that no compression and no luck could get right."""
    path.write_bytes(os.urandom(size))
    return path


def sha256(path: Path) -> str:
    """The digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def s_client(gateway: Address, caller: Identity, name: str, *more: str) -> list[str | Path]:
    """OpenSSL's command: -quiet stays until the server ends, and takes Q and R in the input for what they
    are."""
    return [
        *(find_program("openssl"), "s_client", "-quiet", "-verify_quiet", "-verify_return_error", *more),
        *("-connect", str(gateway), "-servername", name, "-verify_hostname", name),
        *("-cert", caller.certificates, "-key", caller.key, "-CAfile", caller.roots),
    ]


def through_hgate(world: Mesh) -> list[str | Path]:
    """The same to the workload, as a client of the mesh."""
    return s_client(world.gateway, world.caller, SNI, "-alpn", "istio")


def s_client_brings_back(world: Mesh, folder: Path) -> None:
    """Holds that an app that gives MUCH_BYTES back gets all of them, and the client gets them back."""
    body, answer = random_file(folder / "body", MUCH_BYTES), folder / "answer"
    with body.open("rb") as stdin, answer.open("wb") as stdout:
        command = through_hgate(world)
        done = subprocess.run(command, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, b"")
    assert sha256(answer) == sha256(body)


@contextmanager
def client_envoy(gateway: Address, caller: Identity, folder: Path) -> Iterator[Address]:
    """An Envoy beside the client, as the mesh puts it there: plain TCP in, the mesh's mTLS out to hgate."""
    files = (caller.certificates, caller.key, caller.roots)
    tls = tls_socket("Upstream", files, "istio", WORKLOAD, sni=SNI)
    cluster = cluster_of("gateway", gateway, transport_socket=tls)
    with envoy("sidecar", bootstrap(tcp_chain("gateway"), cluster), folder) as address:
        yield address


@contextmanager
def envoy(name: str, configuration: Json, folder: Path) -> Iterator[Address]:
    """An Envoy with a listener, whose address is yielded, and an admin port; it has to stop in order."""
    file = folder / f"{name}.json"
    file.write_text(json.dumps(configuration))
    admin_file = folder / f"{name}.admin"
    flags = ["--disable-hot-restart", "--concurrency", "1", "--admin-address-path", str(admin_file)]
    envoy = start(name, [find_envoy(), "-c", file, *flags], folder)
    try:
        envoy.wait_for(lambda record: "starting main dispatch loop" in said(record), PATIENCE_S)
        listeners = f"http://{admin_file.read_text()}/listeners?format=json"
        with urllib.request.urlopen(listeners, timeout=PATIENCE_S) as answer:
            bound = json.load(answer)["listener_statuses"][0]["local_address"]["socket_address"]
        yield Address(bound["address"], bound["port_value"])
    finally:
        assert envoy.stop() == 0
