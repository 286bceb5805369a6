"""Which end of the mTLS is started, and that nothing of it stays; `test_app.py` has the rest."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from pathlib import Path

import pytest

from agent.config.settings import from_env
from agent.mtls.inbound import no_app
from agent.mtls.mtls_end import MtlsEnd
from shared.credentials.certificates.authority import Authority
from shared.errors import UnavailableError
from shared.tasks import spawn
from shared.trust.spiffe import SpiffeId
from tests.support.hbone_port import Mesh
from tests.support.revocation import revocation_list
from tests.support.tcp_peer import PATIENCE_S
from tests.support.world import find_envoy


def end(**environ: str) -> MtlsEnd:
    told = {"HBONE_INBOUND_LISTEN": "127.0.0.1:0", "HBONE_ENVOY_ADMIN": "127.0.0.1:0"}
    return MtlsEnd(from_env({**told, **environ}), "", lambda record: None, lambda: None, no_app)


async def test_none_leads_to_whoever_listens_there() -> None:
    it = end(HBONE_INBOUND="none", HBONE_INBOUND_LISTEN="127.0.0.1:15003")
    await it.start()
    assert str(it.address) == "127.0.0.1:15003"
    assert (it.connections, it.files_per_tunnel) == (0, 1)
    it.limit(0)
    assert list(it.holders()) == []
    await it.emptied()
    await it.close()


@pytest.mark.parametrize("inbound", ["auto", "none"])
async def test_policies_are_not_applied_by_nobody(inbound: str, tmp_path: Path) -> None:
    told = {"HBONE_INBOUND": inbound, "HBONE_CERTS": str(tmp_path), "HBONE_POLICY": "apply"}
    with pytest.raises(UnavailableError, match=r"HBONE_POLICY=apply: krun has no mTLS end .*: set HBONE_"):
        await end(**told).start()


async def test_the_built_in_one(tmp_path: Path) -> None:
    it = end(HBONE_INBOUND="builtin", HBONE_CERTS=str(Mesh(tmp_path).member()))
    await it.start()
    assert it.address.port != 0
    assert it.files_per_tunnel == 4, "its own two, the tunnel's, and one of inner HBONE"
    it.limit(0)
    reader, writer = await asyncio.open_connection(it.address.host, it.address.port)
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()
    await it.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(it.address.host, it.address.port)


async def test_the_patterns_in_force(tmp_path: Path) -> None:
    """They are also those that nobody has set; without an end of krun's there are none."""
    folder = Mesh(tmp_path).member(SpiffeId.parse("spiffe://demo.local/ns/demo/sa/hello"))
    ends = {"builtin": (("spiffe://demo.local/**",), ("ns/x/sa/y",)), "none": (None, None)}
    for kind, expected in ends.items():
        told = {"HBONE_INBOUND": kind, "HBONE_CERTS": str(folder), "HBONE_DENY": "ns/x/sa/y"}
        mtls_end = end(**told)
        await mtls_end.start()
        assert (mtls_end.allow, mtls_end.deny) == expected
        await mtls_end.close()


async def test_envoy_s_admin_port_ends_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    find_envoy()
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    told = {"HBONE_INBOUND": "envoy", "HBONE_CERTS": str(Mesh(tmp_path).member())}
    it = end(**told, HBONE_ENVOY_ADMIN=f"127.0.0.1:{port}")
    with pytest.raises(UnavailableError, match=f"envoy admin: cannot listen on 127.0.0.1:{port}: .* in use"):
        await it.start()
    await it.close()
    taken.close()
    await taken.wait_closed()
    it = end(**told, HBONE_ENVOY_ADMIN=f"127.0.0.1:{port}")
    await it.start()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()
    await it.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    it = end(**told, HBONE_ENVOY_ADMIN="-")
    await it.start()
    await it.close()


async def test_what_envoy_cannot_do_is_left_to_the_built_in_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    find_envoy()
    caplog.set_level("INFO", "hbone.agent")
    mesh = Mesh(tmp_path)
    lists = tmp_path / "lists.pem"
    lists.write_bytes(revocation_list(mesh.authority))
    told = {"HBONE_CERTS": str(mesh.member()), "HBONE_CRL": str(lists)}
    it = end(**told, HBONE_INBOUND="envoy")
    lacks = "HBONE_CRL is set, and envoy keeps open connections of revoked peers"
    with pytest.raises(UnavailableError, match=f"HBONE_INBOUND=envoy: {lacks}: set HBONE_INBOUND=builtin"):
        await it.start()
    await it.close()
    it = end(**told)
    await it.start()
    assert f"not envoy: {lacks}" in caplog.messages
    assert it._envoy is None and it.files_per_tunnel == 4
    await it.close()


async def test_envoy_does_not_tell_the_roots_of_trust_domains_apart(tmp_path: Path) -> None:
    find_envoy()
    folder = Mesh(tmp_path).member()
    roots = folder / "ca_certificates.pem"
    roots.write_bytes(roots.read_bytes() + Authority.create("other.local").root_pem)
    it = end(HBONE_CERTS=str(folder), HBONE_INBOUND="envoy")
    with pytest.raises(
        UnavailableError, match=r"has roots of demo\.local, other\.local, and envoy lets each"
    ):
        await it.start()
    await it.close()


async def test_a_configuration_that_envoy_does_not_get_ready_with_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_envoy()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = Mesh(tmp_path / "mesh").member()
    (folder / "certificates.pem").write_text("no certificate")
    it = end(HBONE_CERTS=str(folder), HBONE_INBOUND="envoy", TRUST_DOMAIN="demo.local")
    with pytest.raises(UnavailableError) as caught:
        await it.start()
    await it.close()
    kept = Path(str(caught.value).rpartition("; its configuration is in ")[2])
    assert kept.parent.parent == tmp_path
    assert '"inbound"' in kept.read_text()  # noqa: ASYNC240  # a small file


async def test_an_envoy_that_is_not_waited_for_any_more_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_envoy()
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    it = end(HBONE_INBOUND="envoy", HBONE_CERTS=str(Mesh(tmp_path).member()))
    starting = spawn(it.start(), name="start")
    async with asyncio.timeout(PATIENCE_S):
        while it._envoy is None:  # noqa: ASYNC110  # it has no event for its middle
            await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait({starting})
    assert list(folder.iterdir())
    await it.close()
    assert it._envoy is not None
    assert it._envoy.exited.done()
    assert list(folder.iterdir()) == []


async def test_an_envoy_that_dies_is_started_again_where_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    find_envoy()
    caplog.set_level("INFO", "hbone.agent")
    it = end(HBONE_INBOUND="envoy", HBONE_CERTS=str(Mesh(tmp_path).member()))
    await it.start()
    first, address = it._envoy, it.address
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while "envoy is ready again" not in caplog.messages:  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0.05)
    assert "envoy ended with exit code 137; again in 0.5 s" in caplog.messages
    assert (it._envoy is not first, it.address) == (True, address)
    _, writer = await asyncio.open_connection(address.host, address.port)
    writer.close()
    await it.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(address.host, address.port)
