"""Files by sftp and scp, with both of scp's protocols."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from agent.ssh import builtin_session
from tests.path.programs import random_file, sha256
from tests.support.ssh_clients import Client

BYTES = 64 << 20


@pytest.fixture(params=["the image's programs", "our own program"])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the image has sftp-server and scp. OpenSSH's sshd has sftp in itself."""
    if request.param == "our own program":
        monkeypatch.setattr(builtin_session, "SFTP_SERVERS", ())
        without = SimpleNamespace(which=lambda name, path: None)
        monkeypatch.setattr(builtin_session, "shutil", without)
    kind: str = request.param
    return kind


@pytest.mark.parametrize("protocol", [(), ("-O",)], ids=["sftp", "scp"])
async def test_scp_64_mib_both_ways(
    client: Client, tmp_path: Path, protocol: tuple[str, ...], programs: str
) -> None:
    body, there, back = random_file(tmp_path / "body", BYTES), tmp_path / "there", tmp_path / "back"
    assert (await client.run("scp", *protocol, "-q", body, f"box:{there}")).err == b""
    assert sha256(there) == sha256(body)
    assert (await client.run("scp", *protocol, "-q", f"box:{there}", back)).err == b""
    assert sha256(back) == sha256(body)


@pytest.mark.parametrize("protocol", [(), ("-O",)], ids=["sftp", "scp"])
async def test_a_folder(client: Client, tmp_path: Path, protocol: tuple[str, ...], programs: str) -> None:
    (tmp_path / "from/deep").mkdir(parents=True)
    (tmp_path / "from/deep/file").write_text("deep")
    (tmp_path / "from/a name").write_text("with a space")
    (tmp_path / "from/program").write_text("#!")
    (tmp_path / "from/program").chmod(0o755)
    done = await client.run("scp", *protocol, "-r", "-p", tmp_path / "from", f"box:{tmp_path}/to")
    assert (done.code, done.err) == (0, b"")
    assert (tmp_path / "to/deep/file").read_text() == "deep"
    assert (tmp_path / "to/a name").read_text() == "with a space"
    assert (tmp_path / "to/program").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("protocol", [(), ("-O",)], ids=["sftp", "scp"])
async def test_a_file_that_is_not_there(
    client: Client, tmp_path: Path, protocol: tuple[str, ...], programs: str
) -> None:
    done = await client.run("scp", *protocol, f"box:{tmp_path}/none", tmp_path / "copy")
    assert done.code == 1
    assert b"No such file" in done.err


async def test_sftp_by_hand(client: Client, tmp_path: Path, programs: str, kind: str) -> None:
    (tmp_path / "one").write_text("1")
    here, new = tmp_path, tmp_path / "new"
    commands = f"""\
mkdir {new}
put {here}/one {new}/two
rename {new}/two {new}/three
symlink {new}/three {new}/link
chmod 600 {new}/three
ls -1 {new}
pwd
"""
    done = await client.run("sftp", "-b", "-", "box", stdin=commands.encode())
    assert done.code == 0, done.err
    listed = [Path(line).name for line in done.out.decode().splitlines() if not line.startswith("sftp>")]
    assert listed[:2] == ["link", "three"]
    assert (tmp_path / "new/link").resolve().read_text() == "1"
    assert (tmp_path / "new/three").stat().st_mode & 0o777 == 0o600
    if kind == "builtin":  # OpenSSH's begins in the home that /etc/passwd says
        assert str(client.folder / "home") in done.out.decode()


async def test_a_client_that_leaves_in_the_middle_of_a_file(client: Client, tmp_path: Path) -> None:
    body = random_file(tmp_path / "body", BYTES)
    process = await client.start("scp", "-q", "-l", "80000", body, f"box:{tmp_path}/there")
    try:
        while not (tmp_path / "there").exists():
            done = await client.ssh("true")
            assert done.code == 0
    finally:
        process.kill()
        await process.communicate()
    assert (await client.ssh("true")).code == 0
