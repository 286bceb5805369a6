"""Private folders: what another user of the machine has made, or may change, is not used."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shared
from shared.errors import UnavailableError
from shared.private_folder import PrivateFolder, runtime_folder
from tests.support import other_user
from tests.support.other_user import root_only

MOST = 1 << 16


@pytest.fixture
def public() -> Iterator[Path]:
    with other_user.shared_folder() as folder:
        yield folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def why_not(path: Path) -> str:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(UnavailableError) as caught:
        PrivateFolder(path)
    assert os.listdir("/proc/self/fd") == before, "nothing stays open"
    return str(caught.value)


# What is fine.


def test_a_folder_that_was_not_there(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with PrivateFolder(tmp_path / "run" / "ca") as folder:
            folder.write("key", b"secret", 0o600)
            folder.write("certificate", b"public", 0o644)
            assert folder.read("key", MOST, secret=True) == b"secret"
            assert folder.read("certificate", 3, secret=False) == b"pub"
            assert (folder.has("key"), folder.has("other")) == (True, False)
    finally:
        os.umask(before)
    assert (mode(tmp_path / "run"), mode(tmp_path / "run" / "ca")) == (0o700, 0o700)
    assert mode(tmp_path / "run" / "ca" / "key") == 0o600
    assert sorted(os.listdir(tmp_path / "run" / "ca")) == ["certificate", "key"]
    with PrivateFolder(tmp_path / "run" / "ca") as again:
        assert again.read("key", MOST, secret=True) == b"secret"


def test_others_may_look_into_the_folder_but_not_at_its_secrets(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with PrivateFolder(tmp_path) as folder:
        folder.write("certificate", b"public", 0o644)
        folder.write("key", b"secret", 0o640)
        folder.read("certificate", MOST, secret=False)
        with pytest.raises(UnavailableError, match=r"key may be read or written by others .*\(mode 0640\)$"):
            folder.read("key", MOST, secret=True)


def test_paths_of_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "absolute").symlink_to(tmp_path / "real")
    (tmp_path / "relative").symlink_to("real/../real/deep")
    monkeypatch.chdir(tmp_path / "real")
    places = ["absolute/ca", "relative/../ca", "real/./ca", "real//ca"]
    inodes = set()
    for path in [*(tmp_path / place for place in places), Path("ca"), Path("../real/ca")]:
        with PrivateFolder(path) as folder:
            inodes.add(os.fstat(folder.fileno()).st_ino)
    assert inodes == {(tmp_path / "real" / "ca").stat().st_ino}


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    with PrivateFolder(tmp_path) as folder:
        folder.write("file", b"old", 0o600)
        (tmp_path / "folder").mkdir()
        with pytest.raises(IsADirectoryError):
            folder.write("folder", b"new", 0o600)
        assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
        target = tmp_path / "target"
        target.write_bytes(b"theirs")
        (tmp_path / "link").symlink_to(target)
        folder.write("link", b"ours", 0o600)
    assert (target.read_bytes(), (tmp_path / "link").read_bytes()) == (b"theirs", b"ours")


# What is not, without another user.


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o720, 0o702, 0o1777])
def test_a_folder_that_others_may_write(tmp_path: Path, bits: int) -> None:
    folder = tmp_path / "ca"
    folder.mkdir()
    folder.chmod(bits)
    assert why_not(folder).startswith(f"{folder} may be written by others than user ")
    assert why_not(folder).endswith(f"(mode {bits:04o})")
    if not bits & stat.S_ISVTX:
        assert why_not(folder / "below").startswith(f"{folder} may be written by others than user ")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda file: file.chmod(0o640), " may be read or written by others than user "),
        (lambda file: file.chmod(0o604), " may be read or written by others than user "),
        (lambda file: (file.rename(f"{file}2"), file.symlink_to(f"{file}2")), ": a symbolic link"),
        (lambda file: (file.unlink(), file.mkdir()), " is no regular file"),
        (lambda file: (file.unlink(), os.mkfifo(file)), " is no regular file"),
        (lambda file: file.unlink(), ": No such file or directory"),
    ],
)
def test_a_secret_that_is_none(tmp_path: Path, spoil: Callable[[Path], object], reason: str) -> None:
    with PrivateFolder(tmp_path) as folder:
        folder.write("key", b"secret", 0o600)
        spoil(tmp_path / "key")
        with pytest.raises(UnavailableError) as caught:
            folder.read("key", MOST, secret=True)
    assert str(caught.value).startswith(f"{tmp_path}/key{reason}")


def test_a_public_file_that_others_may_write(tmp_path: Path) -> None:
    with PrivateFolder(tmp_path) as folder:
        folder.write("certificate", b"public", 0o664)
        with pytest.raises(UnavailableError, match=r"certificate may be written by others .* 0664\)"):
            folder.read("certificate", MOST, secret=False)


def test_a_folder_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    assert why_not(tmp_path / "file") == f"{tmp_path}/file: Not a directory"
    assert why_not(tmp_path / "file" / "ca") == f"{tmp_path}/file: Not a directory"
    assert why_not(tmp_path / "link") == f"{tmp_path}/link is a symbolic link"
    assert why_not(tmp_path / "loop" / "ca") == f"{tmp_path}/loop: a symbolic link, or too many of them"
    assert why_not(Path("/")) == "/ is no folder of its own"


# Another user.


@root_only
def test_what_another_user_has_made(public: Path) -> None:
    other_user.run("mkdir", "-m", "700", public / "ca")
    assert why_not(public / "ca") == f"{public}/ca belongs to user nobody, not to user root"
    assert why_not(public / "ca" / "below") == f"{public}/ca belongs to user nobody, not to user root"
    assert os.listdir(public / "ca") == []


@root_only
@pytest.mark.parametrize("below", ["", "ca"])
def test_a_link_of_another_user(public: Path, tmp_path: Path, below: str) -> None:
    (tmp_path / "precious").mkdir()
    other_user.run("ln", "-s", tmp_path / "precious", public / "link")
    assert why_not(public / "link" / below) == f"{public}/link is a symbolic link of user nobody"
    assert os.listdir(tmp_path / "precious") == []


@root_only
def test_a_file_of_another_user(public: Path) -> None:
    user, group = other_user.ids()
    with PrivateFolder(public / "ca") as folder:
        folder.write("certificate", b"public", 0o644)
        os.chown(public / "ca" / "certificate", user, group)
        with pytest.raises(UnavailableError, match="certificate belongs to user nobody, not to user root"):
            folder.read("certificate", MOST, secret=False)


@root_only
def test_a_folder_of_root_is_not_everybody_s(public: Path) -> None:
    """As another user, with a Python that every user can run."""
    (public / "ca").mkdir(mode=0o755)
    (public / "shared").mkdir()
    for module in ("__init__", "errors", "private_folder"):
        content = (Path(shared.__path__[0]) / f"{module}.py").read_bytes()
        (public / "shared" / f"{module}.py").write_bytes(content)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from shared.private_folder import PrivateFolder\n"
        "try: PrivateFolder(Path(sys.argv[2]))\n"
        "except Exception as error: print(error)"
    )
    command = ("/usr/bin/python3", "-I", "-B", "-c", program, public)
    if subprocess.run([*command[:2], "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]).returncode:
        pytest.skip("/usr/bin/python3 is older than 3.11")
    said = other_user.run(*command, public / "ca")
    assert said == f"{public}/ca belongs to user root, not to user nobody\n"
    assert other_user.run(*command, public / "mine" / "ca") == ""
    assert (public / "mine" / "ca").stat().st_uid == other_user.ids()[0]


@root_only
def test_a_race_for_the_name_is_never_won(public: Path, tmp_path: Path) -> None:
    """Another user exchanges all that the name may stand for, as fast as they can."""
    precious, name = tmp_path / "precious", public / "ca"
    precious.mkdir()
    swap = (
        'while :; do ln -s "$1" "$2" && rm "$2"; mkdir "$2" && rmdir "$2"; '
        'mkdir "$2" && ln -s "$1" "$2/ca" && rm -r "$2"; done 2>/dev/null'
    )
    attacker = other_user.start("sh", "-c", swap, "sh", precious, name)
    opened = refused = 0
    deadline = time.monotonic() + other_user.PATIENCE_S
    try:
        while (opened < 200 or refused < 200) and time.monotonic() < deadline:
            path = name if opened % 2 else name / "ca"
            try:
                folder = PrivateFolder(path)
            except UnavailableError:
                refused += 1
                continue
            with folder:
                opened += 1
                found = os.fstat(folder.fileno())
                assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (0, 0o700)
                folder.write("key", b"secret", 0o600)
                assert name.lstat().st_uid == 0, "nobody can move it away any more"
            (path / "key").unlink()
            path.rmdir()
            if path != name:
                name.rmdir()
    finally:
        attacker.kill()
        attacker.communicate()
    assert os.listdir(precious) == []
    assert min(opened, refused) >= 200, "both have to happen, or there was no race"


# Where it is by default.


def test_the_default_is_below_the_user_s_runtime_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert runtime_folder(tmp_path) == tmp_path / "hbone"


def test_a_runtime_folder_that_is_not_ours_is_passed_over(tmp_path: Path) -> None:
    otherwise = runtime_folder(None)
    user = os.geteuid()
    assert otherwise in (Path(f"/run/user/{user}/hbone"), Path(f"/tmp/hbone-{user}"))
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for named in (tmp_path / "missing", tmp_path / "link", tmp_path / "open", Path("relative"), Path("/tmp")):
        assert runtime_folder(named) == otherwise


@root_only
def test_the_runtime_folder_that_su_leaves_is_passed_over(public: Path) -> None:
    other_user.run("mkdir", "-m", "700", public / "theirs")
    assert runtime_folder(public / "theirs") == runtime_folder(None)
