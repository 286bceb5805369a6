"""Flow control both ways: what may be sent, what may come, and that every byte received is credited once."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shared.http2 import frames
from shared.http2.events import DataReceived, RequestReceived
from shared.http2.flood_guard import FloodLimits
from shared.http2.session import DATA_BYTES, Session, SessionLimits, SessionStream
from tests.shared.http2.dialogue import (
    INITIAL_WINDOW,
    OK,
    POST,
    PREFACE,
    SMALL,
    WINDOW,
    Dialogue,
    data,
    headers,
    read,
    reset,
    settings,
    window,
)

HALF = WINDOW // 2 + 1
"""Credit that a connection with the smallest window gives back at once: what is less is collected."""

QUARTER = WINDOW // 4 + 1
"""The same of a stream."""

FRAME = 16384
"""The largest frame."""

MAX = 2**31 - 1


def used_up(talk: Dialogue, stream: SessionStream) -> None:
    """Sends until the stream's first window and the connection's are closed."""
    assert talk.session.send_data(stream, bytes(WINDOW + 1)) == WINDOW
    assert talk.session.send_data(stream, b"x") == 0
    assert (stream.send_window, talk.session.send_window) == (0, 0)
    assert len(talk.sent()) == WINDOW // DATA_BYTES + 1


# What may be sent.


def test_both_windows_have_to_open() -> None:
    talk = Dialogue.client()
    stream = talk.opened()
    used_up(talk, stream)
    assert talk.received(window(1, 3)) == [("window", 1)]
    assert talk.session.send_data(stream, b"abcd") == 0
    assert talk.received(window(0, 2)) == [("window", 0)]
    assert talk.session.send_data(stream, b"abcd") == 2
    assert talk.received(window(0, 2)) == [("window", 0)]
    assert talk.session.send_data(stream, b"cd") == 1
    assert talk.sent() == ["DATA 1 b'ab'", "DATA 1 b'c'"]


def test_streams_share_the_connections_window() -> None:
    talk = Dialogue.client()
    first, second = talk.opened(), talk.opened()
    assert talk.session.send_data(first, bytes(WINDOW - 5)) == WINDOW - 5
    assert talk.session.send_data(second, b"abcdef") == 5
    talk.received(window(0, 1))
    assert talk.session.send_data(second, b"f") == 1
    assert (first.send_window, second.send_window) == (5, WINDOW - 6)


def test_the_reserved_bit_of_an_increment() -> None:
    talk = Dialogue.client()
    stream = talk.opened()
    used_up(talk, stream)
    talk.received(frames.header(4, frames.WINDOW_UPDATE, 0, 1) + b"\x80\0\0\5")
    assert stream.send_window == 5


def test_a_new_initial_window_counts_for_open_streams() -> None:
    talk = Dialogue.client()
    stream = talk.opened()
    assert talk.received(window(0, 1 << 20), settings({INITIAL_WINDOW: WINDOW + 10})) == [
        ("window", 0),
        ("window", 0),
        ("settings",),
    ]
    assert talk.session.send_data(stream, bytes(1 << 20)) == WINDOW + 10
    assert talk.session.send_data(talk.opened(), bytes(1 << 20)) == WINDOW + 10


def test_a_window_can_become_negative() -> None:
    talk = Dialogue.client()
    stream = talk.opened()
    talk.received(window(0, 1 << 20))
    assert talk.session.send_data(stream, bytes(1000)) == 1000
    assert talk.received(settings({INITIAL_WINDOW: 100})) == [("settings",)]
    assert stream.send_window == 100 - 1000
    assert talk.session.send_data(stream, b"x") == 0
    talk.received(window(1, 900))
    assert talk.session.send_data(stream, b"x") == 0, "opened, but only to nothing"
    talk.received(settings({INITIAL_WINDOW: 102}))
    assert talk.session.send_data(stream, b"abc") == 2


def test_an_empty_body_needs_no_window() -> None:
    talk = Dialogue.client()
    stream = talk.opened()
    used_up(talk, stream)
    talk.session.end_stream(stream)
    assert talk.sent() == ["DATA 1 b'' END"]


def test_a_streams_window_opened_too_far() -> None:
    talk = Dialogue.client()
    first, second = talk.opened(), talk.opened()
    assert talk.received(window(1, MAX - WINDOW)) == [("window", 1)]
    assert first.send_window == MAX
    assert talk.received(window(1, 1), window(3, 1)) == [
        ("reset", 1, "FLOW_CONTROL_ERROR", "by us"),
        ("window", 3),
    ]
    assert talk.sent() == ["RST_STREAM 1 FLOW_CONTROL_ERROR"]
    assert not second.over


def test_the_connections_window_opened_too_far() -> None:
    talk = Dialogue.client()
    assert talk.received(window(0, MAX - WINDOW)) == [("window", 0)]
    assert talk.broke(window(0, 1)) == "FLOW_CONTROL_ERROR: the peer opened the connection's window too far"


def test_a_window_opened_too_far_by_settings() -> None:
    talk = Dialogue.client()
    talk.opened()
    talk.received(window(1, 1))
    text = talk.broke(settings({INITIAL_WINDOW: MAX}))
    assert text == "FLOW_CONTROL_ERROR: SETTINGS opened a window too far"


def test_the_connection_s_window_opened_by_nothing() -> None:
    talk = Dialogue.client()
    talk.opened()
    assert talk.broke(frames.window_update(0, 0)).startswith("PROTOCOL_ERROR")


def test_a_stream_s_window_opened_by_nothing_costs_that_stream_only() -> None:
    talk = Dialogue.client()
    talk.opened()
    assert talk.received(frames.window_update(1, 0)) == [("reset", 1, "PROTOCOL_ERROR", "by us")]
    assert talk.sent() == ["RST_STREAM 1 PROTOCOL_ERROR"]
    talk.opened()


def test_windows_of_streams_that_are_over() -> None:
    talk = Dialogue.server()
    stream = talk.asked()
    talk.session.reset(stream, frames.CANCEL)
    assert talk.received(window(1, MAX), window(1, MAX)) == []
    talk.asked(3)
    assert talk.received(window(1, MAX)) == []


# What may come.


def test_credit_is_given_when_a_part_of_a_window_is_consumed() -> None:
    """A quarter of a stream's, half of the connection's."""
    talk = Dialogue.server(SMALL)
    stream = talk.asked()
    talk.received(data(1, bytes(FRAME)), data(1, bytes(FRAME)))
    assert talk.sent() == [], "nothing is consumed"
    talk.session.consumed(stream, QUARTER - 1)
    assert talk.sent() == []
    talk.session.consumed(stream, 1)
    assert talk.sent() == [f"WINDOW_UPDATE 1 +{QUARTER}"]
    talk.session.consumed(stream, HALF - QUARTER)
    assert talk.sent() == [f"WINDOW_UPDATE 1 +{HALF - QUARTER}", f"WINDOW_UPDATE 0 +{HALF}"]


def test_the_connections_credit_is_collected_over_streams() -> None:
    talk = Dialogue.server(SMALL)
    for number in (1, 3):
        stream = talk.asked(number)
        talk.received(data(number, bytes(FRAME)))
        talk.session.consumed(stream, FRAME)
    assert talk.sent() == [
        f"WINDOW_UPDATE 1 +{FRAME}",
        f"WINDOW_UPDATE 3 +{FRAME}",
        f"WINDOW_UPDATE 0 +{2 * FRAME}",
    ]


def test_an_ended_stream_needs_no_credit_but_its_connection_does() -> None:
    talk = Dialogue.server(SMALL)
    stream = talk.asked()
    talk.received(data(1, bytes(FRAME)), data(1, bytes(FRAME), end=True))
    talk.session.consumed(stream, 2 * FRAME)
    assert talk.sent() == [f"WINDOW_UPDATE 0 +{2 * FRAME}"]


def test_padding_is_credited_at_once() -> None:
    talk = Dialogue.server(replace(SMALL, floods=FloodLimits(empty_data=HALF)))
    stream = talk.asked()
    frame_count = HALF // 256
    talk.received(*[data(1, pad=255)] * frame_count)
    assert talk.sent() == [
        f"WINDOW_UPDATE 1 +{QUARTER}",
        f"WINDOW_UPDATE 1 +{QUARTER}",
        f"WINDOW_UPDATE 0 +{HALF}",
    ]
    assert stream.held == 0


def test_the_last_byte_of_the_windows() -> None:
    talk = Dialogue.server(SMALL)
    talk.asked()
    talk.received(*[data(1, bytes(FRAME))] * 3, data(1, bytes(FRAME - 1)), data(1))
    assert talk.sent() == []


def test_a_streams_window_overrun() -> None:
    talk = Dialogue.server(SessionLimits(stream_window_bytes=WINDOW))
    talk.asked(1)
    other = talk.asked(3)
    assert talk.received(*[data(1, bytes(FRAME))] * 4)[-1] == ("reset", 1, "FLOW_CONTROL_ERROR", "by us")
    assert talk.sent() == ["RST_STREAM 1 FLOW_CONTROL_ERROR"]
    assert talk.received(data(3, b"x")) == [("data", 3, b"x")]
    assert not other.over


def test_the_connections_window_overrun() -> None:
    talk = Dialogue.server(SMALL)
    talk.asked(1)
    talk.asked(3)
    talk.received(*[data(1, bytes(FRAME))] * 2, *[data(3, bytes(FRAME))] * 1)
    text = talk.broke(data(3, bytes(FRAME)))
    assert text == "FLOW_CONTROL_ERROR: the peer sent beyond the connection's window"


def test_padding_counts_against_the_windows() -> None:
    talk = Dialogue.server(SMALL)
    talk.asked()
    talk.received(*[data(1, bytes(FRAME))] * 3, data(1, bytes(FRAME - 100), pad=98))
    talk.received(data(1))
    assert talk.broke(data(1, b"x")).startswith("FLOW_CONTROL_ERROR")


def test_what_a_finished_stream_held_is_given_back() -> None:
    talk = Dialogue.server(SMALL)
    stream = talk.asked()
    talk.received(*[data(1, bytes(FRAME))] * 3)
    assert talk.received(reset(1, frames.CANCEL)) == [("reset", 1, "CANCEL", "by the peer")]
    assert talk.sent() == [f"WINDOW_UPDATE 0 +{3 * FRAME}"]
    talk.session.consumed(stream, 3 * FRAME)
    assert talk.sent() == [], "the owner passes it on after all: it was given back already"


def test_a_reset_in_the_middle_of_a_frame() -> None:
    talk = Dialogue.server(SMALL)
    stream = talk.asked()
    talk.received(*[data(1, bytes(FRAME))] * 2)
    wire = data(1, bytes(FRAME - 101), pad=100)
    talk.received(wire[: frames.HEADER_BYTES + 1000])
    talk.session.reset(stream, frames.CANCEL)
    # Two frames, the padding and 999 of the third frame's bytes have come; the rest is yet to.
    assert talk.sent() == ["RST_STREAM 1 CANCEL", f"WINDOW_UPDATE 0 +{2 * FRAME + 101 + 999}"]
    assert talk.received(wire[frames.HEADER_BYTES + 1000 :]) == []
    talk.received(headers(3, POST), data(3, bytes(FRAME)), reset(3, frames.CANCEL))
    rest = FRAME - 101 - 999
    assert talk.sent() == []
    talk.asked(5)
    talk.received(data(5, bytes(HALF - FRAME - rest)), reset(5, frames.CANCEL))
    assert talk.sent() == [f"WINDOW_UPDATE 0 +{HALF}"], "to the byte"


# Any order of events: what the peer sent is what it is credited.


class Peer:
    """The client of a session with the smallest windows. It sends no more than it may, and counts."""

    def __init__(self) -> None:
        self.session = Session(client=False, limits=SMALL)
        self.open: list[int] = []
        """Numbers of the streams on which it may still send."""
        self.known: list[SessionStream] = []
        """The session's records of all streams that ever were."""
        self.unread: dict[SessionStream, int] = {}
        self.sent_bytes = 0
        self.credited_bytes = 0
        self._windows: dict[int, int] = {}
        self._wire = bytearray(PREFACE + settings())
        self._next = 1
        self.deliver(1000)
        self.credited_bytes = 0

    def deliver(self, count: int) -> None:
        """`count` bytes of what has been sent arrive; the session's answer is read."""
        piece, self._wire = bytes(self._wire[:count]), self._wire[count:]
        self.session.receive_data(piece)
        for event in self.session.events():
            if isinstance(event, RequestReceived):
                self.known.append(event.stream)
            elif isinstance(event, DataReceived):
                self.unread[event.stream] = self.unread.get(event.stream, 0) + len(event.data)
        self.listen()

    def listen(self) -> None:
        for line in read(bytes(self.session.data_to_send())):
            kind, *rest = line.split()
            if kind == "WINDOW_UPDATE":
                number, increment = int(rest[0]), int(rest[1])
                if number:
                    self._windows[number] += increment
                else:
                    self.credited_bytes += increment

    def request(self) -> None:
        self._wire += headers(self._next, POST)
        self.open.append(self._next)
        self._windows[self._next] = WINDOW
        self._next += 2

    def send(self, pick: int, size: int, pad: int | None, end: bool) -> None:
        number = self.open[pick % len(self.open)]
        overhead = 0 if pad is None else pad + 1
        size = min(
            size, self._windows[number] - overhead, WINDOW - self.outstanding - overhead, FRAME - overhead
        )
        if size < 0:
            return
        self._windows[number] -= size + overhead
        self.sent_bytes += size + overhead
        self._wire += data(number, bytes(size), pad=pad, end=end)
        if end:
            self.open.remove(number)

    def reset(self, pick: int) -> None:
        number = self.open.pop(pick % len(self.open))
        self._wire += reset(number, frames.CANCEL)

    @property
    def outstanding(self) -> int:
        """Sent and not credited."""
        return self.sent_bytes - self.credited_bytes

    @property
    def on_its_way(self) -> int:
        """Bytes that have been sent and have not arrived."""
        return len(self._wire)


picks = st.integers(0, 100)
counts = st.integers(0, 40000)
steps = st.one_of(
    st.tuples(st.just("request")),
    st.tuples(st.just("send"), picks, counts, st.none() | st.integers(0, 255), st.booleans()),
    st.tuples(st.just("send"), picks, counts, st.none(), st.just(False)),
    st.tuples(st.just("deliver"), counts),
    st.tuples(st.just("they reset"), picks),
    st.tuples(st.just("we reset"), picks),
    st.tuples(st.just("we end"), picks),
    st.tuples(st.just("consume"), picks, counts),
    st.tuples(st.just("consume all")),
)


@given(st.lists(steps, max_size=60))
def test_every_byte_is_credited_once(script: list[tuple[object, ...]]) -> None:
    peer = Peer()
    for step in script:
        play(peer, step)
        assert 0 <= peer.outstanding <= WINDOW
    while peer.on_its_way:
        peer.deliver(FRAME)
    for number in list(peer.session.streams):
        peer.session.receive_data(reset(number, frames.CANCEL))
    peer.listen()
    assert 0 <= peer.outstanding < HALF
    # What is left shows itself to the byte: credit is given as soon as it makes up half a window.
    peer.request()
    number = peer.open[-1]
    missing = HALF - peer.outstanding
    if missing > 1:
        peer.session.receive_data(headers(number, POST) + b"".join(pieces(number, missing - 1)))
        peer.listen()
        assert peer.session.streams[number].held == missing - 1
    else:
        peer.session.receive_data(headers(number, POST))
    peer.session.receive_data(data(number, b"x"))
    before = peer.credited_bytes
    peer.session.receive_data(reset(number, frames.CANCEL))
    peer.listen()
    assert peer.credited_bytes - before == HALF
    assert peer.credited_bytes == peer.sent_bytes + missing


def play(peer: Peer, step: tuple[object, ...]) -> None:
    match step:
        case ("request",):
            peer.request()
        case ("send", int(pick), int(size), pad, bool(end)) if peer.open:
            peer.send(pick, size, pad if isinstance(pad, int) else None, end)
        case ("deliver", int(count)):
            peer.deliver(count)
        case ("they reset", int(pick)) if peer.open:
            peer.reset(pick)
        case ("we reset", int(pick)) if peer.known:
            peer.session.reset(peer.known[pick % len(peer.known)], frames.CANCEL)
        case ("we end", int(pick)) if peer.known:
            stream = peer.known[pick % len(peer.known)]
            peer.session.send_headers(stream, OK)
            peer.session.end_stream(stream)
        case ("consume", int(pick), int(count)) if peer.unread:
            stream = list(peer.unread)[pick % len(peer.unread)]
            count = min(count, peer.unread[stream])
            peer.unread[stream] -= count
            peer.session.consumed(stream, count)
        case ("consume all",):
            for stream, count in peer.unread.items():
                peer.session.consumed(stream, count)
            peer.unread.clear()
    peer.listen()


def pieces(number: int, count: int) -> list[bytes]:
    return [data(number, bytes(min(FRAME, count - at))) for at in range(0, count, FRAME)]
