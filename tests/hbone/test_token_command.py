"""`hbone token` as a shell has it: what it prints where, and how it ends."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from hbone.token_command import _lasting
from shared.errors import EXIT_DENIED, EXIT_OK, EXIT_UNAVAILABLE, EXIT_USAGE
from tests.hbone.commands import Ended, output_of, running
from tests.support.metadata_server import (
    Answer,
    MetadataServer,
    Request,
    closed_port,
    unsigned_token,
)

AUDIENCE = "https://hello.a.run.app"


def minted(request: Request) -> Answer:
    claims = {"aud": request.audience, "sub": "12345", "email": "gateway@example.com"}
    return Answer(unsigned_token(**claims, exp=time.time() + 3599).encode())


BLOCK = re.compile(
    r"source     metadata server at (\S+)\n"
    r"audience   https://hello\.a\.run\.app\n"
    r"subject    12345\n"
    r"email      gateway@example\.com\n"
    r"expires    20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ, in 59 min \d+ s\n"
)


async def test_what_is_told_is_not_the_token() -> None:
    async with MetadataServer(minted) as server:
        ended = await output_of("token", "--audience", AUDIENCE, environ={"GCE_METADATA_HOST": server.host})
    assert (ended.code, ended.stderr) == (EXIT_OK, "")
    block = BLOCK.fullmatch(ended.stdout.decode())
    assert block is not None
    assert block[1] == server.host


@pytest.mark.shows_secret  # as --show is asked to
async def test_the_token_alone_for_a_shell() -> None:
    async with MetadataServer(minted) as server:
        shell = 'token=$("$@") && printf "<%s>" "$token"'
        environ = {"GCE_METADATA_HOST": server.host}
        async with running(
            "token", "--audience", AUDIENCE, "--show", environ=environ, shell=shell
        ) as command:
            ended = await command.ended()
    assert ended.code == EXIT_OK
    assert re.fullmatch(r"<[\w-]+\.[\w-]+\.[\w-]+>", ended.stdout.decode())
    assert BLOCK.fullmatch(ended.stderr)
    assert ended.stdout.decode().strip("<>") not in ended.stderr


@pytest.mark.parametrize(
    ("claims", "told"),
    [
        (None, "token      opaque, 6 characters: its claims cannot be read\n"),
        ({"aud": ["a", "b"]}, "audience   a b\nexpires    unknown: a JWT without an expiry\n"),
        ({"sub": "a\nb"}, "subject    a\\nb\nexpires    unknown: a JWT without an expiry\n"),
        ({"exp": float("inf")}, "expires    unknown: a JWT with an impossible expiry\n"),
    ],
)
async def test_a_file(tmp_path: Path, claims: dict[str, object] | None, told: str) -> None:
    file = tmp_path / "token"
    file.write_text("opaque" if claims is None else unsigned_token(**claims))
    ended = await output_of("token", "--token-file", file)
    assert ended == Ended(EXIT_OK, f"source     file {file}\n{told}".encode(), "")


async def test_a_file_for_an_audience(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(unsigned_token(aud="https://other.example", exp=time.time() + 60))
    ended = await output_of("token", "--token-file", file, "--audience", AUDIENCE, "--show")
    text = f"its token cannot be sent: it is for https://other.example, not for {AUDIENCE}"
    assert ended == Ended(EXIT_DENIED, b"", f"hbone: cannot use token file {file}: {text}\n")


async def test_an_expired_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(unsigned_token(exp=1))
    ended = await output_of("token", "--token-file", file, "--show")
    assert (ended.code, ended.stdout) == (EXIT_DENIED, b"")
    assert re.fullmatch(r"hbone: cannot use token file \S+: its token expired \d+ s ago, .*\n", ended.stderr)


async def test_no_token() -> None:
    environ = {"GCE_METADATA_HOST": f"127.0.0.1:{closed_port()}"}
    ended = await output_of("token", "--audience", AUDIENCE, environ=environ)
    assert (ended.code, ended.stdout, ended.stderr.count("\n")) == (EXIT_DENIED, b"", 1)
    assert ended.stderr.startswith("hbone: no metadata server: cannot connect to 127.0.0.1:")


async def test_the_source_by_flag() -> None:
    async with MetadataServer(minted) as server:
        environ = {"GCE_METADATA_HOST": server.host, "HBONE_TOKENS": "gke"}
        command = ("token", "--audience", AUDIENCE)
        ended = await output_of(*command, environ=environ)
        assert (ended.code, ended.stdout) == (EXIT_USAGE, b"")
        assert ended.stderr.startswith("hbone: no token exchange on GKE without PROJECT_ID, CLUSTER_NAME")
        ended = await output_of(*command, "--source", "metadata", environ=environ)
        assert BLOCK.fullmatch(ended.stdout.decode())


async def test_nobody_takes_the_answer(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("opaque")
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        async with running("token", "--token-file", tmp_path / "token", stdout=descriptor) as command:
            ended = await command.ended()
    finally:
        os.close(descriptor)
    assert ended.code == EXIT_UNAVAILABLE
    assert ended.stderr == "hbone: cannot write the answer: No space left on device\n"


def test_durations() -> None:
    assert [_lasting(seconds) for seconds in (0.9, 59, 60, 3599, 3600, 90_000)] == [
        "0 s",
        "59 s",
        "1 min 0 s",
        "59 min 59 s",
        "1 h 0 min",
        "25 h 0 min",
    ]
