"""The relay's rules, with legs in memory. Real legs and real sockets have `test_close_orders.py`."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import HalfClosedError, StreamDoneError, StreamLeftError, StreamResetError
from shared.net.legs.contract import Buffer, RelayEnd
from shared.net.relay.relay import HALF_CLOSED_TIMEOUT_S, LINGER_S, Relay
from tests.shared.net.hasty_loop import hasty

BROKE = StreamResetError("stream reset by the peer: CANCEL", 8)
DONE = StreamDoneError("stream reset by the peer: NO_ERROR", 0)
LEFT = StreamLeftError("stream reset by the peer: CANCEL", 8)
STOP = StreamResetError("we are stopping", 8)


class Ends:
    """Two legs whose calls are written down in one list, and the relay between them."""

    def __init__(
        self, *, half_closed_timeout_s: float = HALF_CLOSED_TIMEOUT_S, tls_inside: bool = False
    ) -> None:
        self.story: list[str] = []
        self.down = MemoryLeg("down", self.story)
        self.up = MemoryLeg("up", self.story)
        self.relay = Relay(
            self.down,
            self.up,
            self._finished,
            half_closed_timeout_s=half_closed_timeout_s,
            tls_inside=tls_inside,
        )
        self.finished = 0

    def start(self) -> Ends:
        self.relay.start()
        assert self.told() == ["down joined", "up joined"]
        return self

    def told(self) -> list[str]:
        """What the legs were told since the last call."""
        story = self.story[:]
        self.story.clear()
        return story

    def _finished(self, relay: Relay) -> None:
        assert relay is self.relay
        assert relay.over
        self.finished += 1


class MemoryLeg:
    def __init__(self, name: str, story: list[str]) -> None:
        self.name = name
        self.buffered = 0
        self.early = b""
        self.early_end = False
        self.early_error: StreamResetError | None = None
        self._story = story

    @property
    def buffered_bytes(self) -> int:
        return self.buffered

    def join(self, relay: RelayEnd) -> None:
        self._tell("joined")
        if self.early:
            relay.received(self, self.early)
        if self.early_end:
            relay.ended(self)
        if self.early_error is not None:
            relay.failed(self, self.early_error)

    def write(self, data: Buffer) -> None:
        self._tell(f"<- {bytes(data).decode()}")

    def write_eof(self) -> None:
        self._tell("eof")

    def pause_reading(self) -> None:
        self._tell("paused")

    def resume_reading(self) -> None:
        self._tell("resumed")

    def close(self) -> None:
        self._tell("closed")

    def abort(self) -> None:
        self._tell("aborted")

    def _tell(self, what: str) -> None:
        self._story.append(f"{self.name} {what}")


@pytest.fixture
async def ends() -> Ends:
    return Ends().start()


async def test_bytes_go_on_in_order_and_are_counted(ends: Ends) -> None:
    ends.relay.received(ends.down, b"ab")
    ends.relay.received(ends.up, memoryview(b"cde"))
    ends.relay.received(ends.down, bytearray(b"f"))
    assert ends.told() == ["up <- ab", "down <- cde", "up <- f"]
    assert (ends.relay.sent_bytes, ends.relay.received_bytes) == (3, 3)


async def test_back_pressure(ends: Ends) -> None:
    ends.relay.full(ends.down)
    ends.relay.drained(ends.down)
    ends.relay.full(ends.up)
    ends.relay.drained(ends.up)
    assert ends.told() == ["up paused", "up resumed", "down paused", "down resumed"]


@pytest.mark.parametrize("first", ["down", "up"])
async def test_each_direction_ends_by_itself(ends: Ends, first: str) -> None:
    one, other = (ends.down, ends.up) if first == "down" else (ends.up, ends.down)
    ends.relay.ended(one)
    assert ends.told() == [f"{other.name} eof"]
    ends.relay.received(other, b"still here")
    assert ends.told() == [f"{one.name} <- still here"]
    assert not ends.relay.over
    ends.relay.ended(other)
    assert ends.told() == ["down closed", "up closed"], "which is an end, too"
    assert (ends.finished, ends.relay.error, ends.relay.broken) == (1, None, None)


async def test_an_end_said_twice(ends: Ends) -> None:
    ends.relay.ended(ends.down)
    ends.relay.ended(ends.down)
    assert ends.told() == ["up eof"]
    assert not ends.relay.over


@pytest.mark.parametrize("broken", ["down", "up"])
@pytest.mark.parametrize("other_ended", [True, False])
async def test_a_leg_that_breaks_before_its_end(ends: Ends, broken: str, other_ended: bool) -> None:
    one, other = (ends.down, ends.up) if broken == "down" else (ends.up, ends.down)
    if other_ended:
        ends.relay.ended(other)
    ends.told()
    ends.relay.failed(one, BROKE)
    assert ends.told() == [f"{other.name} aborted"]
    assert (ends.finished, ends.relay.error, ends.relay.broken) == (1, BROKE, one)


async def test_a_downstream_that_breaks_after_its_end(ends: Ends) -> None:
    ends.relay.received(ends.down, b"last words")
    ends.relay.ended(ends.down)
    ends.relay.failed(ends.down, BROKE)
    assert ends.told() == ["up <- last words", "up eof", "down closed", "up closed"]
    assert (ends.finished, ends.relay.error, ends.relay.broken) == (1, None, None)


async def test_an_upstream_that_breaks_after_its_end(ends: Ends) -> None:
    ends.relay.full(ends.up)
    ends.relay.received(ends.up, b"answer")
    ends.relay.ended(ends.up)
    assert ends.told() == ["down paused", "down <- answer", "down eof"]
    ends.relay.failed(ends.up, BROKE)
    assert ends.told() == ["down closed", "up closed"]
    assert (ends.finished, ends.relay.error, ends.relay.broken) == (1, None, None)


async def test_a_downstream_that_is_done_with_what_it_got(ends: Ends) -> None:
    """No error, but no end either for what it was sending."""
    ends.relay.received(ends.up, b"answer")
    ends.relay.ended(ends.up)
    ends.told()
    ends.relay.failed(ends.down, DONE)
    assert ends.told() == ["up aborted"]
    assert (ends.finished, ends.relay.error, ends.relay.broken) == (1, None, None)


async def test_a_downstream_that_lets_go_before_the_upstream_has_ended(ends: Ends) -> None:
    ends.relay.failed(ends.down, DONE)
    assert ends.told() == ["up aborted"]
    assert (ends.finished, ends.relay.error, ends.relay.broken) == (1, DONE, ends.down)


async def test_an_upstream_that_lets_go_before_its_end(ends: Ends) -> None:
    """Even NO_ERROR says that there would have been more."""
    ends.relay.ended(ends.down)
    ends.told()
    ends.relay.failed(ends.up, DONE)
    assert ends.told() == ["down aborted"]
    assert (ends.finished, ends.relay.error, ends.relay.broken) == (1, DONE, ends.up)


async def test_a_downstream_that_lets_go_of_what_is_no_tls(ends: Ends) -> None:
    ends.relay.received(ends.down, b"half a")
    ends.relay.failed(ends.down, LEFT)
    assert ends.told() == ["up <- half a", "up aborted"]
    assert (ends.finished, ends.relay.error, ends.relay.broken) == (1, LEFT, ends.down)


# TLS inside: it has an end of its own, so a downstream that lets go has ended.


@pytest.fixture
async def tls() -> Ends:
    return Ends(tls_inside=True).start()


@pytest.mark.parametrize("error", [LEFT, DONE])
async def test_a_downstream_that_lets_go_of_tls_is_one_that_has_ended(
    tls: Ends, error: StreamLeftError
) -> None:
    tls.relay.received(tls.down, b"close_notify")
    tls.relay.failed(tls.down, error)
    assert tls.told() == ["up <- close_notify", "up eof", "up resumed"]
    assert not tls.relay.over, "the upstream may say its own end"
    tls.relay.received(tls.up, b"for nobody")
    tls.relay.ended(tls.up)
    assert tls.told() == ["down closed", "up closed"]
    assert (tls.finished, tls.relay.error, tls.relay.received_bytes) == (1, None, 0)


async def test_a_downstream_that_lets_go_of_tls_after_the_upstreams_end(tls: Ends) -> None:
    """A leg that is closed still sends what waits, and the end."""
    tls.relay.received(tls.down, b"last bytes")
    tls.relay.ended(tls.up)
    tls.relay.failed(tls.down, DONE)
    assert tls.told() == ["up <- last bytes", "down eof", "down closed", "up closed"]
    assert (tls.finished, tls.relay.error, tls.relay.broken) == (1, None, None)


async def test_a_downstream_with_tls_that_is_lost(tls: Ends) -> None:
    tls.relay.failed(tls.down, BROKE)
    assert tls.told() == ["up aborted"]
    assert (tls.finished, tls.relay.error, tls.relay.broken) == (1, BROKE, tls.down)


@pytest.mark.parametrize("is_whole", [True, False])
async def test_an_upstream_that_breaks_when_the_downstream_has_left(tls: Ends, is_whole: bool) -> None:
    """What has our end has had everything, and may miss a close_notify."""
    tls.relay.failed(tls.down, LEFT)
    tls.told()
    error = StreamResetError("stream reset by the peer: CONNECT_ERROR", 10)
    error.sent_all = is_whole
    tls.relay.failed(tls.up, error)
    assert tls.told() == (["down closed", "up closed"] if is_whole else ["down aborted"])
    assert (tls.finished, tls.relay.error is None) == (1, is_whole)


@hasty
async def test_an_upstream_that_never_ends_when_the_downstream_has_left() -> None:
    """It is closed once everything has been sent to it for a while."""
    tls = Ends(tls_inside=True).start()
    tls.up.buffered = 100
    tls.relay.failed(tls.down, LEFT)
    for left in (90, 80, 0):
        tls.up.buffered = left
        await asyncio.sleep(LINGER_S + 1)
        assert not tls.relay.over
    await asyncio.sleep(LINGER_S + 1)
    assert tls.told() == ["up eof", "up resumed", "down closed", "up closed"]
    assert (tls.finished, tls.relay.error) == (1, None)


@hasty
async def test_an_upstream_that_takes_nothing_when_the_downstream_has_left() -> None:
    tls = Ends(half_closed_timeout_s=60, tls_inside=True).start()
    tls.up.buffered = 100
    tls.relay.failed(tls.down, LEFT)
    await asyncio.sleep(50)
    assert not tls.relay.over
    await asyncio.sleep(20)
    assert tls.told() == ["up eof", "up resumed", "down closed", "up closed"]


# Half-closed for too long.


@hasty
@pytest.mark.parametrize(
    ("first", "text"),
    [
        ("down", "half-closed: the client has ended, and for 60 s nothing came back"),
        ("up", "half-closed: the far side has ended, and for 60 s nothing came back"),
    ],
)
async def test_a_direction_that_is_silent_after_the_other_has_ended(first: str, text: str) -> None:
    ends = Ends(half_closed_timeout_s=60).start()
    one, other = (ends.down, ends.up) if first == "down" else (ends.up, ends.down)
    ends.relay.ended(one)
    for _ in range(4):
        await asyncio.sleep(50)
        ends.relay.received(other, b"x")
    ends.told()
    await asyncio.sleep(50)
    assert ends.told() == []
    await asyncio.sleep(70)
    assert ends.told() == ["down aborted", "up aborted"]
    assert (ends.finished, str(ends.relay.error), ends.relay.broken) == (1, text, None)
    assert isinstance(ends.relay.error, HalfClosedError)
    assert ends.relay.error.flag == "HALF_CLOSED"


@hasty
async def test_a_tunnel_that_is_open_both_ways_may_be_silent() -> None:
    ends = Ends(half_closed_timeout_s=60).start()
    await asyncio.sleep(1000)
    assert (ends.told(), ends.relay.over, ends.relay._timer) == ([], False, None)


@hasty
@pytest.mark.parametrize("how", ["ended", "failed", "aborted"])
async def test_a_relay_that_is_over_forgets_its_deadline(how: str) -> None:
    ends = Ends(half_closed_timeout_s=60).start()
    ends.relay.ended(ends.up)
    if how == "ended":
        ends.relay.ended(ends.down)
    elif how == "failed":
        ends.relay.failed(ends.down, BROKE)
    else:
        ends.relay.abort(STOP)
    ends.told()
    await asyncio.sleep(200)
    assert (ends.told(), ends.finished) == ([], 1)


async def test_both_had_ended_and_one_had_broken_before() -> None:
    """What came before goes first, and the downstream is the first to be joined: a TLS leg takes nothing
    before."""
    ends = Ends()
    ends.down.early, ends.down.early_end = b"question", True
    ends.up.early, ends.up.early_end, ends.up.early_error = b"answer", True, BROKE
    ends.relay.start()
    assert ends.told() == [
        "down joined",
        "up <- question",
        "up eof",
        "up joined",
        "down <- answer",
        "down closed",
        "up closed",
    ]
    assert (ends.finished, ends.relay.error) == (1, None)


async def test_a_downstream_that_broke_before() -> None:
    ends = Ends()
    ends.down.early, ends.down.early_error = b"half a", BROKE
    ends.relay.start()
    assert ends.told() == ["down joined", "up <- half a", "up aborted"]
    assert (ends.finished, ends.relay.broken) == (1, ends.down)


async def test_an_upstream_that_broke_before() -> None:
    ends = Ends()
    ends.up.early, ends.up.early_error = b"half an", BROKE
    ends.relay.start()
    assert ends.told() == ["down joined", "up joined", "down <- half an", "down aborted"]
    assert (ends.finished, ends.relay.broken) == (1, ends.up)


async def test_abort(ends: Ends) -> None:
    ends.relay.abort(STOP)
    ends.relay.abort(BROKE)
    assert ends.told() == ["down aborted", "up aborted"]
    assert (ends.finished, ends.relay.error, ends.relay.broken) == (1, STOP, None)


# A tunnel that is ended at rest.


async def test_an_expired_tunnel_ends_as_though_the_upstream_had_ended(ends: Ends) -> None:
    assert ends.relay.expire(STOP)
    assert ends.told() == ["down eof"]
    ends.relay.received(ends.down, b"close_notify")
    ends.relay.ended(ends.down)
    assert ends.told() == ["up <- close_notify", "up eof"]
    assert not ends.relay.over, "the upstream may say its own end"
    ends.relay.ended(ends.up)
    assert ends.told() == ["down closed", "up closed"]
    assert (ends.finished, ends.relay.error, ends.relay.broken) == (1, STOP, None)
    assert ends.relay.sent_bytes == len(b"close_notify")


async def test_an_upstream_that_ends_at_that_very_moment(ends: Ends) -> None:
    assert ends.relay.expire(STOP)
    ends.relay.ended(ends.up)
    assert ends.told() == ["down eof"], "once"
    ends.relay.ended(ends.down)
    assert ends.told() == ["down closed", "up closed"]


@hasty
async def test_a_client_that_does_not_react_is_closed_all_the_same(ends: Ends) -> None:
    assert ends.relay.expire(STOP)
    await asyncio.sleep(LINGER_S - 1)
    assert ends.told() == ["down eof"]
    await asyncio.sleep(2)
    assert ends.told() == ["down closed", "up closed"]
    assert ends.finished == 1


@pytest.mark.parametrize("name", ["down", "up"])
async def test_a_leg_that_breaks_after_that(ends: Ends, name: str) -> None:
    assert ends.relay.expire(STOP)
    ends.relay.failed(ends.down if name == "down" else ends.up, BROKE)
    assert ends.told() == ["down eof", "down closed", "up closed"]
    assert (ends.finished, ends.relay.error) == (1, STOP)


async def test_an_upstream_that_has_something_to_say_after_all(ends: Ends) -> None:
    assert ends.relay.expire(STOP)
    ends.relay.received(ends.up, b"too late")
    assert ends.told() == ["down eof", "down aborted", "up aborted"]
    assert (ends.finished, ends.relay.error, ends.relay.received_bytes) == (1, STOP, 0)
    ends.relay.received(ends.up, b"and more")
    assert ends.told() == []


@pytest.mark.parametrize("why", ["down ended", "up ended", "down holds", "up holds", "over", "expired"])
async def test_what_is_not_at_rest_does_not_expire(ends: Ends, why: str) -> None:
    leg = ends.down if why.startswith("down") else ends.up
    if why.endswith("ended"):
        ends.relay.ended(leg)
    elif why.endswith("holds"):
        leg.buffered = 1
    elif why == "over":
        ends.relay.abort(BROKE)
    else:
        assert ends.relay.expire(STOP)
    ends.told()
    assert not ends.relay.expire(STOP)
    assert ends.told() == []
    ends.relay.abort(BROKE)


async def test_what_both_legs_hold(ends: Ends) -> None:
    ends.down.buffered, ends.up.buffered = 3, 4
    assert ends.relay.buffered_bytes == 7


async def test_nothing_happens_after_the_end(ends: Ends) -> None:
    ends.relay.failed(ends.up, BROKE)
    ends.told()
    for leg in (ends.down, ends.up):
        ends.relay.received(leg, b"late")
        ends.relay.ended(leg)
        ends.relay.failed(leg, STOP)
    ends.relay.abort(STOP)
    assert ends.told() == []
    assert (ends.finished, ends.relay.error, ends.relay.sent_bytes) == (1, BROKE, 0)
