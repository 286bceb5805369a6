"""Lines of authorized_keys, and what keys and certificates say; OpenSSH and asyncssh are the judges."""

from __future__ import annotations

import base64
import contextlib
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.public_keys import AuthorizedKey, parse, parse_lines, presented
from tests.support.ssh_clients import keygen, new_key
from tests.support.world import find_program

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIABX1TL3Kd0qjPfNcm6VNlEdGiUnle7XRhWSDdeYpMa8"


def test_a_line_with_all_there_is() -> None:
    key = parse(f'restrict,command="echo \\"a, b\\"",PTY,from="10.0.0.0/8" {KEY} alice on her laptop')
    assert key.options == (
        ("restrict", None),
        ("command", 'echo "a, b"'),
        ("pty", None),
        ("from", "10.0.0.0/8"),
    )
    assert (key.kind, key.comment) == ("ssh-ed25519", "alice on her laptop")
    assert parse(key.line()) == key


@pytest.mark.parametrize("kind", [("ed25519",), ("rsa", "-b", "2048"), ("ecdsa", "-b", "384")])
def test_the_fingerprint_is_what_ssh_keygen_prints(kind: tuple[str, ...], tmp_path: Path) -> None:
    keygen("-t", *kind, "-N", "", "-C", "me", "-f", tmp_path / "key")
    told = subprocess.run(
        [find_program("ssh-keygen"), "-lf", tmp_path / "key.pub"], capture_output=True, text=True, check=True
    )
    assert parse((tmp_path / "key.pub").read_text().strip()).fingerprint == told.stdout.split()[1]


@pytest.mark.parametrize("kind", [("ed25519",), ("rsa", "-b", "2048"), ("ecdsa", "-b", "256")])
def test_a_certificate_says_who_and_by_whom(kind: tuple[str, ...], tmp_path: Path) -> None:
    authority = new_key(tmp_path, "authority")
    keygen("-t", *kind, "-N", "", "-f", tmp_path / "key")
    keygen("-s", authority, "-I", "alice@corp", "-n", "app,root", "-z", "7", tmp_path / "key.pub")
    key = parse((tmp_path / "key.pub").read_text().strip())
    shown = presented(blob_of(tmp_path / "key-cert.pub"))
    assert shown.is_certificate
    assert (shown.identity, shown.serial, shown.principals) == ("alice@corp", 7, ("app", "root"))
    assert shown.key_fingerprint == key.fingerprint
    assert shown.authority == parse((tmp_path / "authority.pub").read_text().strip()).fingerprint
    assert presented(key.blob).key_fingerprint == key.fingerprint


def blob_of(file: Path) -> bytes:
    return base64.b64decode(file.read_text().split()[1])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("hello", "no public key behind the options"),
        ("ssh-dss AAAA", "no public key of a type that is known"),
        ("ssh-ed25519 AAAA!", "no base64"),
        ("ssh-ed25519", "not of the type"),
        (KEY.replace("ssh-ed25519 ", "ssh-rsa "), "not of the type"),
        (f"command=ls {KEY}", "double quotes"),
        (f'command="ls {KEY}', "no closing quote"),
        (f", {KEY}", "an option without a name"),
        (f"{KEY} a\0b", "cannot be printed"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "a private key"),
        ("a" * 20_000, "longer than"),
    ],
)
def test_what_is_none(line: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(line)


def test_lines_of_a_file() -> None:
    found = parse_lines(f"# the team\n\n{KEY} alice\n  {KEY} bob\n")
    assert [key.comment for key in found] == ["alice", "bob"]
    with pytest.raises(ValueError, match="line 3: no public key"):
        parse_lines(f"# the team\n{KEY}\nhello\n")
    with pytest.raises(ValueError, match="no public key"):
        parse_lines("# nobody\n")


@given(st.text(max_size=300))
def test_any_text_is_a_key_or_a_ValueError(text: str) -> None:
    try:
        parse(text)
    except ValueError:
        return


OPTION = st.tuples(
    st.sampled_from(["command", "from", "no-pty", "restrict", "permitopen"]),
    st.none()
    | st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="\\"), max_size=20),
)


@given(st.lists(OPTION, max_size=4), st.text("abc @", max_size=10))
def test_a_line_comes_back_from_its_own_text(options: list[tuple[str, str | None]], comment: str) -> None:
    key = AuthorizedKey(tuple(options), "ssh-ed25519", parse(KEY).blob, comment.strip())
    assert parse(key.line()) == key


@given(st.binary(max_size=200))
def test_any_bytes_are_a_key_or_a_ValueError(blob: bytes) -> None:
    for data in (blob, b"\0\0\0\x20ssh-ed25519-cert-v01@openssh.com" + blob):
        with contextlib.suppress(ValueError):
            presented(data)
