"""h2 as the judge: what any frame does in any state of its stream, to the stream or to the connection.

The same frames, and the same deeds of the owner, go to a session and to h2. Where the two disagree the case
stands in KNOWN with the section that we follow; a case that does not is a fault of ours, or belongs there.
"""

from __future__ import annotations

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import pytest
from hyperframe.frame import RstStreamFrame
from hypothesis import example, given
from hypothesis import strategies as st

from shared.http2 import frames
from shared.http2.session import Session, SessionError, SessionLimits
from tests.shared.http2.dialogue import (
    GET,
    OK,
    POST,
    PREFACE,
    TRAILERS,
    Told,
    block,
    code_name,
    continuation,
    data,
    frame,
    headers,
    parsed_frames,
    ping,
    reset,
    settings,
    told,
    window,
)

KNOWN = {
    # A malformed message costs its stream (RFC 9113 section 8.1.1), as do DATA before the answer (8.1), an
    # increment of 0 (6.9) and trailers that do not end the stream (8.1).
    ("HEADERS", "connection PROTOCOL_ERROR", "stream PROTOCOL_ERROR"),
    ("DATA", "connection PROTOCOL_ERROR", "stream PROTOCOL_ERROR"),
    ("WINDOW_UPDATE", "connection PROTOCOL_ERROR", "stream PROTOCOL_ERROR"),
    # What was on its way when we reset the stream is no fault of the peer's (5.4.2).
    ("HEADERS", "stream STREAM_CLOSED", "nothing"),
    ("DATA", "stream STREAM_CLOSED", "nothing"),
    # An idle stream cannot be reset (6.4).
    ("RST_STREAM", "nothing", "connection PROTOCOL_ERROR"),
    # Nothing makes a CONTINUATION without HEADERS right (6.10).
    ("CONTINUATION", "connection STREAM_CLOSED", "connection PROTOCOL_ERROR"),
    ("CONTINUATION", "stream STREAM_CLOSED", "connection PROTOCOL_ERROR"),
    # h2 has no place for an interim answer on a stream that is over, or that is no request's.
    ("interim", "connection PROTOCOL_ERROR", "nothing"),
    ("interim", "connection PROTOCOL_ERROR", "stream PROTOCOL_ERROR"),
    ("interim", "connection PROTOCOL_ERROR", "stream STREAM_CLOSED"),
    ("interim", "connection PROTOCOL_ERROR", "connection STREAM_CLOSED"),
    ("interim", "stream STREAM_CLOSED", "nothing"),
}
"""A frame's kind, what it does by h2, and what it does by us."""

INTERIM = [(b":status", b"103")]

numbers = st.sampled_from([1, 1, 1, 3, 3, 5, 7, 2])
field_lists = st.sampled_from([POST, POST, GET, OK, OK, TRAILERS, INTERIM, []])
wires = st.one_of(
    st.builds(headers, numbers, field_lists, end=st.booleans()),
    st.builds(headers, numbers, field_lists, end=st.booleans()),
    st.builds(data, numbers, st.sampled_from([b"", b"abc"]), end=st.booleans(), pad=st.none() | st.just(3)),
    st.builds(reset, numbers, st.just(8)),
    st.builds(window, numbers, st.integers(1, 9)),
    st.builds(lambda number: frame(frames.WINDOW_UPDATE, 0, number, bytes(4)), numbers),
    st.builds(lambda number: frame(frames.PRIORITY, 0, number, bytes((0, 0, 0, 3, 1))), numbers),
    st.builds(
        lambda number: frame(frames.HEADERS, 0x24, number, bytes((0, 0, 0, 9, 1)) + block(POST)), numbers
    ),
    st.builds(continuation, numbers),
    st.just(ping(bytes(8))),
    st.just(settings()),
    st.just(frame(0xFA, 0, 1)),
)
deeds = st.tuples(st.sampled_from(["open", "answer", "end", "reset"]), st.sampled_from([1, 3, 5]))


def kind_of(wire: bytes) -> str:
    """A frame's kind, as KNOWN has it."""
    if wire[3] == frames.HEADERS and wire.endswith(block(INTERIM)):
        return "interim"
    return frames.FRAME_NAMES[wire[3]]


def verdict(error: str, wire: bytes) -> str:
    """One line for what a frame has done: `wire` is what was said to it."""
    if error:
        return f"connection {error}"
    for said in parsed_frames(wire):
        if isinstance(said, RstStreamFrame):
            return f"stream {code_name(said.error_code)}"
    return "nothing"


class Pair:
    """A session and h2 in the same place, whose peer is the test."""

    def __init__(self, *, client: bool) -> None:
        self.session = Session(client=client, limits=SessionLimits())
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=client, header_encoding=None)
        )
        self.h2.initiate_connection()
        self.received((b"" if client else PREFACE) + settings())

    def received(self, wire: bytes) -> tuple[str, list[Told], str, list[Told]]:
        """What these bytes do by h2, and what it tells; the same by us."""
        self.h2.data_to_send()
        self.session.data_to_send()
        by_h2 = by_us = ""
        happened: list[h2.events.Event] = []
        try:
            happened = self.h2.receive_data(wire)
        except h2.exceptions.ProtocolError as error:
            by_h2 = code_name(int(error.error_code))
        try:
            self.session.receive_data(wire)
        except SessionError as error:
            by_us = code_name(error.code)
        ours = [line[:2] for line in told(self.session.events()) if line[0] not in ("window", "settings")]
        theirs = verdict(by_h2, self.h2.data_to_send())
        return theirs, h2_told(happened), verdict(by_us, bytes(self.session.data_to_send())), ours

    def does(self, deed: str, number: int) -> None:
        """The owner of both, where the state of the stream allows it."""
        stream = self.session.streams.get(number)
        client = self.session.client
        if deed == "open" and client and self.session.room > 0:
            self.h2.send_headers(self.session.open_stream(POST).id, POST)
        elif stream is None or not stream.state.sends:
            return
        elif deed == "answer" and not client and not stream.answered:
            self.session.send_headers(stream, OK)
            self.h2.send_headers(number, OK)
        elif deed == "end" and (client or stream.answered):
            self.session.end_stream(stream)
            self.h2.end_stream(number)
        elif deed == "reset":
            self.session.reset(stream, frames.CANCEL)
            self.h2.reset_stream(number, frames.CANCEL)


NAMES = {
    h2.events.RequestReceived: "request",
    h2.events.InformationalResponseReceived: "interim",
    h2.events.ResponseReceived: "response",
    h2.events.TrailersReceived: "trailers",
    h2.events.StreamEnded: "ended",
    h2.events.StreamReset: "reset",
}


def h2_told(happened: list[h2.events.Event]) -> list[Told]:
    lines: list[Told] = []
    for event in happened:
        if isinstance(event, h2.events.DataReceived):
            if event.data:
                lines.append(("data", event.stream_id))
        elif type(event) in NAMES:
            lines.append((NAMES[type(event)], event.stream_id))  # type: ignore[attr-defined]  # all of them have it
    return lines


@example([headers(1, INTERIM)], True)
@given(st.lists(wires | deeds, max_size=25), st.booleans())
def test_the_same_verdicts_as_h2(script: list[bytes | tuple[str, int]], client: bool) -> None:
    pair = Pair(client=client)
    if client:
        pair.does("open", 0)
        pair.does("open", 0)
    for step in script:
        if isinstance(step, tuple):
            pair.does(*step)
            continue
        if client and step[3] == frames.HEADERS and not step[8] & 1:
            continue  # h2 lets a server open streams; `test_a_server_opens_no_streams`
        theirs, their_events, ours, our_events = pair.received(step)
        if theirs != ours:
            assert (kind_of(step), theirs, ours) in KNOWN
            return
        if not ours.startswith("connection"):
            assert our_events == their_events
        else:
            return


ARRIVALS = [
    headers(1, POST),
    headers(1, OK),
    headers(1, TRAILERS, end=True),
    data(1, b"x"),
    data(1, b"x", end=True),
    reset(1, 8),
    window(1, 1),
    frame(frames.PRIORITY, 0, 1, bytes(5)),
    continuation(1),
]

CLIENT_STATES: dict[str, list[bytes | tuple[str, int]]] = {
    "idle": [],
    "open": [("open", 0)],
    "answered": [("open", 0), headers(1, OK)],
    "half-closed (remote)": [("open", 0), headers(1, OK, end=True)],
    "half-closed (local)": [("open", 0), ("end", 1)],
    "closed": [("open", 0), ("end", 1), headers(1, OK, end=True)],
    "reset here": [("open", 0), ("reset", 1)],
    "reset by the peer": [("open", 0), reset(1, 8)],
}
SERVER_STATES: dict[str, list[bytes | tuple[str, int]]] = {
    "idle": [],
    "open": [headers(1, POST)],
    "answered": [headers(1, POST), ("answer", 1)],
    "half-closed (remote)": [headers(1, GET, end=True)],
    "half-closed (local)": [headers(1, POST), ("answer", 1), ("end", 1)],
    "closed": [headers(1, GET, end=True), ("answer", 1), ("end", 1)],
    "reset here": [headers(1, POST), ("reset", 1)],
    "reset by the peer": [headers(1, POST), reset(1, 8)],
    "passed over": [headers(3, POST)],
}


@pytest.mark.parametrize("arrival", ARRIVALS, ids=lambda wire: f"{frames.FRAME_NAMES[wire[3]]}-{wire[4]}")
@pytest.mark.parametrize(
    ("client", "state"),
    [*((True, state) for state in CLIENT_STATES), *((False, state) for state in SERVER_STATES)],
)
def test_a_frame_of_each_kind_in_each_state(client: bool, state: str, arrival: bytes) -> None:
    pair = Pair(client=client)
    for step in (CLIENT_STATES if client else SERVER_STATES)[state]:
        if isinstance(step, tuple):
            pair.does(*step)
        else:
            assert pair.received(step)[2] == "nothing"
    theirs, _, ours, _ = pair.received(arrival)
    assert theirs == ours or (kind_of(arrival), theirs, ours) in KNOWN
