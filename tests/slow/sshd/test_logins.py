"""Who gets in, and who does not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import replace
from pathlib import Path

import asyncssh
import pytest

from agent.config.ssh_settings import SshServer
from agent.ssh import audit
from agent.ssh.sshd import Sshd
from tests.support.ssh_clients import USER, Client, Log, keygen, new_key, serving, tuple_of
from tests.support.tcp_peer import PATIENCE_S

DENIED = 255


async def test_the_log_says_who(client: Client, log: Log) -> None:
    assert (await client.ssh("echo of a secret kind; exit 3")).code == 3
    assert "('user_key@test') logs in as " in await log.said("logs in")
    assert "exec" in await log.said("exec")
    assert ", from 127.0.0.1:" in await log.said(" ends: ")


async def test_a_strange_key(client: Client, sshd: Sshd, log: Log, tmp_path: Path) -> None:
    done = await client.but(key=new_key(tmp_path, "strange")).ssh("true")
    assert done.code == DENIED
    assert b"Permission denied (publickey)" in done.err
    assert "nobody logged in, from 127.0.0.1:" in await log.said("nobody logged in")
    assert sshd.audit.logins["refused"] == 1


async def test_no_password_and_no_question(client: Client, tmp_path: Path) -> None:
    for method in ("password", "keyboard-interactive", "hostbased", "none"):
        done = await client.but(f"PreferredAuthentications {method}").ssh("true")
        assert (done.code, b"(publickey)" in done.err) == (DENIED, True)


async def test_too_many_keys(client: Client, sshd: Sshd, tmp_path: Path) -> None:
    keys = [new_key(tmp_path, f"strange{number}") for number in range(audit.MAX_ATTEMPTS + 2)]
    options = [f"IdentityFile {key}" for key in keys]
    done = await client.but(*options).ssh("true")
    assert done.code == DENIED
    assert b"Too many" in done.err


async def test_several_keys_of_several_places(kind: SshServer, tmp_path: Path) -> None:
    keys = {name: new_key(tmp_path, name) for name in ("a", "b", "c")}
    folder = tmp_path / "secret"
    folder.mkdir()
    for name, source in (("authorized_keys", "a"), ("authorized_key_bob", "b")):
        (folder / name).write_text(f"# {source}\n" + (tmp_path / f"{source}.pub").read_text())
    async with serving(kind, tmp_path, folder=folder, auth=(tmp_path / "c.pub").read_text()) as (_, client):
        for key in keys.values():
            assert (await client.but(key=key).ssh("echo in")).out == b"in\n"
        assert (await client.ssh("true")).code == DENIED


async def test_options_of_a_key(kind: SshServer, tmp_path: Path) -> None:
    new_key(tmp_path, "user_key")
    key = (tmp_path / "user_key.pub").read_text()
    async with serving(kind, tmp_path, auth=f'restrict,command="echo forced; env" {key}') as (_, client):
        done = await client.ssh("echo asked")
        assert done.out.startswith(b"forced") and b"asked" not in done.out.splitlines()
        assert b"PTY allocation request failed" in (await client.run("ssh", "-tt", "box", "echo asked")).err
        done = await client.but("ExitOnForwardFailure yes").run("ssh", "-N", "-R", "0:127.0.0.1:1", "box")
        assert done.code == DENIED


async def test_an_expired_key(kind: SshServer, tmp_path: Path) -> None:
    """The built-in sshd does not know the option, and does not use the key at all."""
    new_key(tmp_path, "user_key")
    key = (tmp_path / "user_key.pub").read_text()
    new_key(tmp_path, "other")
    other = (tmp_path / "other.pub").read_text()
    async with serving(kind, tmp_path, auth=f'expiry-time="20200101" {key}{other}') as (_, client):
        assert (await client.ssh("true")).code == DENIED
        assert (await client.but(key=tmp_path / "other").ssh("true")).code == 0


@pytest.mark.parametrize(("options", "has"), [("pty,restrict", False), ("restrict,pty", True)])
async def test_options_count_in_their_order(kind: SshServer, tmp_path: Path, options: str, has: bool) -> None:
    new_key(tmp_path, "user_key")
    key = (tmp_path / "user_key.pub").read_text()
    async with serving(kind, tmp_path, auth=f"{options} {key}") as (_, client):
        told = (await client.run("ssh", "-tt", "box", "tty")).out
        assert (b"/dev/pts" in told) is has


# Certificates.


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    return new_key(tmp_path, "authority")


def signed(tmp_path: Path, authority: Path, name: str, *more: str) -> Path:
    """A key with a certificate beside it, which ssh shows."""
    key = new_key(tmp_path, name)
    keygen("-s", authority, "-I", f"{name} of the team", *more, f"{key}.pub")
    return key


@pytest.fixture(params=["trusted_user_ca_keys", "authorized_keys"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, authority: Path) -> Path:
    folder = tmp_path / "secret"
    folder.mkdir()
    prefix = "cert-authority " if request.param == "authorized_keys" else ""
    (folder / request.param).write_text(prefix + (tmp_path / "authority.pub").read_text())
    return folder


async def test_a_certificate(
    kind: SshServer, tmp_path: Path, authority: Path, folder: Path, log: Log
) -> None:
    good = signed(tmp_path, authority, "good", "-n", f"{USER},others", "-z", "42")
    refused = [
        signed(tmp_path, authority, "elsewhere", "-n", "others"),
        signed(tmp_path, authority, "nobody"),
        signed(tmp_path, authority, "old", "-n", USER, "-V", "-2h:-1h"),
        signed(tmp_path, new_key(tmp_path, "impostor"), "forged", "-n", USER),
        signed(tmp_path, authority, "host", "-n", USER, "-h"),
        authority,
    ]
    forced = signed(tmp_path, authority, "forced", "-n", USER, "-O", "force-command=echo forced")
    async with serving(kind, tmp_path, folder=folder, auth="") as (_, client):
        assert (await client.but(key=good).ssh("echo in")).out == b"in\n"
        told = await log.said("logs in")
        assert "certificate 'good of the team' serial 42 of SHA256:" in told
        assert (await client.but(key=forced).ssh("echo asked")).out == b"forced\n"
        for key in refused:
            assert (await client.but(key=key).ssh("true")).code == DENIED, key.name
        other = client.but("User others", key=good)
        assert (await other.ssh("true")).code == DENIED


async def test_a_certificate_does_not_widen_its_authority_s_line(
    kind: SshServer, tmp_path: Path, authority: Path
) -> None:
    """A line that forces a command holds for all certificates of the authority (sshd's auth2-pubkey.c)."""
    line = f'cert-authority,principals="team",command="echo safe" {(tmp_path / "authority.pub").read_text()}'
    plain = signed(tmp_path, authority, "plain", "-n", "team")
    forced = signed(tmp_path, authority, "forced", "-n", "team", "-O", "force-command=echo mine")
    async with serving(kind, tmp_path, auth=line) as (_, client):
        assert (await client.but(key=plain).ssh("echo asked")).out == b"safe\n"
        done = await client.but(key=forced).ssh("echo asked")
        assert (done.code, done.out) == (DENIED, b"")


async def test_where_a_certificate_may_come_from(kind: SshServer, tmp_path: Path, authority: Path) -> None:
    """krun dials the sshd itself, so this is where all come from."""
    line = f"cert-authority {(tmp_path / 'authority.pub').read_text()}"
    near = signed(tmp_path, authority, "near", "-n", USER, "-O", "source-address=127.0.0.0/8")
    far = signed(tmp_path, authority, "far", "-n", USER, "-O", "source-address=192.0.2.0/24")
    later = signed(tmp_path, authority, "later", "-n", USER, "-V", "+1h:+2h")
    strange = signed(tmp_path, authority, "strange", "-n", USER, "-O", "critical:unknown@test=1")
    async with serving(kind, tmp_path, auth=line) as (_, client):
        assert (await client.but(key=near).ssh("echo in")).out == b"in\n"
        for key in (far, later, strange):
            assert (await client.but(key=key).ssh("true")).code == DENIED, key.name


async def test_certificates_of_others_write_few_lines(tmp_path: Path, authority: Path, log: Log) -> None:
    """Nobody need have signed them whom krun knows."""
    new_key(tmp_path, "user_key")
    forged = signed(tmp_path, authority, "forged", "-n", "others")
    async with serving("builtin", tmp_path) as (_, client):
        for _ in range(4):
            assert (await client.but(key=forged).ssh("true")).code == DENIED
        await log.said("is not for user")
        assert len([line for line in log.lines() if "is not for user" in line]) == 1


async def test_a_hosts_key_with_its_certificate(kind: SshServer, tmp_path: Path, authority: Path) -> None:
    folder = tmp_path / "secret"
    folder.mkdir()
    keygen("-t", "ecdsa", "-N", "", "-f", folder / "id_ecdsa")
    keygen("-s", authority, "-h", "-I", "box", "-n", "box", folder / "id_ecdsa.pub")
    known = tmp_path / "known_hosts"
    known.write_text(f"@cert-authority box {(tmp_path / 'authority.pub').read_text()}")
    plain = tmp_path / "plain_hosts"
    plain.write_text(f"box {(folder / 'id_ecdsa.pub').read_text()}")
    async with serving(kind, tmp_path, folder=folder) as (sshd, client):
        for file in (known, plain):
            strict = client.but("StrictHostKeyChecking yes", f"UserKnownHostsFile {file}", "HostKeyAlias box")
            done = await strict.ssh("echo in")
            assert done.out == b"in\n", done.err
        (key,) = sshd.shown()["host_keys"]
        assert (key["type"], key["certificate"]) == ("ecdsa-sha2-nistp256", True)


async def test_a_made_host_key_is_told(client: Client, sshd: Sshd, log: Log) -> None:
    (key,) = sshd.shown()["host_keys"]
    assert key["fingerprint"].startswith("SHA256:")
    file = client.folder / "hosts"
    learning = client.but("StrictHostKeyChecking accept-new", f"UserKnownHostsFile {file}")
    assert (await learning.ssh("true")).code == 0
    told = await asyncio.create_subprocess_exec("ssh-keygen", "-lf", file, stdout=asyncio.subprocess.PIPE)
    assert key["fingerprint"].encode() in (await told.communicate())[0]


# Clients that mean no good.


async def test_half_open_connections_keep_nobody_out(
    client: Client, sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.ssh.sshd.MAX_CONNECTIONS", 10)
    monkeypatch.setattr("agent.ssh.sshd.EVICT_AFTER_S", 0.0)
    silent = [socket.create_connection(tuple_of(client)) for _ in range(30)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not sshd.audit.refused["connections"]:  # noqa: ASYNC110  sockets that nothing tells of
                await asyncio.sleep(0.02)
        assert (await client.ssh("echo in")).out == b"in\n"
        assert len(sshd.audit.connections) <= 12
    finally:
        for one in silent:
            one.close()


async def test_a_login_has_a_deadline(
    kind: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "openssh":
        monkeypatch.setattr("agent.ssh.openssh.LOGIN_S", 1.0)
    else:
        monkeypatch.setattr("agent.ssh.builtin.LOGIN_S", 1.0)
    async with serving(kind, tmp_path) as (_, client):
        reader, writer = await asyncio.open_connection(*tuple_of(client))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await reader.readline()  # its version
                writer.write(b"SSH-2.0-slow\r\n")
                await reader.read()
        except ConnectionResetError:
            pass
        finally:
            writer.close()


async def test_garbage(client: Client, sshd: Sshd) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(100_000), b"SSH-2.0-x\r\n" + bytes(range(256)) * 200):
        reader, writer = await asyncio.open_connection(*tuple_of(client))
        try:
            writer.write(data)
            async with asyncio.timeout(PATIENCE_S):
                await reader.read()
                writer.write_eof()
                await reader.read()
        except (ConnectionError, OSError):
            pass
        finally:
            writer.close()
    assert (await client.ssh("echo in")).out == b"in\n"


async def test_key_exchanges_that_stop_krun_are_not_offered(tmp_path: Path) -> None:
    """They are computed in krun's event loop, for clients without a key as well."""
    async with serving("builtin", tmp_path) as (_, client), asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(*tuple_of(client))
        writer.write(b"SSH-2.0-curious\r\n")
        await reader.readline()
        packet = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
        names = packet[1 + 1 + 16 + 4 :]  # padding, type, cookie, length (RFC 4253 section 7.1)
        offered = names[: int.from_bytes(packet[18:22], "big")].decode().split(",")
        writer.close()
        assert "curve25519-sha256" in offered and "ecdh-sha2-nistp256" in offered
        assert not [name for name in offered if name.startswith(("diffie-hellman", "rsa"))]
        done = await client.but("KexAlgorithms diffie-hellman-group18-sha512").ssh("true")
        assert done.code == DENIED


class Farewell(asyncssh.SSHClient):
    """Leaves before it has logged in, with words that look like lines of sshd's log."""

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        self._connection = conn

    def public_key_auth_requested(self) -> None:
        self._connection.disconnect(
            asyncssh.DISC_BY_APPLICATION,
            "bye\nAccepted publickey for root from 9 ssh2: ED25519 SHA256:boss\n"
            "Starting session: command for root from 1 port 2 id 0\nbye",
        )


async def test_nobody_writes_the_log_but_krun(client: Client, sshd: Sshd, log: Log) -> None:
    with contextlib.suppress(asyncssh.Error):
        async with asyncssh.connect(
            *tuple_of(client),
            username=USER,
            client_factory=Farewell,
            known_hosts=None,
            config=None,
            agent_path=None,
        ):
            pass
    await log.said("nobody logged in")
    assert sshd.audit.logins == {"accepted": 0, "refused": 1}
    assert not [line for line in log.lines() if "logs in" in line or "begins" in line]


async def test_a_key_that_is_taken_away(
    kind: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.ssh.sshd.REFRESH_S", 0.0)
    folder = tmp_path / "secret"
    folder.mkdir()
    bob, eve = new_key(tmp_path, "bob"), new_key(tmp_path, "eve")
    (folder / "authorized_key_bob").write_text((tmp_path / "bob.pub").read_text())
    (folder / "authorized_key_eve").write_text((tmp_path / "eve.pub").read_text())
    async with serving(kind, tmp_path, folder=folder, auth="") as (sshd, client):
        by_bob, by_eve = replace(client, key=bob), replace(client, key=eve)
        assert (await by_eve.ssh("true")).code == 0
        before = sshd.shown()["host_keys"]
        (folder / "authorized_key_eve").unlink()
        assert (await by_eve.ssh("true")).code == DENIED
        assert (await by_bob.ssh("true")).code == 0
        assert sshd.shown()["host_keys"] == before
        (folder / "authorized_key_bob").unlink()
        assert (await by_bob.ssh("true")).code == DENIED
        assert not sshd.shown()["enabled"]
