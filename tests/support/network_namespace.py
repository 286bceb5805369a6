"""A network of a test's own: a network namespace, with a resolv.conf and a hosts file that count only there.

The calling thread moves in, and with it the processes that it starts; it moves back when the block ends.
There is nothing but loopback, with an address like those of a cluster on it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POD = "10.9.8.7"
"""An address of the network that is not loopback's."""

_CLONE_FS, _CLONE_NEWNS, _CLONE_NEWNET = 0x00000200, 0x00020000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_SIOCSIFFLAGS, _SIOCSIFADDR = 0x8914, 0x8916
_IFF_UP, _IFF_RUNNING = 0x1, 0x40

_libc = ctypes.CDLL(None, use_errno=True)


class NoNetworkError(Exception):
    """This user may make no network here."""


class Network:
    """Made by `network`."""

    def __init__(self, folder: Path) -> None:
        self.resolv_conf = folder / "resolv.conf"
        """What is /etc/resolv.conf there; to be written in place."""
        self.hosts = folder / "hosts"
        """What is /etc/hosts there."""


@contextmanager
def network(folder: Path) -> Iterator[Network]:
    """A network, until the block ends; its files are kept in `folder`. Raises NoNetworkError."""
    made = Network(folder)
    made.resolv_conf.write_text("nameserver 127.0.0.53\n")
    made.hosts.write_text("127.0.0.1 localhost\n")
    here = [(os.open(f"/proc/thread-self/ns/{name}", os.O_RDONLY), flag) for name, flag in _SPACES]
    folder_before = os.getcwd()
    try:
        _call(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET))
    except OSError as error:
        for descriptor, _ in here:
            os.close(descriptor)
        if error.errno in (errno.EPERM, errno.ENOSYS, errno.EINVAL):
            raise NoNetworkError(f"no network namespace can be made here: {error.strerror}") from error
        raise
    try:
        _call(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
        for file, place in ((made.resolv_conf, b"/etc/resolv.conf"), (made.hosts, b"/etc/hosts")):
            _call(_libc.mount(bytes(file), place, None, _MS_BIND, None))
        _raise_loopback()
        yield made
    finally:
        _call(_libc.unshare(_CLONE_FS))  # from threads that were started meanwhile, which stay there
        for descriptor, flag in here:
            _call(_libc.setns(descriptor, flag))
            os.close(descriptor)
        os.chdir(folder_before)  # setns has led to the root


_SPACES = (("net", _CLONE_NEWNET), ("mnt", _CLONE_NEWNS))


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP | _IFF_RUNNING))
        address = struct.pack("16sHH4s8x", b"lo:1", socket.AF_INET, 0, socket.inet_aton(POD))
        fcntl.ioctl(control, _SIOCSIFADDR, address)


def _call(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
