"""The other end of an HTTP/2 connection, played step by step by the h2 library.

It shares no code with our own session, whose mistakes cannot hide here then. `Service` is a server, such as
the gateway dials; `Http2Peer.connected` a client, such as Cloud Run's front end is to krun. Every wait has a
deadline that only a failing test reaches.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import cast

import h2.config
import h2.connection
import h2.events
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame

from shared.net.legs.tcp import address_text
from shared.net.legs.tcp_end import reset
from tests.support.tcp_peer import PATIENCE_S

Fields = Iterable[tuple[bytes, bytes]]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_BYTES = 9

CONNECTION_WINDOW_BYTES = 16 << 20
"""More than a stream's, so that one stalled stream does not stop the others."""

LOST = -1
"""In place of a reset's error code: the connection was lost."""


class PeerStream:
    """One stream; the other end's headers, bytes and end as they come."""

    def __init__(self, peer: Http2Peer, number: int) -> None:
        self.number = number
        self.fields: list[tuple[bytes, bytes]] = []
        self.interim: list[list[tuple[bytes, bytes]]] = []
        """The interim responses (1xx)."""
        self.trailers: list[tuple[bytes, bytes]] | None = None
        self.data = bytearray()
        """Received and not yet taken by `read`."""
        self.frames: list[str] = []
        """The other end's frames but for WINDOW_UPDATE, each with END if it ends the stream."""
        self.ended = False
        self.reset_code: int | None = None
        self.window_held = False
        """True: what comes is not credited, so the other end runs out of window."""
        self.held_bytes = 0
        """Of what came, not credited."""
        self._peer = peer

    def __getitem__(self, name: bytes) -> bytes:
        """The value of a header; KeyError if there is none."""
        return dict(self.fields)[name]

    @property
    def peer(self) -> Http2Peer:
        """The connection that carries it."""
        return self._peer

    # What comes in.

    async def status(self) -> int:
        """Client: the response's status, once its headers are there."""
        await self._peer.until(lambda: bool(self.fields) or self.reset_code is not None)
        assert self.reset_code is None, f"reset with {self.reset_code} instead of a response"
        return int(self[b":status"])

    async def read(self, count: int) -> bytes:
        """Exactly `count` bytes."""
        await self._peer.until(lambda: len(self.data) >= count or self.ended or self.reset_code is not None)
        assert len(self.data) >= count, f"only {len(self.data)} of {count} bytes; {self}"
        taken = bytes(self.data[:count])
        del self.data[:count]
        return taken

    async def some(self) -> bytes:
        """What has come, one byte at least; b"" at the end. Raises ConnectionResetError."""
        await self._peer.until_any(lambda: bool(self.data) or self.ended or self.reset_code is not None)
        if not (self.data or self.ended):
            raise ConnectionResetError(f"stream reset: {self.reset_code}")
        taken = bytes(self.data)
        self.data.clear()
        return taken

    async def rest(self) -> bytes:
        """Everything up to END_STREAM."""
        await self._peer.until(lambda: self.ended or self.reset_code is not None)
        assert self.ended, f"reset instead of an end; {self}"
        taken = bytes(self.data)
        self.data.clear()
        return taken

    async def broken(self) -> int:
        """The error code of the RST_STREAM, or LOST."""
        await self._peer.until(lambda: self.reset_code is not None)
        return cast("int", self.reset_code)

    def release_window(self) -> None:
        """Credits what was held, and from now on everything."""
        self.window_held = False
        held, self.held_bytes = self.held_bytes, 0
        self._peer.credit(self, held)

    # What goes out.

    def respond(self, status: int, fields: Fields = (), *, end: bool = False) -> None:
        """Server: response headers, interim ones too."""
        headers = [(b":status", str(status).encode()), *fields]
        self._peer.act(lambda h2: h2.send_headers(self.number, headers, end_stream=end))

    async def send(self, data: bytes) -> None:
        """Sends `data`, and waits where a window is closed."""
        peer = self._peer
        view = memoryview(data)
        while view:
            await peer.until(lambda: peer.window(self) > 0)
            count = min(peer.window(self), len(view))
            peer.act(lambda h2, part=view[:count]: h2.send_data(self.number, part))  # type: ignore[misc]  # lambda's default
            view = view[count:]

    async def fill(self) -> int:
        """Sends until the other end, whose reader does not read, gives no window any more; how many bytes."""
        count = 0
        while True:
            await self._peer.answered()
            if not self._peer.window(self):
                return count
            while room := self._peer.window(self):
                await self.send(bytes(room))
                count += room

    def end(self, trailers: Fields = ()) -> None:
        """Sends END_STREAM, on trailers if there are some."""
        fields = list(trailers)
        if fields:
            self._peer.act(lambda h2: h2.send_headers(self.number, fields, end_stream=True))
        else:
            self._peer.act(lambda h2: h2.end_stream(self.number))

    def reset(self, code: int) -> None:
        """Sends RST_STREAM."""
        self._peer.act(lambda h2: h2.reset_stream(self.number, code))

    def __repr__(self) -> str:
        return f"stream {self.number}: ended {self.ended}, reset {self.reset_code}, {bytes(self.data[:80])!r}"


class Http2Peer(asyncio.Protocol):
    """One connection. `opened` is called once it stands, `requested` with each stream of the other end's."""

    _transport: asyncio.Transport

    def __init__(
        self,
        *,
        client: bool,
        opened: Callable[[Http2Peer], None] | None = None,
        requested: Callable[[PeerStream], None] | None = None,
        extended_connect: bool = False,
        settings: Mapping[SettingCodes, int] | None = None,
        window_bytes: int = CONNECTION_WINDOW_BYTES,
    ) -> None:
        """A server may offer extended CONNECT (RFC 8441). `settings` are announced beside h2's own, and
        `window_bytes` more than the first window of the connection."""
        self.goaway = False
        """The other end has said GOAWAY."""
        self.lost = False
        self.pings = 0
        """PINGs of the other end, which h2 has answered."""
        self.pings_answered = 0
        """PINGs of ours that the other end has answered."""
        self._opened = opened
        self._requested = requested
        self._streams: dict[int, PeerStream] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._pings_sent = 0
        self._unread = bytearray()
        self._preface = not client
        self._h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                client_side=client,
                header_encoding=None,
                # Tests send what a browser would not.
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self._window_bytes = window_bytes
        announced = dict(settings or {})
        if extended_connect:
            announced[SettingCodes.ENABLE_CONNECT_PROTOCOL] = 1
        if announced:
            self._h2.local_settings = Settings(client=client, initial_values=announced)
            self._h2.max_inbound_frame_size = self._h2.local_settings.max_frame_size

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, port: int, tls: ssl.SSLContext | None = None, name: str = ""
    ) -> AsyncIterator[Http2Peer]:
        """A client of a loopback port, h2c with prior knowledge or with `tls`, by which the server has this
        `name`, if any, until the block ends."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE_S):
            _, peer = await loop.create_connection(
                lambda: cls(client=True), "127.0.0.1", port, ssl=tls, server_hostname=name if tls else None
            )
        try:
            yield peer
        finally:
            await peer.close()

    @property
    def tls(self) -> ssl.SSLObject:
        """The connection's TLS."""
        return cast("ssl.SSLObject", self._transport.get_extra_info("ssl_object"))

    @property
    def local_address(self) -> str:
        """Our end as HOST:PORT: what the other end logs."""
        return address_text(self._transport.get_extra_info("sockname"))

    def pause(self) -> None:
        """Reads nothing any more, as a peer that has gone without a word."""
        self._transport.pause_reading()

    def resume(self) -> None:
        """Undoes `pause`."""
        self._transport.resume_reading()

    @property
    def takes_extended_connect(self) -> bool:
        """Client: the other end's SETTINGS say so (RFC 8441)."""
        return bool(self._h2.remote_settings.enable_connect_protocol)

    def websocket(self, path: bytes, fields: Fields = (), *, protocol: bytes = b"websocket") -> PeerStream:
        """Client: opens a stream by extended CONNECT (RFC 8441)."""
        pseudo = [(b":protocol", protocol), (b":scheme", b"https"), (b":path", path)]
        return self.request(b"CONNECT", b"", [*pseudo, *fields])

    def request(
        self, method: bytes, path: bytes, fields: Fields = (), *, end: bool = False, authority: bytes = b"app"
    ) -> PeerStream:
        """Client: opens a stream; `end` says that no body follows."""
        number = self._h2.get_next_available_stream_id()
        stream = self._streams[number] = PeerStream(self, number)
        headers = [(b":method", method), (b":authority", authority)]
        if method != b"CONNECT":
            headers += [(b":scheme", b"https"), (b":path", path)]
        self.act(lambda h2: h2.send_headers(number, [*headers, *fields], end_stream=end))
        return stream

    def say_goaway(self, last_stream_id: int) -> None:
        """Sends GOAWAY past h2, which would end everything."""
        self._transport.write(GoAwayFrame(last_stream_id=last_stream_id).serialize())

    def drop(self) -> None:
        """Ends the TCP connection with RST."""
        reset(self._transport)

    async def close(self) -> None:
        """Lets go of the connection."""
        self._transport.abort()
        await self.until(lambda: self.lost)

    async def answered(self) -> None:
        """Returns when the other end has dealt with everything sent so far: it answers a PING."""
        wanted = self._pings_sent = self._pings_sent + 1
        self.act(lambda h2: h2.ping(wanted.to_bytes(8, "big")))
        await self.until(lambda: self.pings_answered >= wanted or self.lost)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until `condition` holds; it is looked at whenever something has come."""
        async with asyncio.timeout(PATIENCE_S):
            await self.until_any(condition)

    async def until_any(self, condition: Callable[[], bool]) -> None:
        """Likewise, however long it takes: for what runs beside a test and is cancelled with it."""
        while not condition():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    # What streams do.

    def act(self, action: Callable[[h2.connection.H2Connection], None]) -> None:
        """Lets h2 send something."""
        action(self._h2)
        self._transport.write(self._h2.data_to_send())

    def window(self, stream: PeerStream) -> int:
        """How much may be sent in one frame now."""
        open_bytes = self._h2.local_flow_control_window(stream.number)
        return min(open_bytes, self._h2.max_outbound_frame_size)

    def window_left(self, stream: PeerStream) -> int:
        """How much may be sent before the other end gives more."""
        return self._h2.local_flow_control_window(stream.number)

    def window_given(self, stream: PeerStream) -> int:
        """How much the other end may send before we give more."""
        return self._h2.remote_flow_control_window(stream.number)

    def credit(self, stream: PeerStream, count: int) -> None:
        """Gives the window back."""
        if count and not (stream.ended or stream.reset_code is not None):
            self.act(lambda h2: h2.acknowledge_received_data(count, stream.number))

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._opened is not None:
            self._opened(self)
        self.act(lambda h2: h2.initiate_connection())
        self.act(lambda h2: h2.increment_flow_control_window(self._window_bytes))

    def data_received(self, data: bytes) -> None:
        self._unread += data
        while (size := self._whole()) > 0:
            frame = bytes(self._unread[:size])
            del self._unread[:size]
            if not self._preface and frame[3] == GoAwayFrame.type:
                self.goaway = True  # h2 would take no frame after it, but open streams go on
                continue
            is_frame = not self._preface
            self._preface = False
            for event in self._h2.receive_data(frame):
                self._take(event)
            if is_frame:
                self._note(frame)
        if not self._transport.is_closing():
            self._transport.write(self._h2.data_to_send())
        self._wake()

    def _note(self, frame: bytes) -> None:
        stream = self._streams.get(int.from_bytes(frame[5:9], "big"))
        name = {0: "DATA", 1: "HEADERS"}.get(frame[3])
        if stream is not None and name is not None:
            stream.frames.append(f"{name} END" if frame[4] & 1 else name)

    def _whole(self) -> int:
        """Bytes of the next frame, or of the client's preface; 0 if it is not whole yet."""
        payload = int.from_bytes(self._unread[:3], "big")
        size = len(PREFACE) if self._preface else FRAME_HEADER_BYTES + payload
        return size if len(self._unread) >= size else 0

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        for stream in self._streams.values():
            if stream.reset_code is None:
                stream.reset_code = LOST
        self._wake()

    def _take(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RequestReceived(stream_id=int() as number):
                stream = self._streams[number] = PeerStream(self, number)
                stream.fields = list(event.headers or ())
                if self._requested is not None:
                    self._requested(stream)
            case h2.events.ResponseReceived(stream_id=int() as number):
                self._streams[number].fields = list(event.headers or ())
            case h2.events.InformationalResponseReceived(stream_id=int() as number):
                self._streams[number].interim.append(list(event.headers or ()))
            case h2.events.TrailersReceived(stream_id=int() as number):
                self._streams[number].trailers = list(event.headers or ())
            case h2.events.DataReceived(stream_id=int() as number):
                stream = self._streams[number]
                stream.data += event.data or b""
                length = event.flow_controlled_length or 0
                if stream.window_held:
                    stream.held_bytes += length
                else:
                    self.credit(stream, length)
            case h2.events.StreamEnded(stream_id=int() as number):
                self._streams[number].ended = True
            case h2.events.StreamReset(stream_id=int() as number):
                self._streams[number].reset_code = int(event.error_code or 0)
            case h2.events.PingReceived():
                self.pings += 1
            case h2.events.PingAckReceived():
                self.pings_answered += 1

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Service:
    """A server of HTTP/2 whose requests are played one by one, in the order in which they come."""

    def __init__(self, *, extended_connect: bool = False) -> None:
        self.port = 0
        self.connections: list[Http2Peer] = []
        self._extended_connect = extended_connect
        self._requests: asyncio.Queue[PeerStream] = asyncio.Queue()
        self._listener: asyncio.Server | None = None

    async def request(self) -> PeerStream:
        """The next request."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._requests.get()

    @property
    def asked(self) -> bool:
        """Whether there is a request that nobody has taken."""
        return not self._requests.empty()

    def stop_listening(self) -> None:
        """Further connections are refused."""
        assert self._listener is not None
        self._listener.close()

    def _accept(self) -> Http2Peer:
        return Http2Peer(
            client=False,
            opened=self.connections.append,
            requested=self._requests.put_nowait,
            extended_connect=self._extended_connect,
        )

    @classmethod
    @asynccontextmanager
    async def listening(
        cls, tls: ssl.SSLContext | None = None, port: int = 0, *, extended_connect: bool = False
    ) -> AsyncIterator[Service]:
        """A service on a free loopback port, or on `port`, h2c or with `tls`, until the block ends."""
        self = cls(extended_connect=extended_connect)
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._accept, "127.0.0.1", port, ssl=tls)
        self.port = self._listener.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self._listener.close()
            for peer in self.connections:
                await peer.close()
