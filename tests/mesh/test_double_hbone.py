"""Double HBONE with istiod's certificates on all four ends, beside a sidecar's way to the same app.

No ztunnel runs here: the client is one on the wire.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.net.tls import certificate_folder
from tests.mesh.workloads import SERVICE, Workloads, ask
from tests.support.ambient_client import AmbientClient, CarriedTls, InStream
from tests.support.double_hbone import ConnectRefusedError, Ztunnel

AUTHORITY = f"{SERVICE}:8080"
HBONE_PORT = 15008

HELLO = "spiffe://cluster.local/ns/demo/sa/hello"

ENVIRON = {"HBONE_ALLOW": "ns/clients/sa/web", "HBONE_INNER_HOSTS": SERVICE}


@pytest.fixture(scope="module")
def krun(mesh: Workloads) -> Iterator[Workloads]:
    process = mesh.krun("builtin", ENVIRON)
    try:
        mesh.krun_ready(process)
        yield mesh
    finally:
        process.end()


@pytest.fixture(scope="module")
def members(krun: Workloads, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ssl.SSLContext]:
    """What a client of each account shows and wants, by the account; istiod has signed it."""
    folder = tmp_path_factory.mktemp("members")
    accounts = {"web": "clients", "guest": "clients", "hello": "demo"}
    return {account: member(krun, folder / account, at, account) for account, at in accounts.items()}


def member(mesh: Workloads, folder: Path, namespace: str, account: str) -> ssl.SSLContext:
    mesh.plane.certify(namespace, account, folder)
    chain, key, roots = certificate_folder.find(folder).all
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname = False
    tls.minimum_version = ssl.TLSVersion.TLSv1_3
    tls.load_verify_locations(roots)
    tls.load_cert_chain(chain, key)
    tls.set_alpn_protocols(["h2"])
    return tls


def account_of(client: AmbientClient) -> str:
    """Whom the client has found at the other end of its TLS."""
    certificate: Any = client.transport.tls.getpeercert()
    ((kind, name),) = certificate["subjectAltName"]
    assert kind == "URI"
    return str(name)


async def sidecar_is_answered() -> None:
    assert (await asyncio.to_thread(ask, "web")).status == 200


async def test_a_request_beside_a_sidecar_s(members: dict[str, ssl.SSLContext]) -> None:
    async with Ztunnel.of(HBONE_PORT, members["web"]) as client, client.tunnel(AUTHORITY) as tunnel:
        assert account_of(tunnel.inner) == HELLO, "of the workload's own account, as the Service says"
        await sidecar_is_answered()
        await tunnel.stream.send(b"GET / HTTP/1.1\r\nhost: hello\r\nconnection: close\r\n\r\n")
        assert (await tunnel.stream.rest()).startswith(b"HTTP/1.1 200 ")


async def test_an_account_that_the_gateway_denies(members: dict[str, ssl.SSLContext]) -> None:
    async with Ztunnel.of(HBONE_PORT, members["hello"]) as client:
        with pytest.raises(ConnectRefusedError, match=r"outer 401: .*no rule allows it"):
            async with client.tunnel(AUTHORITY):
                pass
    await sidecar_is_answered()


async def test_an_account_that_krun_denies(members: dict[str, ssl.SSLContext]) -> None:
    async with Ztunnel.of(HBONE_PORT, members["guest"]) as client:
        outer = await client.connect(AUTHORITY)
        assert await outer.status() == 200
        inner = CarriedTls(InStream(outer), client.tls)
        await inner.shake()  # TLS 1.3: the server judges after the client is through
        with pytest.raises(ssl.SSLError, match="alert"):
            while data := await outer.some():
                inner.feed(data)
    await sidecar_is_answered()
