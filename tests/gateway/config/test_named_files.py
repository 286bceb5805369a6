"""Files that the gateway's file names, replaced by a named pipe that nobody writes to: hgate serves on, says
what is wrong in one line, and ends on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.credentials.certificates.authority import Authority
from shared.errors import EXIT_CONFIG, EXIT_OK
from shared.net.tls.certificate_folder import CERTIFICATES_FILE, PRIVATE_KEY_FILE, ROOTS_FILE
from shared.net.tls.contexts import server_context
from shared.tasks import spawn
from tests.support.gateway_world import GLOB, tunnel
from tests.support.hbone_port import GATEWAY, Mesh
from tests.support.hellos import hello
from tests.support.hgate_process import Hgate, hgate
from tests.support.http2_peer import Service
from tests.support.process import started
from tests.support.revocation import put, revocation_list
from tests.support.tcp_peer import PATIENCE_S, TcpPeer

IDENTITY = "outbound_.8080_._.identity.demo.svc.cluster.local"
FILE_TOKEN = "outbound_.8080_._.file-token.demo.svc.cluster.local"


@dataclass
class Named:
    """A running hgate whose file names files of all kinds."""

    gateway: Hgate
    file: Path
    mesh: Mesh
    hbone_port: int

    async def is_asked_until_it_says(self, pattern: str) -> None:
        """New connections until there is a message, or an error in the access log, that matches `pattern`."""
        said = spawn(self.gateway.said(pattern), name="wait for a message")
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not (said.done() or self._has_logged(pattern)):
                    await self.is_asked()
        finally:
            said.cancel()

    def _has_logged(self, pattern: str) -> bool:
        return any(re.search(pattern, line.get("error", "")) for line in self.gateway.lines)

    async def is_asked(self) -> None:
        """New connections of every kind, each of which has files looked at."""
        for name in (None, IDENTITY, FILE_TOKEN):
            async with TcpPeer.connected(self.gateway.port) as client:
                await client.send(hello() if name is None else hello(name))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await client.rest()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(0.5):
                tls = self.mesh.tls(None)
                _, writer = await asyncio.open_connection("127.0.0.1", self.hbone_port, ssl=tls)
                writer.close()


@asynccontextmanager
async def named(folder: Path) -> AsyncIterator[Named]:
    mesh, ca = Mesh(folder), Authority.create("services.example")
    certificates, revoked = mesh.member(GATEWAY), folder / "revoked.pem"
    put(revoked, revocation_list(mesh.authority))
    ca.write(folder / "service", ca.issue(GATEWAY, dns_names=("hello.example", "file-token.example")))
    (folder / "ca.pem").write_bytes(ca.root_pem)
    (folder / "token").write_text("opaque")
    (folder / "keys.json").write_text('{"keys": []}')
    context = server_context(*(folder / "service" / name for name in (CERTIFICATES_FILE, PRIVATE_KEY_FILE)))
    async with Service.listening(context) as service:
        to_service = {"tunnel": "https://{service}.example/_hbone/15003", "token": "none"}
        identity = {
            "tunnel": "https://{service}.example:15008",
            "method": "CONNECT",
            "identity": str(certificates),
            "peer": ["spiffe://demo.local/**"],
            "crl": str(revoked),
        }
        named_pipe_of = {"token": {"file": "token"}, "ca": "ca.pem"}
        config = {
            "listen": ["127.0.0.1:0"],
            "admin": "127.0.0.1:0",
            "metrics": "127.0.0.1:0",
            "health": "127.0.0.1:0",
            "trust_domain": "demo.local",
            "routes": [
                tunnel(service.port, host="identity.demo.svc.cluster.local", **identity),
                tunnel(service.port, host="file-token.demo.svc.cluster.local", **to_service | named_pipe_of),
                tunnel(service.port, host=GLOB, ca="ca.pem", **to_service),
            ],
            "hbone": {
                "listen": ["127.0.0.1:0"],
                "certificates": str(certificates),
                "crl": str(revoked),
                "jwt": {"issuer": "i", "audiences": ["a"], "keys": "keys.json"},
                "rules": [{"from": ["*"], "to": ["*:80"], "claims": {}}],
            },
            "limits": {
                "drain_timeout": "0s",
                "drain_delay": "0s",
                "connect_timeout": "1s",
                "response_timeout": "100ms",
                "upstream_idle_timeout": "1ms",
            },
        }
        file = folder / "hgate.yaml"
        file.write_text(json.dumps(config, indent=1))
        async with hgate(file) as gateway:
            hbone_port = int((await gateway.said(r"^hbone on 127\.0\.0\.1:(\d+)"))[1])
            yield Named(gateway, file, mesh, hbone_port)


FILES = {
    "hgate.yaml": "^reload: FILE: cannot be read: it is a named pipe, not a regular file; the running",
    "ca.pem": "^trusted certificates FILE: keeping .*: it is a named pipe, not a regular file$",
    "token": "^cannot read token file FILE: it is a named pipe, not a regular file; check the path",
    "revoked.pem": "keeping the revocation lists in use: FILE: it is a named pipe, not a regular file$",
    CERTIFICATES_FILE: "keeping the certificate in use: FILE: it is a named pipe, not a regular file$",
    PRIVATE_KEY_FILE: "keeping the certificate in use: FILE: it is a named pipe, not a regular file$",
    ROOTS_FILE: "in use: root certificates: FILE: it is a named pipe, not a regular file$",
}
"""Which file, and what is said of it."""


@pytest.mark.parametrize("name", FILES)
async def test_a_named_pipe_stops_nothing(tmp_path: Path, name: str) -> None:
    async with named(tmp_path) as world:
        await world.is_asked()
        in_folder = name in (CERTIFICATES_FILE, PRIVATE_KEY_FILE, ROOTS_FILE)
        file = (world.mesh.folder_of(GATEWAY) if in_folder else tmp_path) / name
        file.unlink()
        os.mkfifo(file)
        world.gateway.process.send(signal.SIGHUP)
        await world.is_asked_until_it_says(FILES[name].replace("FILE", re.escape(str(file))))
        assert (await world.gateway.get("health", "/healthz/ready")).status == 200
        world.gateway.process.send(signal.SIGTERM)
        assert await world.gateway.ended() == EXIT_OK
        assert not any("Traceback" in line for line in world.gateway.process.messages)


@pytest.mark.parametrize(
    ("name", "field"), [("hgate.yaml", ""), ("ca.pem", "routes[1].ca: "), ("jwt.pem", "hbone.jwt.ca: ")]
)
@pytest.mark.parametrize(
    ("make", "kind"), [(os.mkfifo, "a named pipe"), (os.mkdir, "a directory")], ids=["pipe", "directory"]
)
async def test_the_start_is_refused_at_once(
    tmp_path: Path, name: str, field: str, make: Callable[[Path], None], kind: str
) -> None:
    make(tmp_path / name)
    if field:
        routes = [{"host": "a", "forward": "b:1"}]
        routes.append({"host": "b", "tunnel": "https://b/c"} | ({"ca": name} if "ca" in name else {}))
        jwt = {"issuer": "i", "audiences": ["a"], "keys": "https://i/k", "ca": name}
        hbone = {"certificates": "c", "rules": [], "jwt": jwt} if "jwt" in name else None
        config = {"routes": routes} | ({"hbone": hbone} if hbone else {})
        (tmp_path / "hgate.yaml").write_text(json.dumps(config))
    async with started("gateway", "--config", str(tmp_path / "hgate.yaml"), "--check") as process:
        code, _, err = await process.ended()
    assert code == EXIT_CONFIG
    assert err.count("\n") == 1
    assert err.endswith(f": it is {kind}, not a regular file\n")
    assert field in err
