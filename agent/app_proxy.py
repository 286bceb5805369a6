"""Ordinary requests to the service, passed on to the app as HTTP/1.1.

Cloud Run sends everything to the one port of the container, so what is no tunnel is the app's. h11 speaks
HTTP/1.1; the stream's windows and the socket's buffer are each other's back pressure. One connection per
request: on loopback that costs less than the care for stale ones.

Taken out of a request: `x-forwarded-client-cert`, which only the mTLS end may set, and the authorization that
Cloud Run has checked: `x-serverless-authorization`, or else an `authorization` with a token for Cloud Run. An
`authorization` beside `x-serverless-authorization`, or with anything else in it, is the app's own and stays
(Cloud Run, "Authenticating service-to-service").
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, cast

from shared.errors import DialError, HboneError
from shared.net.address import Address
from shared.net.answers import answer
from shared.net.dial import reason
from shared.net.legs import Buffer, Leg
from shared.net.stream import Stream
from shared.net.tcp import reset
from shared.tasks import spawn

if TYPE_CHECKING:
    import h11

log = logging.getLogger("hbone.app")

SIGNATURE_REMOVED = "SIGNATURE_REMOVED_BY_GOOGLE"
"""What Cloud Run puts in place of the signature of a token that it has checked."""

CLOUD_RUN_DOMAIN = ".run.app"

# Connection-specific fields have no meaning beyond one hop (RFC 9110 section 7.6.1, RFC 9113 section 8.2.2).
_HOP_BY_HOP = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"expect")
)
_CONSUMED = frozenset((b"x-forwarded-client-cert", b"x-serverless-authorization"))


class AppProxy:
    """Passes requests on to the app at `app`."""

    def __init__(self, app: Address, dial_timeout_s: float) -> None:
        self._app = app
        self._dial_timeout_s = dial_timeout_s

    def take(self, stream: Stream) -> None:
        """Answers a stream with the app's answer, or with 502 or 503 and the reason."""
        exchange = spawn(self._exchange(stream), name=f"request to {self._app}")
        stream.on_gone = lambda error: cast("None", exchange.cancel())  # the app need not hear of it

    async def _exchange(self, stream: Stream) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._dial_timeout_s):
                await loop.create_connection(lambda: _Exchange(stream), self._app.host, self._app.port)
        except TimeoutError:
            answer(stream, 503, f"app at {self._app}: no answer within {self._dial_timeout_s:g} s")
        except OSError as error:
            answer(stream, 503, str(DialError(f"app at {self._app}: {reason(error)}")))
        finally:
            stream.on_gone = None


class _Exchange(asyncio.Protocol):
    """One request and its response: HTTP/1.1 on one side, a stream (as its RelayEnd) on the other."""

    _transport: asyncio.Transport

    def __init__(self, stream: Stream) -> None:
        import h11  # 10 ms that a container with tunnels only need not spend at start

        self._h11 = h11
        self._stream = stream
        self._app = h11.Connection(our_role=h11.CLIENT)
        self._answered = False
        self._app_ended = False  # it has sent FIN
        self._over = False

    # The app's side: asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        try:
            self._send(request_of(self._stream))
            if self._stream.bodiless:
                self._send(self._h11.EndOfMessage())
        except self._h11.LocalProtocolError:  # its text repeats the header, which may be a token
            self._give_up(400, "a header of the request cannot be sent as HTTP/1.1")
            return
        self._stream.join(self)

    def data_received(self, data: bytes) -> None:
        self._app.receive_data(data)
        self._take_events()

    def eof_received(self) -> bool:
        self._app_ended = True
        self._app.receive_data(b"")
        self._take_events()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._give_up(502, f"the app broke off: {exc or 'connection closed'}")

    def pause_writing(self) -> None:
        self._stream.pause_reading()

    def resume_writing(self) -> None:
        self._stream.resume_reading()

    def _take_events(self) -> None:
        h11 = self._h11
        while not self._over:
            try:
                event = self._app.next_event()
            except h11.RemoteProtocolError as error:
                if self._app_ended:
                    self._give_up(502, "the app closed the connection before its answer was complete")
                else:
                    self._give_up(502, f"the app does not speak HTTP/1.1: {error}")
                return
            if event is h11.NEED_DATA or event is h11.PAUSED:
                return
            if isinstance(event, h11.Response):
                self._answered = True
                self._stream.respond(response_headers(event))
            elif isinstance(event, h11.Data):
                self._stream.write(event.data)
            elif isinstance(event, h11.EndOfMessage):
                self._finish(event)

    def _finish(self, end: h11.EndOfMessage) -> None:
        self._over = True
        trailers = [(name, value) for name, value in end.headers if name not in _HOP_BY_HOP]
        if trailers:
            self._stream.end_with_trailers(trailers)
        self._stream.close()
        self._transport.close()

    def _give_up(self, status: int, text: str) -> None:
        if self._over:
            return
        self._over = True
        if self._answered:
            log.info("response cut off: %s", text)
            self._stream.abort()
        else:
            answer(self._stream, status, text)
        self._transport.close()

    def _send(self, event: h11.Event) -> None:
        data = self._app.send(event)
        if data and not self._transport.is_closing():
            self._transport.write(data)

    # The stream's side: RelayEnd.

    def received(self, leg: Leg, data: Buffer) -> None:
        if not self._over:
            self._send(self._h11.Data(data=bytes(data)))

    def ended(self, leg: Leg) -> None:
        if not self._over and not self._stream.bodiless:
            self._send(self._h11.EndOfMessage())

    def failed(self, leg: Leg, error: HboneError) -> None:
        if not self._over:
            self._over = True
            reset(self._transport)  # half a request must not look like a whole one

    def full(self, leg: Leg) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def drained(self, leg: Leg) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()


def request_of(stream: Stream) -> h11.Request:
    """The stream's request as HTTP/1.1, without what the app must not see (RFC 9113 section 8.3.1)."""
    import h11

    pseudo = {name: value for name, value in stream.headers if name.startswith(b":")}
    fields = [(b"host", pseudo.get(b":authority", b""))] if b":authority" in pseudo else []
    # Both headers: Cloud Run looks at x-serverless-authorization only and leaves the other to the app.
    app_authorization = any(name == b"x-serverless-authorization" for name, _ in stream.headers)
    cookies: list[bytes] = []
    sized = False
    for name, value in stream.headers:
        if name.startswith(b":") or name in _HOP_BY_HOP or name in _CONSUMED:
            continue
        if name == b"authorization" and not app_authorization and checked_by_cloud_run(value):
            continue
        if name == b"host" and b":authority" in pseudo:
            continue
        if name == b"cookie":
            cookies.append(value)  # HTTP/2 may split it (RFC 9113 section 8.2.3)
            continue
        sized = sized or name == b"content-length"
        fields.append((name, value))
    if cookies:
        fields.append((b"cookie", b"; ".join(cookies)))
    if not sized and not stream.bodiless:
        fields.append((b"transfer-encoding", b"chunked"))
    fields.append((b"connection", b"close"))
    return h11.Request(method=pseudo[b":method"], target=pseudo.get(b":path", b"/"), headers=fields)


def response_headers(response: h11.Response) -> list[tuple[bytes, bytes]]:
    """An HTTP/1.1 response's status and fields as HTTP/2 has them."""
    hop_by_hop = set(_HOP_BY_HOP)
    for name, value in response.headers:
        if name == b"connection":
            hop_by_hop.update(token.strip().lower() for token in value.split(b","))
    headers = [(b":status", str(response.status_code).encode())]
    headers += [(name, value) for name, value in response.headers if name not in hop_by_hop]
    return headers


def checked_by_cloud_run(authorization: bytes) -> bool:
    """Whether the header holds a token that Cloud Run has checked: its signature was taken out, or it was
    minted for a Cloud Run URL."""
    from shared.identity.tokens import claims_of  # as with h11

    scheme, _, token = authorization.decode("latin-1").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer":
        return False
    if token.endswith("." + SIGNATURE_REMOVED):
        return True
    try:
        audience = claims_of(token).get("aud")
    except ValueError:
        return False
    return isinstance(audience, str) and audience.removesuffix("/").endswith(CLOUD_RUN_DOMAIN)
