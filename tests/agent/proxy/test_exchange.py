"""One exchange's ends: each once, and what they leave to the client; its stream and carrier are doubles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest

from agent.proxy.exchange import REPEATED_BYTES, Exchange
from agent.proxy.fields import RequestHead
from shared.errors import HboneError, OverloadError
from shared.http2 import frames
from shared.http2.events import Headers
from shared.net.legs.stream import Stream


@dataclass
class FakeStream:
    """Notes what is done to it."""

    done: list[object] = field(default_factory=list)
    on_gone: object = None
    buffered_bytes: int = 0
    held_bytes: int = 0
    headers: Headers = ((b":method", b"GET"),)

    def respond(self, headers: Headers, *, end_stream: bool = False) -> None:
        self.done.append(("respond", dict(headers)[b":status"], end_stream))

    def inform(self, headers: Headers) -> None:
        self.done.append(("inform", dict(headers)[b":status"]))

    def write(self, data: bytes) -> None:
        self.done.append(("write", bytes(data)))

    def close(self) -> None:
        self.done.append("close")

    def reset(self, code: int) -> None:
        self.done.append(("reset", code))

    def leave(self) -> None:
        self.done.append("leave")

    def resume_reading(self) -> None:
        pass


class FakeCarrier:
    buffered_bytes = 7

    def __init__(self) -> None:
        self.dropped = 0

    def drop(self) -> None:
        self.dropped += 1


class Story:
    """An exchange, and what became of it."""

    def __init__(self, method: bytes = b"GET") -> None:
        self.stream = FakeStream()
        self.over: list[Exchange] = []
        self.repeated: list[Exchange] = []
        self.exchange = Exchange(
            cast("Stream", self.stream), RequestHead(method=method), self.over.append, self.repeated.append
        )
        self.exchange.carrier = self.carrier = FakeCarrier()


@pytest.fixture
def story() -> Story:
    return Story()


def test_it_ends_once(story: Story) -> None:
    story.exchange.finish()
    story.exchange.finish()
    story.exchange.fail(502, "why")
    story.exchange.end(HboneError("gone"))
    assert (story.stream.done, len(story.over)) == (["close"], 1)


def test_nothing_interim_after_the_answer(story: Story) -> None:
    story.exchange.respond(200, [])
    story.exchange.inform(103, [])
    assert story.stream.done == [("respond", b"200", False)]


@pytest.mark.parametrize(
    ("method", "dealt_with", "may"),
    [(b"GET", True, True), (b"GET", False, True), (b"POST", False, True), (b"POST", True, False)],
)
def test_what_is_repeated(method: bytes, dealt_with: bool, may: bool) -> None:
    story = Story(method)
    story.exchange.sent(b"body", keep=True)
    assert story.exchange.repeat(dealt_with=dealt_with) is may
    assert story.repeated == [story.exchange] * may
    assert (story.exchange.carrier is None) is may
    if may:
        assert story.exchange.sent_before == b"body"
        assert not story.exchange.repeat(dealt_with=False), "once"


def test_a_long_body_cannot_be_repeated(story: Story) -> None:
    story.exchange.sent(bytes(REPEATED_BYTES), keep=True)
    assert story.exchange.buffered_bytes == REPEATED_BYTES + FakeCarrier.buffered_bytes
    story.exchange.sent(b"x", keep=True)
    assert story.exchange.buffered_bytes == FakeCarrier.buffered_bytes, "and is not kept"
    assert not story.exchange.repeat(dealt_with=False)


def test_nor_can_one_whose_answer_has_begun(story: Story) -> None:
    story.exchange.inform(100, [])
    assert not story.exchange.repeat(dealt_with=False)
    other = Story()
    other.exchange.respond(200, [])
    assert not other.exchange.repeat(dealt_with=False)


def test_one_that_holds_too_much(story: Story) -> None:
    story.exchange.abort(OverloadError("too much"))
    assert ("respond", b"503", False) in story.stream.done
    story.exchange.abort(OverloadError("too much"))
    assert story.stream.done[-1] == ("reset", frames.ENHANCE_YOUR_CALM), "what is left of its answer"
    assert len(story.over) == 1
