"""The stream to a target: its token, its request, and whatever else than 200 comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.address import Address
from shared.errors import LimitError
from shared.net.names import resolver
from shared.net.names.endpoint import OURS, Endpoint
from tests.support.gateway_world import GLOB, World, tunnel
from tests.support.hellos import ACCESS_DENIED, INTERNAL_ERROR, NAME, UNRECOGNIZED_NAME
from tests.support.metadata_server import Answer, unsigned_token
from tests.support.retried_tunnels import end

CANCEL = 8


# Refusals.

HTML = (b"content-type", b"text/html; charset=UTF-8")
PAGE = b"<html><title>403 Forbidden</title>secret page</html>" * 20


@pytest.mark.parametrize(
    ("status", "answer", "hint"),
    [
        (204, INTERNAL_ERROR, "answered 204"),
        (301, INTERNAL_ERROR, "answered 301 to https://accounts.example/login"),
        (401, ACCESS_DENIED, "answered 401: no token was sent: the peer's own policy asks for one"),
        (403, ACCESS_DENIED, "answered 403: no token was sent: the peer's own policy asks for one"),
        (404, UNRECOGNIZED_NAME, "answered 404: no such service"),
        (405, INTERNAL_ERROR, "answered 405"),
        (429, INTERNAL_ERROR, "answered 429: no instance of the service is free"),
        (500, INTERNAL_ERROR, "answered 500"),
        (502, INTERNAL_ERROR, "answered 502: the container does not answer as HTTP/2"),
        (503, INTERNAL_ERROR, "answered 503: the container crashed"),
        (504, INTERNAL_ERROR, "answered 504: no answer within"),
    ],
)
async def test_any_other_status_refuses(world: World, status: int, answer: bytes, hint: str) -> None:
    """The original copied the page of a 403 into the client's TLS connection."""
    gateway = await world.start(max_retries=0)
    client = await world.client()
    stream = await world.service.request()
    location = [(b"location", b"https://accounts.example/login")] if status == 301 else []
    if status == 204:
        stream.respond(status, end=True)
    else:
        stream.respond(status, [HTML, *location])
        await stream.send(PAGE)
        stream.end()
    assert await client.rest() == answer
    line = await gateway.line()
    assert (line["severity"], line["message"]) == ("WARNING", "connection refused")
    assert (line["status"], line["flags"]) == (status, "STATUS")
    assert line["error"].startswith(hint)
    assert "html" not in str(line)
    assert (line["src.addr"], line["sni"], line["route"]) == (client.address, NAME, GLOB)
    assert await gateway.refused() == {"STATUS": 1}
    assert await gateway.metric("hbone_tunnels_opened_total", route=GLOB) == 0
    await world.nothing_is_left()


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        (401, "answered 401: the token is invalid, expired or for another audience"),
        (403, "answered 403: the caller lacks roles/run.invoker"),
    ],
)
async def test_a_token_that_is_refused(world: World, status: int, hint: str) -> None:
    gateway = await world.start(tunnel(world.service.port, token={"audience": "x"}), max_retries=0)
    client = await world.client()
    (await world.service.request()).respond(status, [HTML], end=True)
    assert await client.rest() == ACCESS_DENIED
    assert (await gateway.line())["error"] == hint


async def test_a_refusals_reason_is_logged(world: World) -> None:
    gateway = await world.start(max_retries=0)
    client = await world.client()
    stream = await world.service.request()
    stream.respond(503, [(b"content-type", b"text/plain")])
    await stream.send(b"connect to 127.0.0.1:15003: connection refused\n")
    stream.end()
    assert await client.rest() == INTERNAL_ERROR
    assert (await gateway.line())["error"] == "answered 503: connect to 127.0.0.1:15003: connection refused"


async def test_a_page_without_an_end_is_not_waited_for(world: World) -> None:
    gateway = await world.start()
    client = await world.client()
    stream = await world.service.request()
    stream.respond(403, [HTML])
    await stream.send(PAGE)
    assert await client.rest() == ACCESS_DENIED
    assert await stream.broken() == CANCEL
    assert (await gateway.line())["status"] == 403


@pytest.mark.parametrize("reached", [False, True], ids=["with a task", "without"])
async def test_no_answer_in_time(world: World, reached: bool) -> None:
    gateway = await world.start(response_timeout="100ms")
    if reached:
        await end(*await world.open())
        await gateway.line()
    client = await world.client()
    stream = await world.service.request()
    assert await client.rest() == INTERNAL_ERROR
    assert await stream.broken() == CANCEL
    line = await gateway.line()
    assert (line["flags"], line["error"]) == ("UPSTREAM", "no response headers within 0.1 s")
    await world.nothing_is_left()


async def test_a_reset_instead_of_an_answer(world: World) -> None:
    gateway = await world.start()
    client = await world.client()
    (await world.service.request()).reset(CANCEL)
    assert await client.rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert (line["flags"], line["error"]) == ("UPSTREAM_RESET", "stream reset by the peer: CANCEL")
    await world.nothing_is_left()


async def test_a_lost_connection_instead_of_an_answer(world: World) -> None:
    gateway = await world.start()
    client = await world.client()
    (await world.service.request()).peer.drop()
    assert await client.rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert line["flags"] == "UPSTREAM_RESET"
    assert line["error"].startswith(f"connection to 127.0.0.1:{world.service.port} lost: ")
    await world.nothing_is_left()


# Tokens.


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(b"", 404), "it answered 404; has this machine or pod a service account?"),
        (Answer(b"oops", 500), "it answered 500"),
        (Answer(b"no token"), "its answer is no JWT"),
        (Answer(raw=b""), "no token from the metadata server"),
        (Answer(unsigned_token(exp=1).encode()), "expired"),
    ],
)
async def test_without_a_token_nothing_is_sent(world: World, answer: Answer, reason: str) -> None:
    """The original then tried without one."""
    gateway = await world.start(tunnel(world.service.port, token={"audience": "x"}))
    world.metadata.answer = lambda _: answer
    client = await world.client()
    assert await client.rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert line["flags"] == "IDENTITY_ERROR"
    assert reason in line["error"]
    assert not world.service.asked
    await world.nothing_is_left()


async def test_a_403_keeps_the_token(world: World) -> None:
    await world.start(tunnel(world.service.port, token={"audience": "x"}))
    client = await world.client()
    (await world.service.request()).respond(403, end=True)
    assert await client.rest() == ACCESS_DENIED
    await world.client()
    await world.service.request()
    assert len(world.metadata.requests) == 1


async def test_a_token_from_a_file(world: World, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("opaque-token\n")
    await world.start(tunnel(world.service.port, token={"file": "token"}))
    await world.client()
    assert (await world.service.request())[b"authorization"] == b"Bearer opaque-token"


# Names that clients choose.


def by_name(end: str) -> dict[str, object]:
    """A route whose origin's name has the client's in it."""
    return {"host": GLOB, "tunnel": f"http://{{service}}.{end}:8080/_hbone/15003", "token": "none"}


async def test_a_name_that_is_not_there_is_no_origin_s_failure(world: World) -> None:
    gateway = await world.start(by_name("invalid"))
    for _ in range(2):
        client = await world.client()
        assert await client.rest() == INTERNAL_ERROR
        line = await gateway.line()
        assert (line["flags"], line["error"]) == (
            "CONNECT",
            "connect to http://hello.invalid at hello.invalid:8080: "
            "no such name: none that ends in .invalid exists",
        )
    assert await gateway.dump("/connections") == []
    assert await gateway.metric("hbone_upstream_dials_failed_total", origin="http://hello.invalid") == 0


async def test_a_name_is_looked_up_at_the_expense_of_who_asks_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    found = resolver.Resolver.resolve

    async def resolve(self: resolver.Resolver, address: Address, party: str = "") -> list[Endpoint]:
        asked.append((address.host, party))
        return await found(self, address, party)

    monkeypatch.setattr(resolver.Resolver, "resolve", resolve)
    route = by_name("localhost")
    route["tunnel"] = f"http://{{service}}.localhost:{world.service.port}/_hbone/15003"
    await world.start(route)
    await world.echoes(*await world.open())
    # First for the client, then for the pool, which finds the answer.
    assert asked == [("hello.localhost.", "127.0.0.1"), ("hello.localhost.", OURS)]
    await world.open()
    assert len(asked) == 2  # there is a connection


async def test_too_many_names_of_one_client(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolver.Resolver.resolve

    async def resolve(self: resolver.Resolver, address: Address, party: str = "") -> list[Endpoint]:
        if party:
            raise LimitError(f"32 names are being looked up for {party}", resolver.LIMIT_PER_CLIENT)
        return await found(self, address, party)

    monkeypatch.setattr(resolver.Resolver, "resolve", resolve)
    gateway = await world.start(by_name("example"))
    client = await world.client()
    assert await client.rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert (line["flags"], line["error"]) == ("LIMIT", "32 names are being looked up for 127.0.0.1")
    assert await gateway.metric("hbone_limit_refusals_total", limit="max_lookups_per_client") == 1
    assert await gateway.dump("/connections") == []
