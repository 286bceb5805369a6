"""Real sshds for our own user: who starts them, and what a client and krun need to know of each."""

from __future__ import annotations

import getpass
import os
import pwd
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from shared.address import Address
from tests.path.programs import run, start
from tests.support.network import free_port
from tests.support.world import PATIENCE_S, find_program, said

_CONFIG = """\
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
UsePAM no
StrictModes no
SetEnv HOME={folder}
MaxStartups 200
Subsystem sftp internal-sftp
"""
"""The home has no ~/.bashrc: a developer's may wait for a minute, as pyenv does for a lock."""


def _shell() -> str:
    """Our own user's login shell, in which sshd runs commands; empty if there is none."""
    try:
        return pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"  # passwd(5)
    except KeyError:
        return ""


lets_us_in = pytest.mark.skipif(
    Path(_shell()).name in ("", "nologin", "false"), reason="sshd lets nobody in without a login shell"
)


@dataclass(frozen=True, slots=True)
class Sshd:
    """Where it listens, and what a client needs."""

    address: Address
    user: str
    user_key: Path
    host_key: Path
    """The public one."""

    environ: Mapping[str, str] = field(default_factory=dict)
    """What krun is told."""

    def known_as(self, name: str) -> str:
        """The line of known_hosts with which it is trusted by `name`."""
        return f"{name} {self.host_key.read_text()}"


def new_key(file: Path, kind: str = "ed25519") -> Path:
    """A private key in `file`, and the public one beside it."""
    file.unlink(missing_ok=True)
    made = run(find_program("ssh-keygen"), "-q", "-t", kind, "-N", "", "-f", file)
    assert made.returncode == 0, made.stderr
    return file


@contextmanager
def openssh(folder: Path) -> Iterator[Sshd]:
    """OpenSSH's, with its files in `folder`, until the block ends."""
    host_key, user_key = new_key(folder / "host_key"), new_key(folder / "user_key")
    address = Address("127.0.0.1", free_port())
    config = folder / "sshd_config"
    config.write_text(_CONFIG.format(address=address, folder=folder))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # as Debian's ssh.service does; sshd locks itself in there
    process = start("sshd", [find_program("sshd"), "-D", "-e", "-f", config], folder)
    try:
        process.wait_for(lambda record: said(record).startswith("Server listening on"), PATIENCE_S)
        public = host_key.with_suffix(".pub")
        yield Sshd(address, getpass.getuser(), user_key, public, {"HBONE_SSHD": str(address)})
    finally:
        process.stop()


@contextmanager
def of_krun(server: str, folder: Path) -> Iterator[Sshd]:
    """krun's: the image's OpenSSH (`openssh`), or the one in its own process (`builtin`). It starts and ends
    with krun."""
    secret = folder / "sshdebug"
    secret.mkdir()
    host_key, user_key = new_key(secret / "id_ecdsa", "ecdsa"), new_key(folder / "user_key")
    public = host_key.with_suffix(".pub").rename(folder / "host_key.pub")
    (secret / "authorized_keys").write_text(user_key.with_suffix(".pub").read_text())
    address = Address("127.0.0.1", free_port())
    user = getpass.getuser()
    environ = {
        "HBONE_SSH": server,
        "HBONE_SSH_FOLDER": str(secret),
        "HBONE_SSH_LISTEN": str(address),
        "HBONE_SSH_USER": user,
    }
    yield Sshd(address, user, user_key, public, environ)


KINDS: Mapping[str, Callable[[Path], AbstractContextManager[Sshd]]] = {
    "OpenSSH's": openssh,
    "krun's by OpenSSH": partial(of_krun, "openssh"),
    "krun's own": partial(of_krun, "builtin"),
}
"""By who starts it, and which one it is."""
