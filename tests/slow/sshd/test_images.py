"""What images may have or lack, and a user's own sshd_config."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agent.config.ssh_settings import SshServer
from agent.ssh import login, openssh
from tests.support.ssh_clients import Log, keygen, new_key, running, serving


async def test_without_a_shell_programs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login, "_shell", lambda of_user: "")
    async with serving("builtin", tmp_path) as (_, client):
        assert (await client.ssh("echo 'a  b' \\$HOME")).out == b"a  b $HOME\n"
        done = await client.ssh("no-such-program")
        assert (done.code, done.err) == (
            127,
            b"krun: the image has no shell, and no program no-such-program\r\n",
        )
        done = await client.run("ssh", "-T", "box")
        assert done.code == 127
        assert b"the image has no shell" in done.err


async def test_auto_takes_the_images_sshd(tmp_path: Path) -> None:
    async with serving("auto", tmp_path) as (sshd, _):
        assert sshd.shown()["server"] == "openssh"


async def test_auto_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    monkeypatch.setattr(openssh, "PROGRAM", "/no/sshd")
    async with serving("auto", tmp_path) as (sshd, client):
        assert sshd.shown()["server"] == "builtin"
        assert (await client.ssh("echo in")).out == b"in\n"
    assert "the image has no /no/sshd" in await log.said("the built-in sshd serves")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "secret"
    folder.mkdir()
    new_key(tmp_path, "user_key")
    shutil.copy(tmp_path / "user_key.pub", folder / "authorized_keys")
    keygen("-t", "ecdsa", "-N", "", "-f", folder / "id_ecdsa")
    return folder


async def test_ones_own_sshd_config(tmp_path: Path, folder: Path, log: Log) -> None:
    """krun adds the keys, and how much is logged."""
    (folder / "sshd_config").write_text("UsePAM no\nStrictModes no\nForceCommand echo forced\n")
    async with serving("auto", tmp_path, folder=folder, auth="") as (sshd, client):
        assert sshd.shown()["server"] == "openssh"
        assert (await client.ssh("echo asked")).out == b"forced\n"
        assert "('user_key@test')" in await log.said("logs in")


async def test_an_sshd_config_that_is_wrong(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "sshd_config").write_text("NoSuchKeyword yes\n")
    async with serving("openssh", tmp_path, folder=folder, auth="") as (sshd, client):
        assert "sshd -t: sshd_config: line 1: Bad configuration option: NoSuchKeyword" in sshd.shown()["why"]
        assert (await client.ssh("true")).code == 255


async def test_an_sshd_config_that_the_built_in_one_cannot_use(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "sshd_config").write_text("UsePAM no\n")
    async with serving("builtin", tmp_path, folder=folder, auth="") as (_, client):
        assert (await client.ssh("echo in")).out == b"in\n"
    assert "sshd_config is not used: HBONE_SSH=builtin" in caplog.text


async def test_files_are_gone_afterwards(
    kind: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    async with (
        serving(kind, tmp_path) as (sshd, client),
        running(client, "ssh", "box", "trap '' HUP; echo there; sleep 1000; sleep 1000") as process,
    ):
        assert process.stdout is not None
        assert await process.stdout.readline() == b"there\n"
        await sshd.close()
    assert list((tmp_path / "tmp").iterdir()) == []
