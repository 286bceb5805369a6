"""Anything at all as a session's input, cut anywhere: events or SessionError, and nothing else."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shared.http2 import events
from shared.http2.session import Session, SessionError, SessionStream
from tests.shared.http2.dialogue import (
    CONNECT,
    GET,
    INITIAL_WINDOW,
    OK,
    POST,
    PREFACE,
    SMALL,
    TRAILERS,
    Told,
    block,
    continuation,
    data,
    frame,
    goaway,
    goaway_seen,
    headers,
    length,
    ping,
    reset,
    settings,
    settings_ack,
    told,
    window,
)

WHOLE = [
    settings({INITIAL_WINDOW: 100_000}),
    settings_ack(),
    headers(1, POST),
    frame(0xFF, 1, 1, b"unknown"),
    data(1, b"first bytes", pad=5),
    ping(b"12345678"),
    headers(3, [*GET, length(3)]),
    data(3, b"abc", end=True),
    frame(1, 0, 5, block(POST)[:7]),
    continuation(5, block(POST)[7:]),
    window(1, 70_000),
    data(1, pad=200),
    data(5, b"x" * 300),
    headers(5, TRAILERS, end=True),
    data(1, b"last", pad=0, end=True),
    reset(3, 0),
    goaway(0),
]
"""A client's side of a connection with a bit of everything."""

numbers = st.sampled_from([0, 1, 1, 1, 2, 3, 3, 5, 7, 2**31 - 1])
field_lists = st.sampled_from([POST, GET, CONNECT, OK, TRAILERS, [], [*POST, length(5)], [*OK, length(0)]])
codes = st.integers(0, 14)
good_frames = st.one_of(
    st.builds(headers, st.sampled_from([1, 3, 5, 7]), field_lists, end=st.booleans(), whole=st.booleans()),
    st.builds(continuation, st.sampled_from([1, 3, 5]), st.binary(max_size=9), whole=st.booleans()),
    st.builds(
        data,
        st.sampled_from([1, 3, 5, 7]),
        st.binary(max_size=40),
        end=st.booleans(),
        pad=st.none() | st.integers(0, 255),
    ),
    st.builds(window, numbers, st.integers(1, 2**31 - 1)),
    st.builds(reset, st.sampled_from([1, 3, 5]), codes),
    st.builds(goaway, numbers, codes),
    st.builds(ping, st.binary(min_size=8, max_size=8), ack=st.booleans()),
    st.just(goaway_seen()),
    st.builds(settings, st.dictionaries(st.integers(1, 9), st.integers(0, 2**32 - 1), max_size=3)),
)
bad_frames = st.builds(frame, st.integers(0, 12), st.integers(0, 255), numbers, st.binary(max_size=30))
wires = st.lists(good_frames | bad_frames, max_size=20).map(b"".join)
cuts = st.lists(st.integers(0, 3000), max_size=30)


def pieces(wire: bytes, at: list[int]) -> list[bytes]:
    """`wire` cut at these places."""
    places = sorted({0, len(wire), *(min(place, len(wire)) for place in at)})
    return [wire[start:end] for start, end in itertools.pairwise(places)]


def outcome(parts: list[bytes], *, client: bool = False) -> tuple[list[Told], bytes, str]:
    """What a session tells, says and raises when its input comes in these pieces."""
    session = Session(client=client, limits=SMALL)
    if client:
        session.open_stream(POST)
        session.open_stream(GET, end_stream=True)
    happened: list[events.Event] = []
    error = ""
    for part in parts:
        # A buffer that is used again, as the real one is: what was told of it has been read by then.
        try:
            session.receive_data(part)
        except SessionError as caught:
            error = f"{caught.code}: {caught}"
        happened += session.events()
        if error:
            break
    return told(happened), bytes(session.data_to_send()), error


def test_every_cut_in_two() -> None:
    wire = PREFACE + b"".join(WHOLE)
    whole = outcome([wire])
    assert whole[2] == ""
    assert ("data", 5, b"x" * 300) in whole[0]
    for at in range(len(wire)):
        assert outcome([wire[:at], wire[at:]]) == whole


def test_byte_by_byte() -> None:
    wire = PREFACE + b"".join(WHOLE)
    assert outcome([bytes((byte,)) for byte in wire]) == outcome([wire])


@given(wires, cuts, st.booleans())
def test_any_frames_cut_anywhere(wire: bytes, at: list[int], client: bool) -> None:
    wire = (b"" if client else PREFACE) + settings() + wire
    assert outcome(pieces(wire, at), client=client) == outcome([wire], client=client)


@given(st.binary(max_size=300), cuts, st.booleans())
def test_any_bytes_cut_anywhere(wire: bytes, at: list[int], client: bool) -> None:
    assert outcome(pieces(wire, at), client=client) == outcome([wire], client=client)


@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_after_a_good_start(wire: bytes, client: bool) -> None:
    outcome([(b"" if client else PREFACE) + settings() + wire], client=client)


actions = st.sampled_from(["respond", "send", "end", "trailers", "reset", "consume", "announce", "goaway"])


@given(
    st.lists(st.tuples(good_frames | bad_frames, st.lists(actions, max_size=4)), max_size=15), st.booleans()
)
def test_an_owner_may_do_anything_at_any_time(script: list[tuple[bytes, list[str]]], client: bool) -> None:
    session = Session(client=client, limits=SMALL)
    known: list[SessionStream] = []
    if client:
        known = [session.open_stream(POST), session.open_stream(GET, end_stream=True)]
    session.receive_data((b"" if client else PREFACE) + settings())
    responded: set[SessionStream] = set()
    for wire, does in script:
        try:
            session.receive_data(wire)
        except SessionError:
            assert session.broken
        for event in session.events():
            if isinstance(event, events.RequestReceived):
                known.append(event.stream)
            elif isinstance(event, events.DataReceived):
                session.consumed(event.stream, len(event.data))
        for action in does:
            for stream in known:
                act(session, stream, action, responded)
        session.data_to_send()


def act(session: Session, stream: SessionStream, action: str, responded: set[SessionStream]) -> None:
    # A server responds once and before anything else: that much is the owner's to keep.
    if not session.client and stream not in responded and action in ("send", "end", "trailers", "respond"):
        responded.add(stream)
        session.send_headers(stream, OK)
    elif action == "send":
        assert 0 <= session.send_data(stream, b"abc") <= 3
    elif action == "end":
        session.end_stream(stream)
    elif action == "trailers":
        session.send_headers(stream, TRAILERS, end_stream=True)
    elif action == "reset":
        session.reset(stream, 8)
    elif action == "announce":
        session.announce_goaway()
    elif action == "goaway":
        session.goaway()
