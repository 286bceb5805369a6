"""The beginning of SSH, against OpenSSH's sshd, and against what is no SSH."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbone.doctor.ssh_server import MAX_BANNER_BYTES, Greeting, SshError
from tests.support.world import find_program

KINDS = ("ed25519", "ecdsa", "rsa")


def host_key(folder: Path, kind: str) -> tuple[Path, str]:
    """A key, and its fingerprint as ssh-keygen shows it."""
    key = folder / kind
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", kind, "-f", key], check=True)
    shown = subprocess.run(["ssh-keygen", "-l", "-f", key], check=True, capture_output=True, text=True)
    return key, shown.stdout.split()[1]


def greet(sock: socket.socket) -> Greeting:
    greeting = Greeting()
    sock.settimeout(20)
    while not greeting.done:
        sock.sendall(greeting.to_send)
        greeting.to_send.clear()
        data = sock.recv(4096)
        if not data:
            break
        greeting.feed(data)
    return greeting


@pytest.mark.parametrize("kind", KINDS)
def test_the_fingerprint_is_the_one_that_ssh_keygen_shows(tmp_path: Path, kind: str) -> None:
    key, fingerprint = host_key(tmp_path, kind)
    ours, theirs = socket.socketpair()
    sshd = [find_program("sshd"), "-i", "-f", "/dev/null", "-h", str(key), "-o", "StrictModes=no"]
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # as Debian's sshd wants it of root
    end = theirs.fileno()
    with ours, theirs, subprocess.Popen(sshd, stdin=end, stdout=end, stderr=subprocess.PIPE) as process:
        theirs.close()
        greeting = greet(ours)
        ours.close()
        process.wait(20)
    assert greeting.version.startswith("SSH-2.0-OpenSSH_")
    assert greeting.host_key is not None
    assert greeting.host_key.fingerprint == fingerprint
    assert kind in greeting.host_key.kind or kind == "ecdsa"


def test_lines_before_the_version_are_allowed() -> None:
    greeting = Greeting()
    greeting.feed(b"SSH is for members\r\nSSH-2.0-x\r\n")
    assert greeting.version == "SSH-2.0-x"


@pytest.mark.parametrize(
    "data", [b"HTTP/1.1 400 Bad Request\r\n", b"\x16\x03\x01", b"SSH-1.5-x\r\n", b"x" * 9000]
)
def test_what_is_no_ssh(data: bytes) -> None:
    with pytest.raises(SshError):
        Greeting().feed(data)


@pytest.mark.parametrize(
    "packet",
    [
        bytes.fromhex("00000001 00"),
        bytes.fromhex("7fffffff 00"),
        bytes.fromhex("00000008 09") + bytes(8),
        bytes.fromhex("0000000c 04 1f 00000009 00") + bytes(5),  # a reply whose key is cut off
        bytes.fromhex("00000008 04 33") + bytes(6),
    ],
)
def test_a_packet_with_a_fault(packet: bytes) -> None:
    with pytest.raises(SshError):
        Greeting().feed(b"SSH-2.0-x\r\n" + packet)


def test_a_server_that_disconnects_has_a_version_and_no_key() -> None:
    greeting = Greeting()
    greeting.feed(b"SSH-2.0-x\r\n" + bytes.fromhex("00000008 04 01") + bytes(6))
    assert (greeting.version, greeting.done, greeting.host_key) == ("SSH-2.0-x", True, None)


@given(st.lists(st.binary(max_size=60), max_size=20), st.booleans())
def test_anything_ends_in_an_error_or_is_bounded(pieces: list[bytes], is_ssh: bool) -> None:
    greeting = Greeting()
    try:
        if is_ssh:
            greeting.feed(b"SSH-2.0-x\n")
        for piece in pieces:
            greeting.feed(piece)
    except SshError:
        return
    assert len(greeting._data) <= MAX_BANNER_BYTES + 60
