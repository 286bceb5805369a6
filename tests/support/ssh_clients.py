"""krun's sshd of either kind on a port of its own, and OpenSSH's programs as its clients."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import logging
import os
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from agent.config.ssh_settings import SshServer, SshSettings
from agent.ssh.sshd import Sshd
from shared.address import Address
from tests.support.tcp_peer import PATIENCE_S
from tests.support.world import find_program, free_port

KINDS: tuple[SshServer, ...] = ("openssh", "builtin")

USER = getpass.getuser()


def keygen(*arguments: str | Path) -> None:
    """Runs ssh-keygen to its good end."""
    subprocess.run([find_program("ssh-keygen"), "-q", *map(str, arguments)], check=True, capture_output=True)


def new_key(folder: Path, name: str, *more: str) -> Path:
    """A new key of a user or of a host; beside it is NAME.pub."""
    keygen("-t", "ed25519", "-N", "", "-C", f"{name}@test", "-f", folder / name, *more)
    return folder / name


@dataclass(frozen=True)
class Done:
    """A client that has ended."""

    code: int
    out: bytes
    err: bytes


@dataclass(frozen=True)
class Client:
    """How OpenSSH's programs reach an sshd."""

    address: Address
    key: Path
    folder: Path
    options: tuple[str, ...] = ()

    def but(self, *options: str, key: Path | None = None) -> Client:
        """With further options of ssh_config(5)."""
        return replace(self, options=(*self.options, *options), key=key or self.key)

    @property
    def config(self) -> Path:
        """A file of ssh_config(5); the host's name there is `box`."""
        file = self.folder / f"ssh_config_{abs(hash((self.address, self.key, self.options)))}"
        if file.exists():  # and others may be reading it
            return file
        lines = [
            "Host box",
            *(f"HostName {self.address.host}", f"Port {self.address.port}", f"User {USER}"),
            *(f"IdentityFile {self.key}", "IdentitiesOnly yes", "BatchMode yes", "LogLevel ERROR"),
        ]
        if not any(option.startswith("UserKnownHostsFile") for option in self.options):
            lines += ["StrictHostKeyChecking no", "UserKnownHostsFile /dev/null"]
        # The first value counts.
        file.write_text("\n".join([lines[0], *self.options, *lines[1:], ""]))
        return file

    async def start(
        self,
        program: str,
        *arguments: str | Path,
        env: Mapping[str, str] | None = None,
        has_input: bool = True,
    ) -> asyncio.subprocess.Process:
        """Starts one of OpenSSH's programs."""
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *(find_program(program), "-F", str(self.config), *map(str, arguments)),
            stdin=pipe if has_input else asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            env={**os.environ, **(env or {})},
        )

    async def run(
        self, program: str, *arguments: str | Path, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Done:
        """Runs one to its end."""
        process = await self.start(program, *arguments, env=env, has_input=bool(stdin))
        try:
            async with asyncio.timeout(PATIENCE_S):
                out, err = await process.communicate(stdin or None)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode is not None
        return Done(process.returncode, out, err)

    async def ssh(self, *command: str, stdin: bytes = b"") -> Done:
        """Runs a command there."""
        return await self.run("ssh", "box", *command, stdin=stdin)


@asynccontextmanager
async def serving(
    server: SshServer, place: Path, /, *, environ: Mapping[str, str] | None = None, **settings: object
) -> AsyncIterator[tuple[Sshd, Client]]:
    """An sshd, and a client that may log in. `settings` are further ones; SSH_AUTH has the client's key,
    unless they have another."""
    key = place / "user_key"
    if not key.exists():
        new_key(place, "user_key")
    home = place / "home"
    home.mkdir(exist_ok=True)
    address = Address("127.0.0.1", free_port())
    told: dict[str, object] = {"auth": (place / "user_key.pub").read_text(), **settings}
    if os.geteuid() == 0:
        told.setdefault("user", "root")
    app = {"PATH": os.environ["PATH"], "HOME": str(home), "OF_THE_APP": "yes", **(environ or {})}
    sshd = Sshd(SshSettings(server=server, listen=address, **told), lambda: app, None)  # type: ignore[arg-type]
    sshd.start()
    await sshd.refreshed()
    try:
        yield sshd, Client(address, key, place)
    finally:
        await sshd.close()


@asynccontextmanager
async def running(
    client: Client, program: str, *arguments: str | Path, env: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A program until the block ends."""
    process = await client.start(program, *arguments, env=env)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


def tuple_of(client: Client) -> tuple[str, int]:
    """Its sshd's address as sockets have it."""
    return client.address.host, client.address.port


class Log:
    """What the sshd's log has said."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "hbone.ssh")
        self._caplog = caplog

    async def said(self, text: str) -> str:
        """The first line with `text`, once it is there."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for record in self._caplog.records:
                    if text in record.getMessage():
                        return record.getMessage()
                await asyncio.sleep(0.01)

    def lines(self) -> list[str]:
        """All of them so far."""
        return [record.getMessage() for record in self._caplog.records]
