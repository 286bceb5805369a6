"""The development CA: one root for several processes, for one identity each, clear about what is wrong."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from shared.credentials.certificates import dev_ca
from shared.credentials.certificates.authority import Authority
from shared.credentials.certificates.dev_ca import DevCa, open_authority
from shared.errors import SigningError, UnavailableError
from shared.private_folder import PrivateFolder
from shared.trust.spiffe import SpiffeId, peer_id
from tests.support import other_user
from tests.support.certificate_requests import new_key, request_pem
from tests.support.error_texts import told

HELLO = SpiffeId.of_workload("demo.local", "demo", "hello")


async def test_a_certificate_from_a_folder_that_was_not_there(tmp_path: Path) -> None:
    key = new_key()
    signed = await DevCa(tmp_path / "run" / "ca", HELLO).sign(request_pem(key), 600)
    leaf = x509.load_pem_x509_certificate(signed.chain_pem)
    leaf.verify_directly_issued_by(x509.load_pem_x509_certificate(signed.roots_pem))
    assert leaf.public_key() == key.public_key()
    assert str(peer_id(leaf.public_bytes(Encoding.DER))) == str(HELLO)
    assert leaf.not_valid_after_utc - datetime.now(UTC) < timedelta(seconds=601)


def test_processes_that_begin_together_have_the_same_root(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from shared.credentials.certificates.dev_ca import open_authority\n"
        "print('ready', flush=True); sys.stdin.read()\n"
        "print(open_authority(Path(sys.argv[1]), 'demo.local').root.serial_number)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "ca")]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    assert len({process.communicate(timeout=30)[0] for process in started}) == 1


async def test_a_process_that_was_stopped_holds_up_nobody_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dev_ca, "LOCK_TIMEOUT_S", 0.05)
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    told = f"development CA in {tmp_path}: {tmp_path} is locked by another process"
    with pytest.raises(SigningError, match=told):
        await DevCa(tmp_path, HELLO).sign(request_pem(new_key()), 60)
    os.close(lock)
    assert (await DevCa(tmp_path, HELLO).sign(request_pem(new_key()), 60)).chain_pem


def test_what_is_made_is_the_owners_only(tmp_path: Path) -> None:
    open_authority(tmp_path / "ca", "demo.local")
    assert stat.S_IMODE((tmp_path / "ca").stat().st_mode) == 0o700
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "ca").iterdir()}
    assert modes == {"ca-key.pem": 0o600, "ca-cert.pem": 0o644}


def test_a_root_that_has_ended_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = Authority.create("demo.local", lifetime_s=-1)
    with PrivateFolder(tmp_path) as folder:
        old.save(folder)
    new = open_authority(tmp_path, "demo.local")
    assert new.root != old.root
    assert "has ended" in caplog.text
    assert open_authority(tmp_path, "demo.local").root == new.root


async def test_another_trust_domain(tmp_path: Path) -> None:
    open_authority(tmp_path, "other.local")
    with pytest.raises(SigningError) as caught:
        await DevCa(tmp_path, HELLO).sign(request_pem(new_key()), 60)
    assert str(caught.value) == (
        f"development CA in {tmp_path}: {tmp_path} is of trust domain other.local, not demo.local"
    )


async def test_a_request_for_somebody_else(tmp_path: Path) -> None:
    theirs = x509.UniformResourceIdentifier("spiffe://demo.local/ns/demo/sa/admin")
    with pytest.raises(
        SigningError, match=r"^development CA in .*: .*asks for another name than spiffe://demo"
    ):
        await DevCa(tmp_path, HELLO).sign(request_pem(new_key(), theirs), 60)


@pytest.mark.parametrize("spoilt", ["ca-cert.pem", "ca-key.pem"])
@pytest.mark.parametrize("content", [b"", b"garbage"])
async def test_spoilt_files_are_named(tmp_path: Path, spoilt: str, content: bytes) -> None:
    open_authority(tmp_path, "demo.local")
    key = (tmp_path / "ca-key.pem").read_text().splitlines()[1]
    (tmp_path / spoilt).write_bytes(content)
    with pytest.raises(SigningError, match=f"^development CA in .*{spoilt}") as caught:
        await DevCa(tmp_path, HELLO).sign(request_pem(new_key()), 60)
    assert key not in told(caught.value)


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", tmp_path / "file" / "ca"):
        with pytest.raises(UnavailableError, match=r"/file: Not a directory$"):
            open_authority(folder, "demo.local")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "ca-key.pem" / "in the way").mkdir(parents=True)
    with pytest.raises(UnavailableError, match=f"^{tmp_path}: Is a directory$"):
        open_authority(tmp_path, "demo.local")


# Another user of the machine, who was there first.


@other_user.root_only
async def test_the_authority_of_another_user_is_not_trusted(tmp_path: Path) -> None:
    """They have its key, so they could sign as anybody."""
    with PrivateFolder(tmp_path) as folder:
        Authority.create("demo.local").save(folder)
    with other_user.shared_folder() as public:
        for name in ("ca-cert.pem", "ca-key.pem"):
            (public / name).write_bytes((tmp_path / name).read_bytes())
            (public / name).chmod(0o644)
        copies = [str(public / name) for name in ("ca-cert.pem", "ca-key.pem")]
        other_user.run("sh", "-c", 'mkdir -m 755 "$1" && cp "$2" "$3" "$1"', "sh", public / "ca", *copies)
        with pytest.raises(SigningError, match="/ca belongs to user nobody, not to user root"):
            await DevCa(public / "ca", HELLO).sign(request_pem(new_key()), 60)
        with pytest.raises(UnavailableError) as caught:
            DevCa(public / "ca", HELLO).check()
        assert str(caught.value) == (
            f"development CA: {public}/ca belongs to user nobody, not to user root; "
            "set HBONE_CA_FOLDER to another folder, or remove this one"
        )


@other_user.root_only
async def test_no_key_is_written_where_another_user_s_link_leads(tmp_path: Path) -> None:
    with other_user.shared_folder() as public:
        other_user.run("ln", "-s", tmp_path, public / "ca")
        with pytest.raises(SigningError, match="/ca is a symbolic link of user nobody"):
            await DevCa(public / "ca", HELLO).sign(request_pem(new_key()), 60)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "bits", "reason"),
    [
        (".", 0o770, "may be written by others than user"),
        ("ca-key.pem", 0o640, "ca-key.pem may be read or written by others than user"),
        ("ca-cert.pem", 0o664, "ca-cert.pem may be written by others than user"),
    ],
)
async def test_what_others_may_write_or_read(tmp_path: Path, name: str, bits: int, reason: str) -> None:
    open_authority(tmp_path / "ca", "demo.local")
    (tmp_path / "ca" / name).chmod(bits)
    with pytest.raises(SigningError, match=reason):
        await DevCa(tmp_path / "ca", HELLO).sign(request_pem(new_key()), 60)
