"""`hbone cloudrun` as a process: what it prints, leaves on disk and answers to signals."""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hbone.cloudrun.metadata import KEYS_PATH
from shared.errors import EXIT_DENIED, EXIT_OK, EXIT_UNAVAILABLE
from shared.net import http1
from tests.hbone.commands import Command, Ended, output_of, running
from tests.support.http2_peer import Service
from tests.support.metadata_server import closed_port
from tests.support.tcp_peer import PATIENCE_S, TcpServer

ANYWHERE = ("--listen", "127.0.0.1:0", "--metadata", "127.0.0.1:0")


@asynccontextmanager
async def serving(*arguments: object) -> AsyncIterator[tuple[Command, dict[str, str]]]:
    """A stand-in that has said where it is, and what it said, as a shell's eval takes it."""
    async with running("cloudrun", *ANYWHERE, *arguments) as command:
        said: dict[str, str] = {}
        for _ in range(4):
            (word,) = shlex.split(await command.line())
            name, _, value = word.partition("=")
            said[name] = value
        yield command, said


@asynccontextmanager
async def visitor(
    front_end: dict[str, str], *flags: str, tokens: dict[str, str] | None = None
) -> AsyncIterator[Command]:
    """A client of one stand-in with a token of it, or of another one."""
    async with running(
        *(f"{front_end['CLOUDRUN_URL']}/_hbone/22", "--connect", front_end["CLOUDRUN_ADDRESS"]),
        *("--ca", front_end["CLOUDRUN_CA"], *flags),
        environ={"GCE_METADATA_HOST": (tokens or front_end)["GCE_METADATA_HOST"]},
    ) as client:
        yield client


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_everything_that_it_prints_works(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    async with (
        Service.listening() as service,
        serving("--container", f"127.0.0.1:{service.port}", "--dir", folder) as (command, said),
    ):
        assert list(said) == ["CLOUDRUN_ADDRESS", "CLOUDRUN_CA", "CLOUDRUN_URL", "GCE_METADATA_HOST"]
        assert said["CLOUDRUN_CA"] == str(folder / "ca.pem")
        assert said["CLOUDRUN_URL"] == "https://hello.a.run.app"
        async with visitor(said) as client:
            request = await service.request()
            assert request[b":path"] == b"/_hbone/22"
            assert request[b"authorization"].endswith(b"SIGNATURE_REMOVED_BY_GOOGLE")
            request.respond(200)
            await request.send(b"hello")
            request.end()
            client.end()
            await request.rest()
            assert await client.ended() == Ended(EXIT_OK, b"hello", "")
        command.signal(signal.SIGTERM)
        ended = await command.ended()
    assert (ended.code, ended.stdout) == (EXIT_OK, b"")
    first, *_, last = [json.loads(line) for line in ended.stderr.splitlines()]
    assert "audience https://hello.a.run.app" in first["message"]
    assert (last["message"], last["status"], last["bytes_recv"]) == ("request", 200, 5)
    assert last["caller"] == "gateway@local.iam.gserviceaccount.com"


def umask() -> int:
    """The user's, which can only be asked by setting it."""
    current = os.umask(0o077)
    os.umask(current)
    return current


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signals_end_it_in_order(number: signal.Signals) -> None:
    async with serving() as (command, said):
        folder = Path(said["CLOUDRUN_CA"]).parent
        assert sorted(os.listdir(folder)) == ["ca.pem", "cert.pem", "key.pem"]
        assert (mode_of(folder), mode_of(folder / "key.pem")) == (0o700, 0o600)
        command.signal(number)
        ended = await command.ended()
        assert (ended.code, ended.stdout) == (EXIT_OK, b"")
        assert "Traceback" not in ended.stderr
        assert folder.name not in os.listdir(folder.parent), "it was a temporary one"


async def test_modes_of_files_that_were_there_before(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_text("an old one, longer than any key of ours\n" * 100)
    key.chmod(0o644)
    async with serving("--dir", tmp_path):
        assert mode_of(key) == 0o600
        text = key.read_text()
        assert text.startswith("-----BEGIN PRIVATE KEY-----")
        assert text.endswith("-----END PRIVATE KEY-----\n")
        assert mode_of(tmp_path / "ca.pem") == 0o666 & ~umask(), "no secret, so as the user has it"


async def test_without_a_token() -> None:
    async with (
        Service.listening() as service,
        serving("--container", f"127.0.0.1:{service.port}", "--allow-unauthenticated") as (_, said),
        visitor(said, "--no-token"),
    ):
        assert b"authorization" not in dict((await service.request()).fields)


@pytest.mark.parametrize(("flag", "purpose"), [("--listen", "cloudrun"), ("--metadata", "metadata")])
async def test_a_port_in_use(flag: str, purpose: str) -> None:
    async with TcpServer.listening() as other:
        ended = await output_of("cloudrun", *ANYWHERE, flag, f"127.0.0.1:{other.port}")
    assert (ended.code, ended.stdout) == (EXIT_UNAVAILABLE, b"")
    assert f"{purpose}: cannot listen on 127.0.0.1:{other.port}: the port is in use" in ended.stderr


async def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = await output_of("cloudrun", *ANYWHERE, "--dir", tmp_path / "file")
    assert (ended.code, ended.stdout) == (EXIT_UNAVAILABLE, b"")
    assert f"hbone: --dir {tmp_path}/file: File exists" in ended.stderr


# Tokens of another issuer.


@pytest.mark.parametrize("by", ["url", "file"])
async def test_keys_of_another_issuer(by: str, tmp_path: Path) -> None:
    async with Service.listening() as service, serving() as (_, theirs):
        source = f"http://{theirs['GCE_METADATA_HOST']}{KEYS_PATH}"
        if by == "file":
            answer = await http1.get(source, headers={}, timeout_s=PATIENCE_S, max_bytes=10_000)
            (tmp_path / "keys.json").write_bytes(answer.body)
            source = str(tmp_path / "keys.json")
        async with serving("--container", f"127.0.0.1:{service.port}", "--keys", source) as (_, ours):
            for _ in range(2):  # with keys that are fetched first, and with keys at hand
                async with visitor(ours, tokens=theirs):
                    assert (await service.request())[b":path"] == b"/_hbone/22"
            async with visitor(ours) as client:
                ended = await client.ended()
                assert ended.code == EXIT_DENIED
                assert "it is signed with a key that is not known here" in ended.stderr


async def test_keys_that_cannot_be_had() -> None:
    source = f"http://127.0.0.1:{closed_port()}/"
    async with serving("--keys", source) as (_, said), visitor(said) as client:
        ended = await client.ended()
        assert ended.code == EXIT_UNAVAILABLE
        assert f"no keys from {source}: cannot connect" in ended.stderr


async def test_another_issuer_than_the_one_that_is_wanted() -> None:
    async with serving("--issuer", "https://issuer.example") as (_, said), visitor(said) as client:
        ended = await client.ended()
        assert ended.code == EXIT_DENIED
        assert "its issuer is https://accounts.google.com, expected https://issuer.example" in ended.stderr
