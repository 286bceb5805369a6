"""Short answers: giving one, and reading why a peer refused."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import StatusError
from shared.net.http2.answers import (
    REASON_BYTES,
    REASON_TIMEOUT_S,
    AskedOf,
    answer,
    refusal,
)
from shared.net.legs.stream import Stream
from shared.tasks import spawn
from tests.shared.http2.dialogue import (
    GET,
    HEAD,
    POST,
    Fields,
    data,
    headers,
    reset,
)
from tests.shared.net.hasty_loop import hasty
from tests.shared.net.in_memory import Line

PLAIN = (b"content-type", b"text/plain; charset=utf-8")
NEWLINE = b"\n"
HTML = (b"content-type", b"text/html")

SERVICE_WITH_TOKEN = AskedOf(token_sent=True)
SERVICE_WITHOUT = AskedOf(token_sent=False)
MESH_WITH_TOKEN = AskedOf(token_sent=True, in_mesh=True)
MESH_WITHOUT = AskedOf(token_sent=False, in_mesh=True)


# Giving one.


async def test_answer() -> None:
    line = Line(client=False)
    answer(line.request(1, GET, end=True), 404, "no such target: föö")
    assert await line.sent() == [
        "HEADERS 1 :status=404 content-type=text/plain; charset=utf-8 content-length=22",
        f"DATA 1 {'no such target: föö'.encode() + NEWLINE!r}",
        "DATA 1 b'' END",
    ]
    assert line.connection.open_streams == 0


async def test_the_answer_to_head_has_no_body() -> None:
    line = Line(client=False)
    answer(line.request(1, HEAD, end=True), 503, "why")
    assert await line.sent() == [
        "HEADERS 1 :status=503 content-type=text/plain; charset=utf-8 content-length=4",
        "DATA 1 b'' END",
    ]


async def test_an_answer_to_nobody() -> None:
    line = Line(client=False)
    stream = line.request(1)
    line.get(reset(1, 8))
    answer(stream, 404, "too late")
    assert await line.sent() == []


# Reading why a peer refused.


def asked() -> tuple[Line, Stream]:
    line = Line(client=True)
    return line, line.connection.open(POST)


async def refused(
    status: int, fields: Fields = (), body: bytes = b"", asked_of: AskedOf = SERVICE_WITH_TOKEN
) -> str:
    """What a refusal's error says."""
    line, stream = asked()
    line.get(headers(1, [(b":status", b"%d" % status), *fields]), data(1, body, end=True))
    error = await refusal(stream, status, asked_of)
    assert isinstance(error, StatusError)
    assert error.status == status
    assert line.connection.open_streams == 0
    return str(error)


@pytest.mark.parametrize(
    ("status", "fields", "body", "text"),
    [
        (404, [PLAIN], b"no such target; known are 15003, 22\n", ": no such target; known are 15003, 22"),
        (503, [PLAIN], b"two\r\nlines\t here\n", ": two lines here"),
        (500, [PLAIN], b"\x1b[31mred\x00 \xff", ": ?[31mred? \ufffd"),
        (500, [PLAIN], b"x" * 1000, ": " + "x" * 200),
        (401, [HTML], b"<html>", ": the token is invalid, expired or for another audience"),
        (403, [], b"<html>", ": the caller lacks roles/run.invoker"),
        (429, [PLAIN], b"", ": no instance of the service is free"),
        (302, [(b"location", b"https://accounts.example/?a")], b"", " to https://accounts.example/?a"),
        (418, [HTML], b"<html>", ""),
        (599, [], b"", ""),
    ],
)
async def test_what_the_error_says(status: int, fields: Fields, body: bytes, text: str) -> None:
    assert await refused(status, fields, body) == f"answered {status}{text}"


BEARER = (b"www-authenticate", b'Bearer error="invalid_token"')


@pytest.mark.parametrize(
    ("status", "asked_of", "fields", "text"),
    [
        (401, SERVICE_WITHOUT, [], "no token was sent: the peer's own policy asks for one"),
        (403, SERVICE_WITHOUT, [], "no token was sent: the peer's own policy asks for one"),
        (401, MESH_WITHOUT, [], "the peer's own policy does not allow us (no token"),
        (403, MESH_WITHOUT, [], "the peer's own policy does not allow us (no token"),
        (401, MESH_WITHOUT, [BEARER], "no token was sent: the peer's own policy asks"),
        (401, MESH_WITH_TOKEN, [BEARER], "the token is invalid, expired or for another"),
        (401, MESH_WITH_TOKEN, [], "the peer's own policy does not allow us, or the token"),
        (403, MESH_WITH_TOKEN, [], "the peer's own policy does not allow us, or the token"),
        (404, MESH_WITHOUT, [], "the peer knows no such target"),
        (502, MESH_WITHOUT, [], "the peer could not reach the target"),
        (503, MESH_WITH_TOKEN, [], "the peer could not reach the target"),
        (504, MESH_WITH_TOKEN, [], "the target did not answer the peer in time"),
    ],
)
async def test_whose_policy_it_is(status: int, asked_of: AskedOf, fields: Fields, text: str) -> None:
    """A member of the mesh, such as a ztunnel, refuses with a bare 401."""
    assert (await refused(status, fields, asked_of=asked_of)).startswith(f"answered {status}: {text}")


async def test_a_body_without_end_is_read_as_far_as_it_counts() -> None:
    line, stream = asked()
    line.get(headers(1, [(b":status", b"500"), PLAIN]), data(1, b"why " * 1000))
    assert len(b"why " * 1000) > REASON_BYTES
    assert str(await refusal(stream, 500, SERVICE_WITH_TOKEN)).startswith("answered 500: why why")
    sent = await line.sent()
    assert sent[1:] == ["DATA 1 b'' END", "RST_STREAM 1 CANCEL"]


@hasty
async def test_a_body_that_does_not_come() -> None:
    line, stream = asked()
    line.get(headers(1, [(b":status", b"503")]))
    started = asyncio.get_running_loop().time()
    error = await refusal(stream, 503, SERVICE_WITH_TOKEN)
    assert str(error) == "answered 503: the container crashed, or krun could not reach the target"
    assert asyncio.get_running_loop().time() - started == pytest.approx(REASON_TIMEOUT_S, abs=0.5)


async def test_a_body_that_is_broken_off() -> None:
    line, stream = asked()
    line.get(headers(1, [(b":status", b"503"), PLAIN]))
    reading = spawn(refusal(stream, 503, SERVICE_WITH_TOKEN), name="refusal")
    await asyncio.sleep(0)
    line.get(data(1, b"half a rea"), reset(1, 2))
    assert str(await reading) == "answered 503: half a rea"


async def test_a_body_in_pieces() -> None:
    line, stream = asked()
    line.get(headers(1, [(b":status", b"404"), PLAIN]))
    reading = spawn(refusal(stream, 404, SERVICE_WITH_TOKEN), name="refusal")
    await asyncio.sleep(0)
    for piece in (b"no ", b"such ", b"target"):
        line.get(data(1, piece))
    assert not reading.done()
    line.get(data(1, end=True))
    assert str(await reading) == "answered 404: no such target"
