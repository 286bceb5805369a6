"""When there is an sshd, and when not; `tests.slow.sshd` has what it does."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.config.settings import from_env
from agent.config.ssh_settings import SshSettings
from agent.ssh import login, sshd
from agent.ssh.key_sources import told
from agent.ssh.sshd import Sshd
from shared.address import Address
from shared.credentials.kubernetes.kubernetes_access import Access
from shared.errors import DialError, UnavailableError, UsageError
from tests.support.api_server import ApiServer, access, api_server
from tests.support.ssh_clients import KINDS, Log, new_key, serving, tuple_of
from tests.support.tcp_peer import PATIENCE_S
from tests.support.world import free_port

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIABX1TL3Kd0qjPfNcm6VNlEdGiUnle7XRhWSDdeYpMa8 alice"
USER = "root" if os.geteuid() == 0 else ""


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with api_server() as server:
        yield server


def settings(**more: object) -> SshSettings:
    listen = Address("127.0.0.1", free_port())
    return SshSettings(server="builtin", listen=listen, user=USER, **more)  # type: ignore[arg-type]


async def made(settings: SshSettings, access: Access | None = None) -> Sshd:
    it = Sshd(settings, dict, access)
    it.start()
    await it.refreshed()
    return it


async def refusal(it: Sshd, settings: SshSettings) -> str:
    """Why a tunnel to it is refused."""
    try:
        with pytest.raises(DialError) as caught:
            await it.connect(settings.listen, 1.0, "peer", None)
        return str(caught.value)
    finally:
        await it.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_command(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = Log(caplog)
    async with serving(kind, tmp_path) as (it, client):  # type: ignore[arg-type]
        done = await client.ssh("cat; exit 3", stdin=b"hello")
        assert (done.code, done.out) == (3, b"hello")
        assert "exec" in await log.said(" ends: ")
        told = {
            (sample.name, *sample.labels.values()): sample.value
            for family in it.families()
            for sample in family.samples
        }
        assert told["hbone_ssh_opened_total", "exec"] == 1
        assert told["hbone_ssh_logins_total", "accepted"] == 1
        assert told["hbone_ssh_active", "exec"] == 0


async def test_nobody_passes_for_another_s_tunnel(tmp_path: Path) -> None:
    """Whom a tunnel is for is known by the address that krun dials from, and not by its port alone."""
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        async with serving("builtin", tmp_path) as (it, client):
            target = Address(*elsewhere.getsockname())
            leg = await it.connect(target, PATIENCE_S, "192.0.2.1:9", "alice")
            dialled, (_, port) = elsewhere.accept()
            with dialled, socket.create_connection(tuple_of(client), source_address=("127.0.0.2", port)):
                async with asyncio.timeout(PATIENCE_S):
                    while not it.audit.connections:  # noqa: ASYNC110  a socket that nothing tells of
                        await asyncio.sleep(0.01)
                assert [one.place for one in it.audit.connections] == [f"127.0.0.2:{port}"]
            leg.abort()


async def test_without_keys_there_is_none() -> None:
    told = settings()
    it = await made(told)
    assert not it.shown()["enabled"]
    assert "connection refused; krun starts an sshd if there are keys in SSH_AUTH" in await refusal(it, told)


async def test_the_secret_enables_it_and_disables_it(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sshd, "REFRESH_S", 0.0)
    data = {"authorized_keys": base64.b64encode(KEY.encode()).decode()}
    await server.delete("secrets", "sshdebug")
    mine = settings()
    it = await made(mine, access(server))
    assert not it.shown()["enabled"]
    await server.put("secrets", "sshdebug", data=data)
    assert (await told(mine, access(server))).startswith("enabled by Secret sshdebug of namespace ")
    leg = await it.connect(mine.listen, 1.0, "peer", None)
    leg.abort()
    shown = it.shown()
    assert shown["enabled"] and shown["keys"][0]["comment"] == "alice"
    await server.delete("secrets", "sshdebug")
    await it.refreshed()
    assert not it.shown()["enabled"]
    await it.close()


async def test_a_secret_that_may_not_be_read_is_none(
    server: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    mine = settings()
    with caplog.at_level(logging.INFO):
        it = await made(mine, access(server, "somebody else's"))
    assert caplog.text == ""
    assert "that cannot be read" in await refusal(it, mine)


async def test_an_address_that_is_in_use(caplog: pytest.LogCaptureFixture) -> None:
    mine = settings(auth=KEY)
    with socket.create_server((mine.listen.host, mine.listen.port)):
        it = await made(mine)
        assert "the port is in use: krun starts none" in caplog.text
        (await it.connect(mine.listen, 1.0, "peer", None)).abort()  # to whoever listens
        await it.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="about root")
async def test_root_has_to_be_said() -> None:
    mine = replace(settings(auth=KEY), user="")
    it = await made(mine)
    assert "no sshd: krun is root: set HBONE_SSH_USER" in await refusal(it, mine)
    assert "enabled by SSH_AUTH, but none can be started: krun is root" in await told(mine, None)


async def test_asyncssh_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = settings(auth=KEY)
    it = await made(mine)
    for name in [name for name in sys.modules if name.startswith(("asyncssh", "agent.ssh.builtin"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "asyncssh", None)
    monkeypatch.delattr("agent.ssh.builtin", raising=False)
    assert "install hbone[ssh]" in await refusal(it, mine)


async def test_its_module_is_not_imported_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("asyncssh", "agent.ssh.builtin"))]:
        monkeypatch.delitem(sys.modules, name)
    it = await made(settings(auth=KEY))
    assert "asyncssh" not in sys.modules
    await it.close()


async def test_where_somebody_else_serves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hbone.ssh")
    read = from_env({"SSH_AUTH": KEY, "HBONE_SSHD": "127.0.0.1:2222"})
    assert read.target("22") == read.ssh.other == Address("127.0.0.1", 2222)
    it = await made(read.ssh)
    assert "no sshd is started, for HBONE_SSHD=127.0.0.1:2222" in caplog.text
    await it.close()


def test_settings() -> None:
    assert str(from_env({"HBONE_SSH_LISTEN": "127.0.0.1:2022"}).target("22")) == "127.0.0.1:2022"
    for environ, reason in (
        ({"SSH_AUTH": "hello"}, "line 1: no public key"),
        ({"HBONE_SSH_LISTEN": "0.0.0.0:22"}, "loopback"),
        ({"HBONE_SSH_LISTEN": "127.0.0.1:0"}, "port 0 cannot be dialled"),
        ({"HBONE_SSH": "dropbear"}, "auto, openssh, builtin or none"),
    ):
        with pytest.raises(UsageError, match=reason):
            from_env(environ)


def test_the_user_of_sessions() -> None:
    own = login.login(USER)
    assert (own.uid, own.is_own) == (os.geteuid(), True)
    assert own.shell
    with pytest.raises(UnavailableError, match="no such user"):
        login.login("nobody-of-that-name")
    if os.geteuid() == 0:
        nobody = login.login("nobody")
        assert not nobody.is_own and not nobody.has_own_shell and nobody.shell in login.SHELLS
        assert login.login("54321").name == "54321"


def test_a_session_s_environment() -> None:
    user = login.login(USER)
    told = login.environment(user, {"HOME": "/tmp", "SECRET": "of the app"})
    assert told == {
        "HOME": "/tmp",
        "SECRET": "of the app",
        "USER": user.name,
        "LOGNAME": user.name,
        "PATH": login.PATH,
        "SHELL": user.shell,
    }
    assert login.allowed({"LANG": "C", "LC_ALL": "C", "LD_PRELOAD": "x", "LC_X": "a\0b"}) == {
        "LANG": "C",
        "LC_ALL": "C",
    }


async def test_a_new_key_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hbone.ssh")
    new_key(tmp_path, "user_key")
    it = await made(settings(auth=(tmp_path / "user_key.pub").read_text()))
    (key,) = it.shown()["host_keys"]
    assert caplog.text.count(key["fingerprint"]) == 1
    await it.close()
