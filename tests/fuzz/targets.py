"""What is fuzzed: for everything that reads a stranger's bytes, one function that feeds it and one promise.

A target `fuzz_X(data)` returns if the reader kept the promise in its docstring and raises otherwise; an
exception that the reader does not document is a finding. A target keeps nothing between two calls, touches no
network and no file, and does the same each time for the same bytes.

Seeds are inputs short enough to stand here, longer and binary ones are files in corpus/TARGET. How inputs are
changed and replayed is `test_fuzz.py`'s (with pytest) and `run.py`'s (guided by coverage).
"""

from __future__ import annotations

import base64
import contextlib
import fnmatch
import json
import re
import struct
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import cast
from urllib.parse import urlsplit

import h11
import hpack
import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.utils import CryptographyDeprecationWarning
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, RstStreamFrame, WindowUpdateFrame

from agent.proxy.fields import checked_by_cloud_run, request_head, request_trailers
from agent.proxy.http1_messages import (
    Chunks,
    Http1Error,
    chunk,
    end_of_head,
    last_chunk,
    read_head,
    request_bytes,
)
from gateway.config import config
from gateway.rules.routes import (
    Route,
    RouteTable,
    Target,
    TokenRule,
)
from gateway.rules.templates import (
    DEFAULT_PORTS,
    Template,
    TunnelUrl,
    read_target,
)
from hbone import target
from shared.address import Address
from shared.credentials.certificates.protobuf_fields import bytes_field, fields, integer_field
from shared.credentials.token_sources.jwks import MAX_KEYS, read_keys
from shared.errors import (
    ClientHelloError,
    ConfigError,
    DeniedError,
    NoRouteError,
    TokenRejectedError,
    UsageError,
)
from shared.http2 import events, frames, grpc_message
from shared.http2.flood_guard import FloodLimits
from shared.http2.past_streams import REMEMBERED_STREAMS
from shared.http2.peer_settings import FIRST_WINDOW
from shared.http2.session import (
    Session,
    SessionError,
    SessionLimits,
    SessionStream,
)
from shared.http2.window_growth import WindowGrowth
from shared.name_globs import compile_glob
from shared.tls import client_hello, istio_sni
from shared.trust import revocation_lists, revocations, spiffe, token_claims
from shared.trust.jwt_check import TokenChecker, algorithm
from shared.trust.peer_patterns import TrustDomain, split_patterns
from shared.trust.peer_policy import PeerPolicy
from shared.trust.roots import bundle_map
from shared.trust.trust_bundles import TrustBundles
from shared.tunnel import tunnel_request

CORPUS = Path(__file__).with_name("corpus")
ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("agent", "gateway", "hbone", "shared")

SECRET = "c4n4ry-that-nobody-tells"
"""Stands where seeds have a secret: no text that a reader makes may repeat it. Good base64url as well."""

MAX_TEXT_CHARS = 4096
"""The longest error text: 255 characters shown twice, each escaped as at most six, and what is said."""


@dataclass(frozen=True, slots=True)
class FuzzTarget:
    """A function to fuzz, and where its inputs start."""

    check: Callable[[bytes], None]
    max_bytes: int
    """The longest input worth trying."""
    seeds: dict[str, bytes] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The function's name without `fuzz_`: the folder in corpus/, the word on the command line."""
        return self.check.__name__.removeprefix("fuzz_")

    def entries(self) -> dict[str, bytes]:
        """Every input that is kept, by name: the seeds and the files."""
        files = sorted(path for path in (CORPUS / self.name).glob("*") if path.is_file())
        return self.seeds | {path.name: path.read_bytes() for path in files}


def mutated(random: Random, entries: list[bytes], max_bytes: int) -> bytes:
    """One of the entries with one to four changes: a flipped bit, another byte, an end cut off, a slice
    repeated or removed, or the tail of another entry."""
    data = bytearray(random.choice(entries))
    for _ in range(random.randint(1, 4)):
        at = random.randint(0, len(data))
        slice_end = min(len(data), at + random.randint(1, 32))
        match random.randint(0, 5):
            case 0 if at < len(data):
                data[at] ^= 1 << random.randint(0, 7)
            case 1 if at < len(data):
                data[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randint(0, 255)))
            case 2:
                del data[at:]
            case 3:
                data[at:at] = bytes(data[at:slice_end]) * random.choice((1, 2, 8, 200))
            case 4:
                del data[at:slice_end]
            case _:
                other = random.choice(entries)
                data[at:] = other[random.randint(0, len(other)) :]
    return bytes(data[:max_bytes])


def told(error: BaseException, secret: str = "") -> str:
    """The text of an error, once it is known to be one line of bounded length that keeps `secret` to itself,
    as does everything that a traceback would show with it."""
    text = str(error)
    assert text, f"{type(error).__name__} without a text"
    assert text.isprintable(), f"not printable: {text!a}"
    assert len(text) <= MAX_TEXT_CHARS, f"{len(text)} characters of text: {text[:200]!a}"
    if secret:
        assert secret not in "".join(traceback.format_exception(error)), f"tells the secret: {text!a}"
    return text


def place_of(error: BaseException) -> str:
    """Where a promise was broken: the error's type, the last line in this file that led there, and the last
    function of the product. The same place, the same fault, as far as a machine can tell."""
    places = {}
    for step in traceback.extract_tb(error.__traceback__):
        path = Path(step.filename)
        if step.filename == __file__ and step.name != "told":
            places["target"] = f"{step.name} line {step.lineno}"
        elif path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES:
            places["product"] = f"{path.relative_to(ROOT)} {step.name}"
    return " ".join((type(error).__name__, *places.values()))


# The first bytes of a connection.


def fuzz_client_hello(data: bytes) -> None:
    """A hello, None or ClientHelloError; what is decided for some bytes stays decided when more come, for
    every type of buffer, and however the same message is split over records. A name that comes out has a
    destination or is refused with NoRouteError."""
    whole = hello_outcome(data)
    assert hello_outcome(memoryview(data)) == whole
    assert whole is not None or len(data) < client_hello.MAX_PEEK_BYTES
    decided: object = None
    for cut in range(0, len(data) + 1, max(1, len(data) // 24)):
        outcome = hello_outcome(data[:cut])
        assert decided is None or outcome == decided, f"after {cut} bytes {outcome}, before {decided}"
        decided = outcome
    assert decided is None or decided == whole
    if isinstance(whole, client_hello.ClientHello):
        assert hello_outcome(data[: whole.size]) == whole
        assert hello_outcome(data[: whole.size - 1]) is None
        _check_server_name(whole.server_name)
    message = _handshake_message(data)
    assert message is None or whole is not None, "undecided with a whole message at hand"
    if message is not None and len(message) == _length(message):
        for cuts in ({1}, {4}, {5, 6}, {len(message) // 2}, {len(message) - 1}, set(range(1, 64))):
            edges = sorted({0, len(message)} | {cut for cut in cuts if cut < len(message)})
            fragments = [message[start:end] for start, end in pairwise(edges)]
            if any(len(fragment) > 16384 for fragment in fragments):
                continue
            split = b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in fragments)
            again = hello_outcome(split)
            assert _without_size(again) == _without_size(whole), (
                f"cut at {sorted(cuts)}: {again}, not {whole}"
            )


def hello_outcome(data: bytes | memoryview) -> client_hello.ClientHello | tuple[type, str] | None:
    """What `parse` makes of `data`, errors as type and text; its argument stays free to be resized."""
    buffer = bytearray(data)
    try:
        outcome = client_hello.parse(buffer if isinstance(data, bytes) else data)
    except ClientHelloError as error:
        buffer.append(0)  # BufferError if the error holds a view
        return type(error), told(error)
    buffer.append(0)
    return outcome


def _without_size(outcome: object) -> object:
    if isinstance(outcome, client_hello.ClientHello):
        return outcome.server_name, outcome.alpn
    return outcome


def _handshake_message(data: bytes) -> bytes | None:
    """What the records at the start of `data` carry, up to the one where their message ends; None if they do
    not get so far."""
    message = b""
    at = 0
    for _ in range(client_hello.MAX_RECORDS):
        header = data[at : at + 5]
        if len(header) < 5 or header[:2] != b"\x16\x03" or not 1 <= header[2] <= 3:
            return None
        length = int.from_bytes(header[3:], "big")
        at += 5 + length
        if not 0 < length <= 16384 or at > len(data):
            return None
        message += data[at - length : at]
        if len(message) >= 4 and len(message) >= _length(message):
            return message
    return None


def _length(message: bytes) -> int:
    """The length of a handshake message that its header tells."""
    return 4 + int.from_bytes(message[1:4], "big")


def _check_server_name(name: str | None) -> None:
    if name is None:
        return
    assert name and name == name.lower() and name.isascii() and name.isprintable() and " " not in name
    try:
        destination = istio_sni.parse(name)
    except NoRouteError as error:
        told(error)
        return
    assert re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", destination.host), destination
    if destination.port is None:
        assert destination.host == name
    else:
        assert 1 <= destination.port <= 65535
        key = destination.direction, str(destination.port), destination.subset, destination.host
        assert name in ("_.".join(key), "|".join(key)), f"{name} read as {destination}"


# HTTP/2.

LIMITS = (
    SessionLimits(
        max_streams=3,
        stream_window_bytes=65535,
        connection_window_bytes=131072,
        max_header_list_bytes=1024,
        floods=FloodLimits(
            control_frames=30, resets=8, empty_data=8, window_updates=30, header_block_bytes=1500
        ),
    ),
    SessionLimits(),
)

REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"a"), (b":path", b"/_hbone/15003")]
CONNECT = [(b":method", b"CONNECT"), (b":authority", b"10.0.0.1:80")]
HEADER_LISTS: tuple[list[tuple[bytes, bytes]], ...] = (
    REQUEST,
    [(b":method", b"GET"), *REQUEST[1:]],
    [*REQUEST, (b"content-length", b"5")],
    CONNECT,
    [*REQUEST, (b"cookie", b"a=b"), (b"cookie", b"c=d"), (b"te", b"trailers")],
    [*REQUEST, (b"x", b"y" * 1200)],
    [(b":status", b"200")],
    [(b":status", b"200"), (b"content-length", b"5")],
    [(b":status", b"100")],
    [(b":status", b"204"), (b"content-length", b"5")],
    [(b":status", b"503"), (b"content-length", b"70000")],
    [(b"grpc-status", b"0")],
    [(b"Upper", b"case")],
    [(b"late", b"1"), *REQUEST],
    [],
    [*REQUEST, (b"content-length", b"5"), (b"content-length", b"6")],
)
"""What a scripted peer puts into HEADERS: requests, responses, trailers, and lists that are none of these."""

RARE_KINDS = (
    frames.SETTINGS,
    frames.PING,
    frames.GOAWAY,
    frames.PRIORITY,
    frames.PUSH_PROMISE,
    0x20,  # an extension's
)

PIECE_S = 1 / 16
"""The time between two pieces, for an owner that reacts. For one that looks on the clock stands still: pieces
are to make no difference."""

EDGES = (0, 1, 100, 16384, 65535, 65536, 1 << 20, 2**31 - 65536, 2**31 - 1, 2**31)
"""Numbers around which a window or a setting changes its meaning."""

GROWTH_BYTES = 8 << 20
"""By which the windows of a conversation may grow."""

PADDING_BYTES = 256
"""The most that a frame's padding adds. It is credited with the frame's header, before it has arrived."""


def frame(kind: int, flags: int, stream_id: int, body: bytes) -> bytes:
    """A frame as RFC 9113 section 4.1 draws it."""
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + body


class PeerBooks:
    """What a peer has sent and allowed, read from its bytes alone; an upper bound once they break a rule."""

    def __init__(self, preface_bytes: int) -> None:
        self.data = {0: 0}
        """Bytes that have arrived in DATA frames, padding included, by stream; 0 is the connection."""
        self.granted = {0: FIRST_WINDOW}
        """What WINDOW_UPDATE has allowed us to send, by stream; 0 is the connection with its first window."""
        self.first_window = FIRST_WINDOW
        """The largest that SETTINGS has allowed for any stream."""
        self.frame_bytes = 16384
        """The largest frame that SETTINGS has allowed."""
        self._buffer = bytearray()
        self._skip = preface_bytes
        self._data_left = 0
        self._data_stream = 0

    def take(self, data: bytes) -> None:
        """Reads on."""
        self._buffer += data
        skipped = min(self._skip, len(self._buffer))
        self._skip -= skipped
        del self._buffer[:skipped]
        while self._step():
            pass

    def _step(self) -> bool:
        buffer = self._buffer
        if self._data_left:
            arrived = min(self._data_left, len(buffer))
            del buffer[:arrived]
            self._data_left -= arrived
            self.data[0] += arrived
            self.data[self._data_stream] = self.data.get(self._data_stream, 0) + arrived
            return arrived > 0
        if len(buffer) < 9:
            return False
        length, kind = int.from_bytes(buffer[:3], "big"), buffer[3]
        stream_id = int.from_bytes(buffer[5:9], "big") & frames.MAX_STREAM_ID
        if kind == frames.DATA:
            del buffer[:9]
            self._data_left, self._data_stream = length, stream_id
            return True
        if len(buffer) < 9 + length:
            return False
        body = bytes(buffer[9 : 9 + length])
        del buffer[: 9 + length]
        if kind == frames.WINDOW_UPDATE:
            increment = int.from_bytes(body[:4], "big") & frames.MAX_WINDOW
            self.granted[stream_id] = self.granted.get(stream_id, 0) + increment
        elif kind == frames.SETTINGS:
            for at in range(0, len(body) - 5, 6):
                code, value = struct.unpack_from(">HI", body, at)
                if code == 4:
                    self.first_window = max(self.first_window, value)
                elif code == 5:
                    self.frame_bytes = max(self.frame_bytes, value)
        return True


class OurBooks:
    """What the session has sent, read by hyperframe, and what may not be sent any more."""

    def __init__(self, preface_bytes: int) -> None:
        self.credited: dict[int, int] = {}
        """What WINDOW_UPDATE gave back to the peer, by stream; 0 is the connection."""
        self.data = {0: 0}
        """Bytes of DATA frames by stream; 0 is the connection."""
        self.last: Frame | None = None
        self._skip = preface_bytes
        self._ended: set[int] = set()

    def take(self, output: bytes, peer: PeerBooks) -> None:
        """Reads on; `output` ends where a frame ends."""
        at, self._skip = self._skip, 0
        while at < len(output):
            sent, length = Frame.parse_frame_header(memoryview(output[at : at + 9]), strict=True)
            assert at + 9 + length <= len(output), "an unfinished frame"
            assert length <= peer.frame_bytes, f"a frame of {length} bytes, {peer.frame_bytes} are allowed"
            sent.parse_body(memoryview(output[at + 9 : at + 9 + length]))
            at += 9 + length
            self._take(sent, length, peer)
            self.last = sent

    def _take(self, sent: Frame, length: int, peer: PeerBooks) -> None:
        stream_id = sent.stream_id
        if isinstance(sent, DataFrame | HeadersFrame):
            assert stream_id not in self._ended, f"{sent} after the end of its stream"
        if isinstance(sent, DataFrame):
            for account in (0, stream_id):
                self.data[account] = self.data.get(account, 0) + length
            assert self.data[0] <= peer.granted[0], "DATA beyond the connection's window"
            allowed = peer.first_window + peer.granted.get(stream_id, 0)
            assert self.data[stream_id] <= allowed, f"DATA beyond the window of stream {stream_id}"
        if isinstance(sent, WindowUpdateFrame):
            self.credited[stream_id] = self.credited.get(stream_id, 0) + sent.window_increment
        if isinstance(sent, RstStreamFrame) or "END_STREAM" in sent.flags:
            self._ended.add(stream_id)


class Conversation:
    """A session, an owner that reacts as its seed says, and the books that an outsider keeps about both."""

    def __init__(self, *, client: bool, limits: SessionLimits, seed: int, passive: bool = False) -> None:
        self._now = 0.0
        growth = WindowGrowth(lambda: GROWTH_BYTES)
        self.session = Session(client=client, limits=limits, growth=growth, clock=lambda: self._now)
        self.session.announced()
        self.streams: dict[int, SessionStream] = {}
        """Every stream that there was, by number."""
        self.seen: list[tuple[object, ...]] = []
        """Every event as plain values, neighbouring pieces of DATA joined."""
        self.over = False
        self._random = Random(seed)
        self._passive = passive
        self._answered: set[int] = set()
        self._ended: set[int] = set()  # the peer has finished sending on these
        self._silent: set[int] = set()  # nothing may be told about these any more
        self._unread: dict[int, int] = {}  # delivered to the owner and not yet consumed
        self._owed: dict[int, int] = {}  # bytes that the owner still wants to write
        self._body: dict[int, int] = {}  # payload delivered in all
        self._promised: dict[int, int] = {}  # content-length
        self._peer = PeerBooks(0 if client else len(frames.PREFACE))
        self._ours = OurBooks(len(frames.PREFACE) if client else 0)
        if client:
            self.open(0)
            self.open(2 if passive else 3)
        self._balance()

    def feed(self, data: bytes) -> None:
        """Gives the session `data` in one piece, lets the owner react, and checks what must hold."""
        session = self.session
        if self.over:
            return
        self._peer.take(data)
        waiting = session._scanner.waiting_bytes
        pending = session.pending_bytes
        broken: SessionError | None = None
        try:
            session.receive_data(memoryview(data), self._now)
        except SessionError as error:
            broken = error
        self._now += 0.0 if self._passive else PIECE_S
        # A PING is answered with as many bytes, a HEADERS frame of ten with an RST_STREAM of 13.
        answers = session.pending_bytes - pending
        assert answers <= 2 * (len(data) + waiting) + 64, f"{answers} bytes of answers to {len(data)}"
        for event in session.events():
            self._note(event)
            if not self._passive:
                self._react(event)
        self._balance()
        self._silent |= {stream.id for stream in self.streams.values() if stream.over}
        if broken is not None:
            self.over = True
            self.seen.append(("error", broken.code))
            assert 0 <= broken.code <= 0xD and isinstance(self._ours.last, GoAwayFrame)
            self._last_words()
            told(broken)

    def finish(self) -> None:
        """The owner lets go of everything, after which nothing may be left."""
        for stream in list(self.streams.values()):
            self.consume(stream, 1 << 31)
            self.session.reset(stream, frames.CANCEL)
        assert not self.session.streams
        self._balance()
        self._last_words()

    def _last_words(self) -> None:
        """Rule 5 of the session: after a connection error nothing more is sent or told."""
        if not self.session.broken:
            return
        for stream in list(self.streams.values()):
            self.write(stream, 1)
            self.session.end_stream(stream)
            self.consume(stream, 1 << 31)
            self.session.reset(stream, frames.CANCEL)
        self.session.goaway()
        self.session.receive_data(b"more")
        assert self.session.room == 0 and not self.session.events()
        assert not self.session.pending_bytes, f"sent after GOAWAY: {self.session.data_to_send().hex()}"

    # The books.

    def _note(self, event: events.Event) -> None:
        stream: SessionStream | None = getattr(event, "stream", None)
        number = stream.id if stream is not None else 0
        assert number not in self._silent, f"told of a stream that is over: {event}"
        match event:
            case events.DataReceived(data=data):
                assert data and number not in self._ended
                earlier = self.seen.pop()[2] if self.seen[-1][:2] == ("data", number) else b""
                self.seen.append(("data", number, cast(bytes, earlier) + bytes(data)))
                self._body[number] = self._body.get(number, 0) + len(data)
                self._unread[number] = self._unread.get(number, 0) + len(data)
                return
            case events.RequestReceived(headers=headers) if stream is not None:
                assert number not in self.streams and not self.session.client
                self.streams[number] = stream
                self._promise(number, headers)
            case events.ResponseReceived(headers=headers):
                assert self.session.client and number not in self._answered
                self._answered.add(number)
                if dict(headers)[b":status"] == b"200" and number != 3:  # 3 may be a CONNECT, 204 has no body
                    self._promise(number, headers)
            case events.StreamEnded():
                assert number not in self._ended
                self._ended.add(number)
                body = self._body.get(number, 0)
                assert body == self._promised.get(number, body), "another length than content-length says"
            case events.StreamReset():
                self._silent.add(number)
        names = ("headers", "ended", "code", "by_peer", "last_stream_id")
        self.seen.append((type(event).__name__, number, *(getattr(event, name, None) for name in names)))

    def _promise(self, number: int, headers: events.Headers) -> None:
        length = dict(headers).get(b"content-length")
        if length is not None:
            self._promised[number] = int(length)

    def _balance(self) -> None:
        """Checks what the session has sent, its bounds, and that flow control loses and invents no byte."""
        session, limits = self.session, self.session.limits
        self._ours.take(bytes(session.data_to_send()), self._peer)
        assert session.pending_bytes == 0
        assert session.client or len(session.streams) <= limits.max_streams
        assert session._scanner.waiting_bytes < 9 + limits.max_frame_bytes
        assert len(session._streams.past) <= REMEMBERED_STREAMS
        extra = limits.connection_window_bytes - FIRST_WINDOW  # announced at the start
        for number, credited in self._ours.credited.items():
            given_back = credited if number else credited - extra
            most = self._peer.data.get(number, 0) + PADDING_BYTES + GROWTH_BYTES
            assert given_back <= most, "more credit than received"
        assert sum(self._body.values()) <= self._peer.data[0]
        if session.broken:
            return
        held = sum(stream.held for stream in session.streams.values())
        coming = session._scanner.data_left
        grown = sum(stream.window - limits.stream_window_bytes for stream in session.streams.values())
        assert 0 <= session._windows._growth.granted_bytes <= grown < GROWTH_BYTES
        account = session._windows.receive + session._windows.credit + held + coming
        assert account == limits.connection_window_bytes + grown, f"the connection's window is off: {account}"
        for number, stream in session.streams.items():
            assert number == stream.id and not stream.over and stream.held >= 0
            assert stream.receive_window >= 0
            account = stream.receive_window + stream.credit + stream.held
            account += coming if stream is session._data.stream else 0
            assert not stream.state.receives or account == stream.window, f"a window is off: {account}"

    # The owner.

    def _react(self, event: events.Event) -> None:
        choice = self._random.randrange(8)
        match event:
            case events.RequestReceived(stream):
                if choice == 0:
                    self.session.reset(stream, frames.CANCEL)
                elif choice < 6:
                    self.answer(stream, end=choice == 1)
                    self.write(stream, choice * 9000)
            case events.DataReceived(stream=stream):
                if choice == 7:
                    self.session.reset(stream, frames.CANCEL)
                elif choice:
                    self.consume(stream, self._unread[stream.id] if choice < 6 else 1)
            case events.StreamEnded(stream):
                if choice < 4:
                    self.end(stream, trailers=choice == 0)
            case events.WindowOpened(None):
                for stream in list(self.streams.values()):
                    self.write(stream, 0)
            case events.WindowOpened(stream) if stream is not None:
                self.write(stream, 0)
            case events.SettingsReceived() if self.session.client:
                self.open(choice)

    def open(self, choice: int) -> None:
        """Client: opens a stream where there is room."""
        if self.session.client and self.session.room > 0 and len(self.streams) < 20:
            headers = REQUEST if choice != 3 or len(self.streams) != 1 else CONNECT
            stream = self.session.open_stream(headers, end_stream=choice == 4)
            self.streams[stream.id] = stream
            if choice > 4:
                self.write(stream, choice * 9000)

    def answer(self, stream: SessionStream, *, end: bool) -> None:
        """Server: sends response headers, once."""
        if not self.session.client and stream.id not in self._answered:
            self._answered.add(stream.id)
            self.session.send_headers(stream, [(b":status", b"200")], end_stream=end)

    def write(self, stream: SessionStream, count: int) -> None:
        """Wants to write `count` more bytes and writes what the windows allow."""
        owed = self._owed.get(stream.id, 0) + count
        if owed and (self.session.client or stream.id in self._answered):
            owed -= self.session.send_data(stream, bytes(min(owed, 1 << 16)))
            assert owed >= 0
        self._owed[stream.id] = owed

    def end(self, stream: SessionStream, *, trailers: bool) -> None:
        """Ends the sending side, where the headers are out."""
        if self.session.client or stream.id in self._answered:
            if trailers:
                self.session.send_headers(stream, [(b"t", b"1")], end_stream=True)
            else:
                self.session.end_stream(stream)

    def consume(self, stream: SessionStream, count: int) -> None:
        """Has passed on at most `count` of the bytes that it was given."""
        count = min(count, self._unread.get(stream.id, 0))
        if count:
            self._unread[stream.id] -= count
            self.session.consumed(stream, count)


def fuzz_session(data: bytes) -> None:
    """A session fed any bytes in any pieces raises SessionError and nothing else; its memory, its answers and
    its credits are bounded by what it received; what it sends is well-formed, within the peer's windows and
    not on ended streams; what it tells about a stream comes in order and ends; and with an owner that only
    looks on, the pieces make no difference.

    The first byte chooses the role and the rest of the setting, the next three the pieces and the owner."""
    if len(data) < 4:
        return
    mode, seed, *pieces = data[:4]
    client = bool(mode & 1)
    limits = LIMITS[mode >> 1 & 1]
    received = data[4:]
    if mode & 4:
        received = frame(frames.SETTINGS, 0, 0, b"") + received
        if not client:
            received = frames.PREFACE + received
    if mode & 8:
        outcomes = []
        for parts in ([received], list(_pieces(received, pieces))):
            conversation = Conversation(client=client, limits=limits, seed=0, passive=True)
            for part in parts:
                conversation.feed(part)
            outcomes.append(conversation.seen)
        assert outcomes[0] == outcomes[1], "the pieces make a difference"
    else:
        conversation = Conversation(client=client, limits=limits, seed=seed)
        for part in _pieces(received, pieces):
            conversation.feed(part)
        conversation.finish()


def _pieces(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    """`data` in pieces of these sizes in turn; 0 stands for all that is left."""
    at = turn = 0
    while at < len(data):
        size = max(sizes[turn % len(sizes)], len(data) // 256) or len(data)
        yield data[at : at + size]
        at += size
        turn += 1


class Script:
    """Numbers read from fuzzed bytes; zeros once they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """How many bytes are left."""
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        """The next `count` bytes, fewer at the end."""
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, count: int = 1) -> int:
        """A number of `count` bytes."""
        return int.from_bytes(self.take(count).ljust(count, b"\0"), "big")


class ScriptedPeer:
    """A peer that sends whole frames, mostly sensible ones, and an owner that does what the script says."""

    def __init__(self, conversation: Conversation, script: Script) -> None:
        self._conversation = conversation
        self._script = script
        self._encoder = hpack.Encoder()
        self._next_stream = 1
        self._rest_of_headers = b""
        self.out = b"" if conversation.session.client else frames.PREFACE
        self.out += frame(frames.SETTINGS, 0, 0, b"")

    def step(self) -> None:
        """One line of the script."""
        script = self._script
        match script.number() % 14:
            case 0:
                self._headers(self._next_stream)
                self._next_stream += 2
            case 1:
                self._headers(self._stream())
            case 2 | 3:
                self._data()
            case 4:
                self._send(frames.RST_STREAM, 0, self._stream(), script.take(4).rjust(4, b"\0"))
            case 5:
                setting = (script.number() % 8).to_bytes(2, "big") + self._value()
                self._send(frames.SETTINGS, 0, 0, setting)
            case 6:
                self._send(frames.WINDOW_UPDATE, 0, self._stream(), self._value())
            case 7:
                self._send(frames.CONTINUATION, script.number(), self._stream(), self._rest_of_headers)
                self._rest_of_headers = b""
            case 8:
                kind, flags = RARE_KINDS[script.number() % len(RARE_KINDS)], script.number()
                self._send(kind, flags, self._stream(), bytes(script.number() % 20))
            case 9:
                self.out += script.take(script.number())
            case 10:
                self.deliver()
            case 11:
                self.deliver(all_but=script.number() * 8)
            case _:
                self._owner()

    def deliver(self, all_but: int = 0) -> None:
        """What has been put together, but for the last so many bytes, is fed to the session."""
        end = max(0, len(self.out) - all_but)
        sent, self.out = self.out[:end], self.out[end:]
        self._conversation.feed(sent)

    def _send(self, kind: int, flags: int, stream_id: int, body: bytes) -> None:
        self.out += frame(kind, flags, stream_id, body)

    def _stream(self) -> int:
        """One of the first eight streams of a client; rarely any small number, 0 among them."""
        number = self._script.number()
        return number % 8 * 2 + 1 if number < 240 else number - 240

    def _value(self) -> bytes:
        """Four bytes that mean a window or another setting: one of EDGES or any."""
        choice = self._script.number()
        value = EDGES[choice] if choice < len(EDGES) else self._script.number(4)
        return value.to_bytes(4, "big")

    def _headers(self, stream_id: int) -> None:
        block = bytes(self._encoder.encode(HEADER_LISTS[self._script.number() % 16], huffman=False))
        flags = self._script.number() & 0x2D ^ frames.FLAG_END_HEADERS
        if not flags & frames.FLAG_END_HEADERS:
            block, self._rest_of_headers = block[: len(block) // 2], block[len(block) // 2 :]
        body = bytes(5) + block if flags & 0x20 else block
        if flags & frames.FLAG_PADDED:
            body = b"\x03" + body + bytes(3)
        self._send(frames.HEADERS, flags, stream_id, body)

    def _data(self) -> None:
        stream_id, flags, padding = self._stream(), self._script.number(), b""
        payload = bytes(self._script.number(2) % 16400)
        if flags & frames.FLAG_PADDED:
            padding = bytes(self._script.number())
            payload = bytes((len(padding),)) + payload
        self._send(frames.DATA, flags & 0x9, stream_id, payload + padding)

    def _owner(self) -> None:
        """One thing that the owner does: what, then the stream (three bits) and how much of it (five)."""
        conversation, script = self._conversation, self._script
        action, choice = script.number(), script.number()
        amount = choice // 8
        stream = conversation.streams.get(choice % 8 * 2 + 1)
        match action % 8:
            case 0:
                conversation.open(choice % 8)
            case 1 if action == 1:  # seldom: no stream is taken after it
                conversation.session.goaway()
            case 1 if action == 9:
                conversation.session.announce_goaway()
            case 2 if stream is not None:
                conversation.answer(stream, end=amount > 15)
            case 3 if stream is not None:
                conversation.write(stream, amount * 3300)
            case 4 if stream is not None:
                conversation.end(stream, trailers=amount > 15)
            case 5 if stream is not None:
                conversation.session.reset(stream, frames.CANCEL)
            case 6 if stream is not None:
                conversation.consume(stream, 1 << 31)
            case 7 if stream is not None:
                conversation.consume(stream, amount)


def fuzz_session_script(data: bytes) -> None:
    """What fuzz_session promises, for a peer that knows HTTP/2: the input is a script of frames and of what
    the owner does between them, so that windows fill, bodies end and streams are reset in every order."""
    script = Script(data)
    mode, seed = script.number(), script.number()
    limits = LIMITS[mode >> 1 & 1]
    conversation = Conversation(client=bool(mode & 1), limits=limits, seed=seed, passive=bool(mode & 4))
    peer = ScriptedPeer(conversation, script)
    while script.left > 0 and not conversation.over:
        peer.step()
    peer.deliver()
    conversation.finish()


# Requests to krun.


def fuzz_request(data: bytes) -> None:
    """A header list that a session lets through is a tunnel's, by a name of known letters, or one HTTP/1.1
    request, the same for another parser, without what the app must not see; or krun refuses it. No error and
    no refusal repeats what stands in a header that holds a secret.

    The first byte: 1 ends the stream with the headers, 2 puts a usual request's pseudo-headers in front."""
    tunnel_request.target_name(data)
    checked_by_cloud_run(data)
    lines = [line.partition(b": ") for line in data[1:].split(b"\n") if line]
    headers = [(name, value) for name, _, value in lines]
    if data[:1] and data[0] & 2:
        headers = REQUEST + headers
    holders = (b"authorization", b"x-serverless-authorization", b"cookie")
    told_openly = any(SECRET.encode() in name + value for name, value in headers if name not in holders)
    secret = "" if told_openly else SECRET
    block = bytes(hpack.Encoder().encode(headers, huffman=False))
    flags = frames.FLAG_END_HEADERS | (frames.FLAG_END_STREAM if data[:1] and data[0] & 1 else 0)
    if len(block) > 16384:
        return
    session = Session(client=False)
    try:
        session.receive_data(frames.PREFACE + frame(frames.SETTINGS, 0, 0, b""))
        session.receive_data(frame(frames.HEADERS, flags, 1, block))
    except SessionError as error:
        told(error, secret)
    for event in session.events():
        if isinstance(event, events.RequestReceived):
            pseudo = {name: value for name, value in event.headers if name.startswith(b":")}
            _check_target_name(pseudo.get(b":path", b""))
            if pseudo[b":method"] != b"CONNECT":
                _check_app_request(event, pseudo, secret)


def _check_target_name(path: bytes) -> None:
    name = tunnel_request.target_name(path)
    bare = path.partition(b"?")[0]
    assert tunnel_request.target_name(bare + b"?x=1") == name
    if name:
        assert bare == b"/_hbone/" + name.encode() and set(name) <= set(_NAME_LETTERS) and len(name) <= 64
    else:
        assert (name == "") == (bare.startswith(b"/_hbone/") or bare == b"/_hbone")


_NAME_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-"


def _check_app_request(event: events.RequestReceived, pseudo: dict[bytes, bytes], secret: str) -> None:
    head = request_head(event.headers, bodiless=event.ended)
    chunked = not (head.has_length or event.ended)
    try:
        sent = request_bytes(head, chunked=chunked)
    except Http1Error as error:
        told(error, secret)
        return
    body = b""
    lengths = [int(value) for name, value in head.fields if name == b"content-length"]
    if chunked:
        body = b"GET / HTTP/"
        sent += chunk(body) + last_chunk(request_trailers(event.headers))
    elif lengths and lengths[0] > 1 << 16:
        return
    elif lengths and not event.ended:
        body = b"GET / HTTP/"[: lengths[0]].ljust(lengths[0], b".")
        sent += body
    elif lengths and lengths[0]:
        return  # it promises a body that does not come: the session's matter
    server = h11.Connection(our_role=h11.SERVER)
    server.receive_data(sent)
    got = server.next_event()
    assert isinstance(got, h11.Request)
    assert got.method == pseudo[b":method"] and got.target == pseudo[b":path"]
    names = [name for name, _ in got.headers]
    ours = {b"x-forwarded-client-cert", b"x-serverless-authorization"}
    assert not ours & {name.replace(b"_", b"-") for name in names}
    assert names.count(b"host") == 1
    assert names.count(b"content-length") + names.count(b"transfer-encoding") < 2
    if not any(name == b"x-serverless-authorization" for name, _ in event.headers):
        kept = [value for name, value in got.headers if name == b"authorization"]
        assert not any(checked_by_cloud_run(value) for value in kept)
    received = b""
    while isinstance(part := server.next_event(), h11.Data):
        received += part.data
    assert isinstance(part, h11.EndOfMessage) and received == body and server.trailing_data == (b"", False)
    assert not ours & {name.replace(b"_", b"-") for name, _ in part.headers}


# Answers of krun's app.


def fuzz_answer(data: bytes) -> None:
    """The head of an app's answer, and a chunked body, are read as h11 reads them, or refused with
    Http1Error; in pieces as well as whole.

    The first byte: 1 says that the request was HEAD, 2 that what follows are a body's chunks."""
    method = b"HEAD" if data[:1] and data[0] & 1 else b"GET"
    if data[:1] and data[0] & 2:
        _check_chunks(data[1:])
        return
    theirs = h11.Connection(h11.CLIENT)
    theirs.send(h11.Request(method=method, target=b"/", headers=[(b"host", b"x")]))
    theirs.send(h11.EndOfMessage())
    theirs.receive_data(data[1:])
    try:
        end = end_of_head(data[1:])
        if not end:
            return
        head = read_head(data[1:][:end], method=method)
    except Http1Error as error:
        told(error)
        return
    try:
        event = theirs.next_event()
    except h11.RemoteProtocolError:
        assert head.status == 101, "h11 refuses it"  # which it does, for its request asks for no upgrade
        return
    assert isinstance(event, (h11.Response, h11.InformationalResponse)), event
    assert event.status_code == head.status
    framing = (b"content-length", b"transfer-encoding")
    left = [(name, value.split()) for name, value in event.headers if name not in framing]
    kept = [(name, value.split()) for name, value in head.fields if name not in framing]
    assert kept == left  # but for the blanks where a line was folded


def _check_chunks(data: bytes) -> None:
    whole, pieces = Chunks(), Chunks()
    try:
        views, rest = whole.take(memoryview(data))
    except Http1Error as error:
        told(error)
        with contextlib.suppress(Http1Error):
            for at in range(len(data)):
                pieces.take(memoryview(data[at : at + 1]))
            raise AssertionError("in pieces it is taken") from None
        return
    body = b"".join(views)
    again = b"".join(
        bytes(view) for at in range(len(data)) for view in pieces.take(memoryview(data[at : at + 1]))[0]
    )
    assert (again, pieces.ended, pieces.trailers) == (body, whole.ended, whole.trailers)
    assert not rest or whole.ended


# The gateway's file and its routes.


def fuzz_config(data: bytes) -> None:
    """The gateway's file is a GatewayConfig, or a ConfigError that names a line of it; what it routes keeps
    fuzz_routes' promise. Names to route stand behind the file, each after a zero byte."""
    file = "/dev/null/gateway.yaml"  # where no `ca` can be found
    content, *names = data.split(b"\0")
    try:
        read = config.parse(content, file)
    except ConfigError as error:
        told(error)
        assert error.file == file
        # As PyYAML counts them. An error may be at the end, where a last line would begin.
        breaks = re.findall("\r\n|[\n\r\x85\u2028\u2029]", content.decode("utf-8", "replace"))
        assert error.line is None or 1 <= error.line <= len(breaks) + 1, (
            f"line {error.line} is not in the file"
        )
        return
    assert isinstance(read, config.GatewayConfig)
    table = RouteTable(read.routes)
    for name in names[:8]:
        _check_name(table, name.decode("utf-8", "replace"))


def fuzz_routes(data: bytes) -> None:
    """A glob, a URL, an audience or a target of CONNECT is taken or refused with ValueError. A glob takes a
    host if and only if each star stands for one or more characters of a label, each ** for one or more
    labels. Any name has a Target or is refused
    with NoRouteError, and a Target differs from its templates only where these have placeholders.

    Lines: glob, tunnel URL, audience, target (none: POST), names."""
    lines = data.decode("utf-8", "replace").split("\n", 12)
    glob, url, audience, authority, *names = lines + [""] * 4
    if not (glob + url + audience + authority).isprintable():
        return  # refused where the file is read
    try:
        pattern = compile_glob(glob)
        tunnel = TunnelUrl.parse_origin(url) if authority else TunnelUrl.parse(url)
        route = Route(glob.lower(), tunnel=tunnel, token=TokenRule(Template.parse(audience)))
        if authority:
            route = replace(route, method="CONNECT", authority=read_target(authority))
    except ValueError as error:
        told(error)
        return
    Template.parse(tunnel.origin().text)
    table = RouteTable([route])
    for name in names:
        if name.isascii() and len(name) < 100 and "\n" not in name:
            taken = pattern.fullmatch(name.lower()) is not None
            assert taken == _glob_takes(glob.lower(), name.lower()), f"{glob} and {name}: {taken}"
        _check_name(table, name)


def _glob_takes(glob: str, name: str) -> bool:
    """Whether `glob` takes `name`, by trying every length of every star."""
    labels = name.split(".")
    ends = {0} if all(labels) else set()
    for pattern in glob.split("."):
        if pattern == "**":
            ends = {later for end in ends for later in range(end + 1, len(labels) + 1)}
        else:
            ends = {end + 1 for end in ends if end < len(labels) and _label_takes(pattern, labels[end])}
    return len(labels) in ends


def _label_takes(pattern: str, label: str) -> bool:
    ends = {0}
    for sign in pattern:
        if sign == "*":
            ends = {later for end in ends for later in range(end + 1, len(label) + 1)}
        else:
            ends = {end + 1 for end in ends if label[end : end + 1] == sign}
    return len(label) in ends


def _check_name(table: RouteTable, name: str) -> None:
    assert all(line.isprintable() for line in table.explain(name).split("\n"))
    destinations = [istio_sni.Destination(name, len(name), name[:20], "outbound")]
    try:
        destinations.append(istio_sni.parse(name))
    except NoRouteError as error:
        told(error)
    for destination in destinations:
        try:
            found = table.match(destination)
        except NoRouteError as error:
            told(error)
            continue
        assert table.match(destination) == found
        _check_goal(table.routes[found.route], found)


_VALUES = {
    "service": "[a-z0-9_-]{1,63}",
    "namespace": "[a-z0-9_-]{1,63}",
    "subset": "[a-z0-9_-]{1,63}",
    "port": "[0-9]{1,5}",
    "host": "[a-z0-9_.-]{1,253}",
}


def _check_goal(route: Route, goal: Target) -> None:
    if route.tunnel is None:
        assert goal.kind == "forward" and goal.dial == route.forward
        return
    url = urlsplit(goal.url)
    assert goal.kind == "tunnel" and goal.url.isascii() and goal.url.isprintable() and " " not in goal.url
    assert url.scheme == route.tunnel.scheme == goal.scheme
    assert url.username is None and url.password is None and not url.query and not url.fragment
    assert url.hostname == goal.host and (url.port or DEFAULT_PORTS[url.scheme]) == goal.port
    assert 1 <= goal.port <= 65535 and url.path == goal.path
    assert goal.dial == (route.connect or Address(goal.host, goal.port))
    filled = [(route.tunnel.host, goal.host)]
    if route.token.audience is not None:
        filled.append((route.token.audience, goal.token.value))
    if route.method == "CONNECT":
        assert not goal.path and Address.parse(goal.connect_target).port > 0
        filled.append((route.authority, goal.connect_target))
    else:
        assert not {".", ".."} & set(goal.path.split("/")) and not goal.connect_target
        assert goal.path.count("/") == route.tunnel.path.text.count("/")
        filled.append((route.tunnel.path, goal.path))
    for template, text in filled:
        literals = [re.escape(piece) for piece in template.pieces[::2]]
        values = [_VALUES[piece] for piece in template.pieces[1::2]] + [""]
        shape = "".join(literal + value for literal, value in zip(literals, values, strict=True))
        assert re.fullmatch(shape, text), f"{text!a} is no filled {template.text!a}"


# Names and addresses.


def fuzz_spiffe(data: bytes) -> None:
    """A URI is a SPIFFE ID, and says itself again, or is refused with ValueError; so is a list of patterns,
    which allows exactly what its segments say. Lines: the URI, then patterns."""
    uri, _, patterns = data.decode("utf-8", "surrogateescape").partition("\n")
    try:
        identity = spiffe.SpiffeId.parse(uri)
    except ValueError as error:
        told(error)
        identity = spiffe.SpiffeId("demo.local", "/ns/demo/sa/hello")
    else:
        assert str(identity) == uri and spiffe.SpiffeId.parse(uri) == identity
        assert re.fullmatch(r"spiffe://[a-z0-9._-]{1,255}(/[A-Za-z0-9._-]+)*", uri) and len(uri) <= 2048
    trust = TrustDomain("demo.local", ("old.local",))
    try:
        rules = PeerPolicy(split_patterns(patterns), trust=trust)
    except ValueError as error:
        told(error)
        return
    try:
        rules.check(identity)
    except DeniedError as error:
        told(error)
        allowed = False
    else:
        allowed = True
    assert allowed == any(_spiffe_takes(pattern, identity, trust) for pattern in rules.allow.patterns)
    assert allowed == any(re.fullmatch(regex, str(identity)) for regex in rules.allow.regexes())


def _spiffe_takes(pattern: str, identity: spiffe.SpiffeId, trust: TrustDomain) -> bool:
    if pattern.startswith("ns/"):
        pattern = f"spiffe://{trust.name}/{pattern}"
    _, _, domain, *wanted = pattern.split("/")
    parts = identity.path.split("/")[1:]
    if identity.trust_domain not in trust.names(domain):
        return False
    if wanted and wanted[-1] == "**":
        if len(parts) < len(wanted):
            return False
        wanted, parts = wanted[:-1], parts[: len(wanted) - 1]
    # What a pattern may have beside the star means nothing to fnmatch.
    return len(wanted) == len(parts) and all(
        fnmatch.fnmatchcase(part, glob) for glob, part in zip(wanted, parts, strict=True)
    )


def fuzz_revocations(data: bytes) -> None:
    """A file of revocation lists is read or refused with ValueError; what is read can be used without a root,
    and revokes nobody then."""
    try:
        lists = revocation_lists.parse(data)
    except ValueError as error:
        told(error)
        return
    assert lists
    asked = revocations.Revocations()
    asked.use(lists, ())
    assert asked.lists == lists and asked.uncovered == []
    for one in lists:
        assert one.issuer and one.crl.last_update_utc and len(one.serials) <= len(data)


def fuzz_certificate(data: bytes) -> None:
    """A peer's certificate proves one SPIFFE ID with a path or is refused with DeniedError; to be shown, it
    gives a list of names or ValueError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CryptographyDeprecationWarning)  # of what will be a ValueError later
        try:
            named = spiffe.ids_of(data)
        except ValueError as error:
            told(error)
            named = None
        try:
            identity = spiffe.peer_id(data)
        except DeniedError as error:
            told(error)
        else:
            assert identity.path and named == [identity]


def fuzz_address(data: bytes) -> None:
    """HOST:PORT is an Address, or ValueError; a tunnel's URL is a TunnelTarget that a URL parser takes apart
    in the same way, or UsageError; both say themselves again."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        address = Address.parse(text)
    except ValueError as error:
        told(error)
    else:
        assert Address.parse(str(address)) == address and 0 <= address.port <= 65535
        assert re.fullmatch(r"[a-z0-9_.-]{1,254}|[0-9a-f:.]+(%[A-Za-z0-9._-]+)?", address.host), address
    try:
        read = target.parse(text)
    except UsageError as error:
        told(error)
        return
    url = urlsplit(str(read))
    assert target.parse(str(read)) == read or read.address.host.endswith(".")
    assert (url.scheme, url.hostname, url.username) == (read.scheme, read.host, None)
    assert (url.port or {"https": 443, "http": 80}[url.scheme]) == read.address.port > 0
    assert url.path.startswith("/")
    assert str(read).isascii() and str(read).isprintable() and " " not in str(read)


# Tokens.

KEY = ec.derive_private_key(0x1B0E, ec.SECP256R1())
"""A key for tests, the same in each run."""

CHECKER = TokenChecker({"key": KEY.public_key()}, ["https://a.run.app"], "https://accounts.google.com")
CLAIMS = json.dumps(
    {"aud": "https://a.run.app", "sub": "1", "exp": 4_000_000_000, "iss": "https://accounts.google.com"}
).encode()


# Answers of authorities and issuers.


def fuzz_grpc(data: bytes) -> None:
    """A message is fields, which are the same when they are written again, or ValueError; a body one message
    that is framed so, or ValueError; headers a status with a bounded text.

    The first byte: 0 the rest is a message, 1 a body, 2 lines of headers, after an empty one trailers."""
    mode, content = data[0] % 3 if data else 0, data[1:]
    try:
        if mode == 0:
            found = list(fields(content))
            again = b"".join(
                integer_field(number, value) if isinstance(value, int) else bytes_field(number, value)
                for number, value in found
            )
            assert list(fields(again)) == found
        elif mode == 1:
            assert grpc_message.framed(grpc_message.unframed(content)) == content
        else:
            headers, _, trailers = content.partition(b"\n\n")
            code, text = grpc_message.status(_header_lines(headers), _header_lines(trailers) or None)
            assert code in grpc_message.CODES and len(text) <= grpc_message.MAX_STATUS_CHARS
    except ValueError as error:
        assert mode < 2
        told(error)


def _header_lines(lines: bytes) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, _, value in (line.partition(b"=") for line in lines.splitlines())]


def fuzz_jwks(data: bytes) -> None:
    """A key set is keys that check one of two kinds of signatures, or ValueError, which tells none of it."""
    try:
        keys = read_keys(data)
    except ValueError as error:
        told(error, SECRET)
        return
    assert 1 <= len(keys) <= MAX_KEYS
    assert {algorithm(key) for key in keys.values()} <= {"RS256", "ES256"}


def fuzz_bundles(data: bytes) -> None:
    """SPIFFE's map of bundles is roots by trust domain, or ConfigError; a root of it vouches for the domains
    that list it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CryptographyDeprecationWarning)
        try:
            found = bundle_map(data, "bundles.json")
        except ConfigError as error:
            told(error, SECRET)
            return
        try:
            bundles = TrustBundles(found)
        except ValueError as error:
            told(error)
            return
        for roots in found.values():
            for root in roots:
                assert bundles.domains_of(root) == {name for name in found if root in found[name]}


def _part(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def fuzz_token(data: bytes) -> None:
    """What a token says is claims or ValueError, what may be shown of it one line, what an `authorization`
    header proves its claims or TokenRejectedError, and no text tells the signature, which makes it a secret.

    The first byte: 0 the rest is the header's value, 1 the claims of a badly signed token, 2 of a well signed
    one, 3 the first part of a badly signed one."""
    mode, content = data[0] % 4 if data else 0, data[1:]
    known = '{"alg":"ES256","kid":"key"}'
    if mode == 0:
        value = content.decode("latin-1")
    elif mode == 1:
        value = f"Bearer {_part(known.encode())}.{_part(content)}.{SECRET}"
    elif mode == 2:
        value = "Bearer " + jwt.PyJWS().encode(content, KEY, "ES256", {"kid": "key"})
    else:
        value = f"Bearer {_part(content)}.{_part(CLAIMS)}.{SECRET}"
    token = value.partition(" ")[2].strip()
    secret = token.rpartition(".")[2]
    if len(secret) < 16 or value.count(secret) + (mode > 0 and secret.encode() in content) > 1:
        secret = ""  # it stands elsewhere too, where it may be told
    try:
        claims = token_claims.claims_of(token)
        assert isinstance(claims, dict)
    except ValueError as error:
        assert told(error, secret).startswith("no JWT")
    for shown in (token_claims.describe(token), token_claims.describe(value)):
        assert shown.isprintable() and shown.isascii() and len(shown) <= MAX_TEXT_CHARS
        assert not secret or secret not in shown
    try:
        proved = CHECKER.check(value)
    except TokenRejectedError as error:
        told(error, secret)
        assert error.status in (401, 403)
    else:
        audience = proved["aud"]
        assert mode in (0, 2) and int(proved["exp"]) > time.time() - 11
        assert "https://a.run.app" in ([audience] if isinstance(audience, str) else audience)


def _key_set() -> bytes:
    member = jwt.algorithms.ECAlgorithm.to_jwk(KEY.public_key(), as_dict=True)
    return json.dumps({"keys": [{**member, "kid": "1", "use": "sig", "x5c": SECRET}]}).encode()


def _bundle_map() -> bytes:
    der = (CORPUS / "certificate" / "authority").read_bytes()
    key = {"use": "x509-svid", "x5c": [base64.b64encode(der).decode()], "kid": SECRET}
    return json.dumps({"trust_domains": {"demo.local": {"keys": [key]}}}).encode()


TARGETS = {
    made.name: made
    for made in (
        FuzzTarget(fuzz_client_hello, 4096, {"http-request": b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"}),
        FuzzTarget(fuzz_session, 8192, {"no-preface": bytes(4) + b"GET / HTTP/1.1\r\n\r\n"}),
        FuzzTarget(fuzz_session_script, 1024, {"settings-only": bytes(2)}),
        FuzzTarget(fuzz_request, 6000, {"tunnel": b"2", "no-pseudo-headers": b"1a: b"}),
        FuzzTarget(
            fuzz_answer,
            4096,
            {
                "lengths": b"\0HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\nX: y\r\n z\r\n\r\n",
                "chunked": b"\0HTTP/1.0 200\nTransfer-Encoding: chunked\nConnection: close\n\n",
                "head": b"\1HTTP/1.1 404 Not Found\r\ncontent-length: 9\r\n\r\n",
                "interim": b"\0HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n",
                "chunks": b"\2005;a=b\r\nhello\r\nA\r\n0123456789\r\n0\r\nX-Sum: 1\r\n\r\nrest",
            },
        ),
        FuzzTarget(fuzz_config, 5000, {"smallest": b"routes: []\0a", "anchor": b"routes: &a [*a]"}),
        FuzzTarget(fuzz_routes, 1024, {"no-path": b"a\nhttps://a\n\n\na"}),
        FuzzTarget(
            fuzz_spiffe, 3000, {"workload": b"spiffe://demo.local/ns/a/sa/b\nspiffe://demo.local/ns/*/sa/*"}
        ),
        FuzzTarget(fuzz_certificate, 2048, {"empty-sequence": b"\x30\0"}),
        FuzzTarget(fuzz_revocations, 4096, {"empty-sequence": b"\x30\0", "pem": b"-----BEGIN X509 CRL-----"}),
        FuzzTarget(
            fuzz_address, 600, {"host-port": b"example.com.:443", "url": b"https://a.run.app/_hbone/22"}
        ),
        FuzzTarget(
            fuzz_token,
            6000,
            {"no-token": b"\0", "badly-signed": b"\1" + CLAIMS, "well-signed": b"\2" + CLAIMS},
        ),
        FuzzTarget(
            fuzz_grpc,
            2048,
            {
                "message": b"\0" + bytes_field(1, b"one") + integer_field(4, 1 << 40) + b"\x15\1\2\3\4",
                "body": b"\1" + grpc_message.framed(b"message"),
                "refused": b"\2:status=200\ncontent-type=application/grpc\n\ngrpc-status=7\ngrpc-message=a",
                "proxy": b"\2:status=503",
            },
        ),
        FuzzTarget(fuzz_jwks, 4096, {"ec": _key_set(), "none": b'{"keys": []}'}),
        FuzzTarget(fuzz_bundles, 4096, {"one": _bundle_map(), "none": b'{"trust_domains": {}}'}),
    )
}
"""Every target by name."""
