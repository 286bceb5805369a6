"""The path from here to a target in a service's container, hop by hop: what each check does.

One connection is made and kept; it is asked for what krun says of itself, then for the tunnel. A token goes
out only where a tunnel's would: over TLS to a server whose name is proved, or to this machine.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from shared import ports
from shared.credentials.tokens.tokens import TokenSource
from shared.doctor import answers_told, tls_faults
from shared.doctor.answers_told import Answered, answered
from shared.doctor.failures import Failed, Failure
from shared.doctor.far_text import without_secrets
from shared.doctor.hops import Hop
from shared.doctor.network_hops import addresses_of, connected, peer_of, shown
from shared.doctor.stream_bytes import StreamBytes
from shared.doctor.walk import Check, Skipped
from shared.errors import ConfigError, DeniedError, HboneError, TokenError, UnavailableError, UpstreamError
from shared.http2.events import Headers
from shared.net.dial import Origin
from shared.net.http2.connection import Connection
from shared.net.legs.stream import Stream, status_of
from shared.net.names.endpoint import Endpoint
from shared.net.tls.contexts import ALPN_H2, certificate_end, client_context
from shared.trust.token_claims import at_utc, claims_of, describe, expiry_of, shown_claim
from shared.tunnel import tunnel_request
from shared.tunnel.tunnel_request import NO_TARGET, TUNNEL_PREFIX

BODY_BYTES = 4096
"""Read of an answer: Google's error pages have 1.5 KiB."""

CLOSE_S = 0.5
"""For a far side to end what we have ended; then it is broken off."""

SETTLE_S = 1.0
"""How long a server that speaks no HTTP may take to refuse a client whose TLS handshake is done: with TLS
1.3 it judges the client only then."""

LONG_S = 86_400.0
"""More than any deadline of a caller's."""

ABOUT_PATH = TUNNEL_PREFIX
"""What krun says of itself; no tunnel can be there."""

INNER_PATH = f"{TUNNEL_PREFIX}{ports.HBONE}"
"""Where krun ends inner HBONE; one that is older than that knows no such target."""

_TOKEN_FAULTS = {"expired": Failure.TOKEN_EXPIRED, "audience": Failure.TOKEN_AUDIENCE}
"""Of a token that is there: found where it is got, told where it counts."""

_NO_TOKEN = {"refused": Failure.TOKEN_DENIED, "file": Failure.TOKEN_FILE, "garbled": Failure.TOKEN_FILE}


@dataclass(frozen=True, slots=True)
class Way:
    """What is to be walked."""

    origin: Origin
    authority: str
    path: str
    """The tunnel's path; empty: none is opened."""

    token: TokenSource
    connect_target: str = ""
    """HOST:PORT that a CONNECT asks for, of a member of the mesh; empty: POST to `path`."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds for a hop."""

    hop_s: float = 10.0
    answer_s: float = 60.0
    """For the service's first answer: an instance may have to start."""


class ServicePath:
    """A walk's state, and its checks. `way` has to be there when the first is run; `close` ends it all."""

    way: Way

    def __init__(self, deadlines: Deadlines) -> None:
        self.token: str | None = None
        self.stream: Stream | None = None
        """The tunnel, once it is open."""
        self.about: dict[str, Any] = {}
        """What krun said of itself."""
        self._deadlines = deadlines
        self._token_fault: Failed | None = None
        self._endpoints: Sequence[Endpoint] = ()
        self._socket: socket.socket | None = None
        self._tls: ssl.SSLObject | None = None
        self._connection: Connection | None = None
        self._changed = asyncio.Event()
        self._answer: Answered | None = None
        self._no_answer: Failed | None = None

    @property
    def connection(self) -> Connection:
        """The one that was made."""
        assert self._connection is not None
        return self._connection

    def checks(self) -> list[Check]:
        """The hops from CREDENTIALS to DIAL, in order."""
        hop_s, answer_s = self._deadlines.hop_s, self._deadlines.answer_s
        return [
            Check(Hop.CREDENTIALS, self._get_token, hop_s, Failure.NO_TOKEN),
            Check(Hop.DNS, self._look_up, hop_s, Failure.DNS_SILENT),
            Check(Hop.PROXY, self._pass_proxy, hop_s, Failure.PROXY_DOWN),
            Check(Hop.TCP, self._connect, hop_s, Failure.TCP_SILENT),
            Check(Hop.TLS, self._shake_hands, hop_s, Failure.TLS_SILENT),
            Check(Hop.ALPN, self._greet, hop_s, Failure.NO_HTTP2),
            # `_ask` has the deadline itself: no answer is a failure of the front end.
            Check(Hop.TOKEN, self._show_token, answer_s + hop_s, Failure.NO_ANSWER),
            Check(Hop.INGRESS, self._enter, hop_s, Failure.NO_ANSWER),
            Check(Hop.FRONT_END, self._pass_front_end, hop_s, Failure.NO_ANSWER),
            Check(Hop.HTTP2, self._send_both_ways, 2 * hop_s, Failure.HALF_DUPLEX),
            Check(Hop.KRUN, self._meet_krun, hop_s, Failure.NOT_KRUN),
            Check(Hop.DIAL, self._open_tunnel, hop_s, Failure.DIAL_FAILED),
        ]

    async def close(self) -> None:
        """Ends the tunnel and the connection, in good order: what is at the far end is not to log a fault."""
        if self._socket is not None:
            self._socket.close()
        connection = self._connection
        if connection is None:
            return
        if self.stream is not None and not self.stream.over:
            self.stream.write_eof()
        connection.drain()
        if not await connection.wait_closed(CLOSE_S):
            connection.close()
            await connection.wait_closed(CLOSE_S)

    # This machine.

    async def _get_token(self) -> str:
        """A fault of the token itself waits for its own hop: a machine without network has one first."""
        try:
            self.token = await self.way.token.token()
        except TokenError as error:
            text = without_secrets(str(error))
            fault = _TOKEN_FAULTS.get(error.reason)
            if fault is None:
                raise Failed(_NO_TOKEN.get(error.reason, Failure.NO_TOKEN), text) from error
            self._token_fault = Failed(fault, text)
            return "a token, which is no good"
        if self.token is None:
            raise Skipped("no token is sent")
        return f"a token, {describe(self.token)}"

    # The way there.

    async def _look_up(self) -> str:
        if self.way.origin.proxy is not None:
            raise Skipped("the proxy looks it up")
        address = self.way.origin.to_look_up
        self._endpoints = await addresses_of(address)
        if address.is_ip:
            raise Skipped(f"{address.host} is an address")
        return shown(address, self._endpoints)

    async def _pass_proxy(self) -> str:
        origin = self.way.origin
        if origin.proxy is None:
            raise Skipped("none is set for this host")
        from shared.net import http_proxy  # only people have one

        try:
            self._socket, status = await http_proxy.connect(origin.proxy, origin.address)
        except OSError as error:
            answered = isinstance(error, http_proxy.ProxyError) and error.status is not None
            failure = Failure.PROXY_REFUSED if answered else Failure.PROXY_DOWN
            raise Failed(failure, f"{origin.proxy}: {error}") from error
        return f"{origin.proxy} answered {status}"

    async def _connect(self) -> str:
        if self._socket is not None:
            raise Skipped("the proxy has connected")
        self._socket = await connected(self._endpoints, self.way.origin.address.port)
        return peer_of(self._socket)

    async def _shake_hands(self) -> str:
        origin, loop = self.way.origin, asyncio.get_running_loop()
        is_tls = origin.scheme == "https"
        context = self._context() if is_tls else None
        sock, self._socket = self._socket, None
        assert sock is not None
        name = origin.host if origin.identity is None else origin.identity.server_name
        try:
            transport, self._connection = await loop.create_connection(
                self._new_connection, sock=sock, ssl=context, server_hostname=name if is_tls else None
            )
        except OSError as error:
            raise tls_faults.of_server(error) from error
        if not is_tls:
            raise Skipped("http: no TLS")
        self._tls = transport.get_extra_info("ssl_object")
        return self._proof(self._tls)

    def _context(self) -> ssl.SSLContext:
        origin, now = self.way.origin, asyncio.get_running_loop().time()
        try:
            if origin.identity is None:
                return client_context(origin.ca, now)
        except (UnavailableError, ConfigError) as error:
            raise Failed(Failure.CA_FILE, str(error)) from error
        from shared.net.tls import mesh_tls

        try:
            return mesh_tls.client_context(origin.identity, now)
        except (UnavailableError, ConfigError) as error:
            raise Failed(Failure.OWN_CERTIFICATE, str(error)) from error

    def _proof(self, tls: ssl.SSLObject) -> str:
        """Who the server is; Failed if it is not who it should be."""
        origin = self.way.origin
        if origin.identity is None:
            who, ends = f"{origin.host}{_issuer(tls)}", certificate_end(tls)
        else:
            from shared.net.tls import mesh_tls

            try:
                mesh_tls.check_server(origin.identity, tls)
                who, ends = str(mesh_tls.proved_identity(tls)), mesh_tls.chain_end(tls)
            except DeniedError as error:
                raise Failed(Failure.PEER_IDENTITY, str(error)) from error
        return f"{tls.version()}, {who}, {certificate_until(ends)}"

    def _new_connection(self) -> Connection:
        return Connection(client=True, on_change=self._changed.set, on_lost=lambda _: self._changed.set())

    async def _greet(self) -> str:
        connection, origin = self.connection, self.way.origin
        if origin.scheme == "https":
            assert self._tls is not None
            if self._tls.selected_alpn_protocol() != ALPN_H2:
                raise Failed(Failure.NO_HTTP2, "the server chose no protocol of ours (ALPN h2)")
        while not connection.speaks_http2:
            if connection.lost:
                raise Failed(Failure.NO_HTTP2, connection.cause or "the server ended the connection at once")
            self._changed.clear()
            await self._changed.wait()
        streams = connection.session.peer_settings.max_streams
        how_many = "no limit" if streams >= 1 << 31 else str(streams)
        return f"HTTP/2, streams on a connection: {how_many}"

    # The service.

    async def _show_token(self) -> str:
        if self.way.connect_target:
            raise Skipped("a member of the mesh")
        if self._token_fault is not None:
            raise self._token_fault
        told = "no token" if self.token is None else self._told_of_token(self.token)
        await self._ask()
        if self._answer is None:
            raise Skipped("nobody has judged it")
        answers_told.check_believed(self._answer)
        skew_s = self._answer.skew_s
        if skew_s is not None and abs(skew_s) > answers_told.SKEW_S:
            told += f"; {answers_told.skew_text(skew_s)}"
        if self.token is None:
            raise Skipped("none is wanted")
        return told

    def _told_of_token(self, token: str) -> str:
        try:
            claims = claims_of(token)
        except ValueError:
            return "nobody but its issuer can read it"
        told = f"audience {shown_claim(claims.get('aud'))}"
        try:
            left_s = expiry_of(claims) - time.time()
        except ValueError:
            return told
        if left_s <= 0:
            raise Failed(Failure.TOKEN_EXPIRED, f"{told}, expired {-left_s:.0f} s ago")
        return f"{told}, expires in {left_s / 60:.0f} min"

    async def _ask(self) -> None:
        """Asks krun for what it says of itself, and keeps the answer, or why there is none."""
        timeout_s = self._deadlines.answer_s
        try:
            async with asyncio.timeout(timeout_s):
                self._answer = await self._request(self._headers(b"GET", ABOUT_PATH), end=True)
                if self._answer.status == HTTPStatus.UNAUTHORIZED and await self._renewed():
                    self._answer = await self._request(self._headers(b"GET", ABOUT_PATH), end=True)
        except TimeoutError:
            self._no_answer = Failed(Failure.NO_ANSWER, f"nothing within {timeout_s:g} s")
        except UpstreamError as error:
            self._no_answer = Failed(Failure.ANSWER_BROKE, str(error))

    async def _renewed(self) -> bool:
        """Whether there is another token in place of one that was refused, as one that was kept may be."""
        before, source = self.token, self.way.token
        if before is None:
            return False
        source.invalidate(before)
        try:
            self.token = await source.token()
        except TokenError:
            return False
        return self.token != before

    def _headers(self, method: bytes, path: str) -> Headers:
        way = self.way
        post = tunnel_request.post(way.origin.scheme, way.authority, path, self.token)
        return [(b":method", method), *post[1:]]

    async def _request(self, headers: Headers, *, end: bool) -> Answered:
        """A request and its answer. Without `end` the request is not ended before the answer has. Raises
        UpstreamError."""
        stream = self.connection.open(headers, end_stream=end)
        try:
            got = await _response(stream)
            body = await StreamBytes(stream, BODY_BYTES).rest()
        finally:
            stream.close()
        return answered(got, body, self.token)

    async def _enter(self) -> str:
        if self.way.connect_target or self._answer is None:
            raise Skipped("a member of the mesh" if self.way.connect_target else "nobody has judged it")
        answers_told.check_let_in(self._answer)
        return "lets this machine in"

    async def _pass_front_end(self) -> str:
        if self.way.connect_target:
            raise Skipped("a member of the mesh")
        if self._no_answer is not None:
            raise self._no_answer
        assert self._answer is not None
        answers_told.check_passed_on(self._answer)
        server = self._answer.header(b"server")
        return f"answered {self._answer.status}" + (f", by {_short(server)}" if server else "")

    # The container.

    async def _send_both_ways(self) -> str:
        """krun answers a POST to its own path at once; whoever passes on whole requests only does not."""
        if self.way.connect_target:
            raise Skipped("a member of the mesh")
        assert self._answer is not None
        if self._answer.krun is None:
            raise Skipped("only krun tells")
        headers = self._headers(b"POST", ABOUT_PATH)
        stream = self.connection.open(headers)
        try:
            async with asyncio.timeout(self._deadlines.hop_s):
                await _response(stream)
        except TimeoutError:
            stream.write_eof()
            text = f"no answer within {self._deadlines.hop_s:g} s while the request went on"
            try:
                await _response(stream)
            except UpstreamError:
                pass
            else:
                text += "; it came when the request had ended"
            raise Failed(Failure.HALF_DUPLEX, text) from None
        except UpstreamError as error:
            raise Failed(Failure.HALF_DUPLEX, str(error)) from error
        finally:
            stream.close()
        return "an answer comes before the request's end"

    async def _meet_krun(self) -> str:
        if self.way.connect_target:
            raise Skipped("a member of the mesh")
        assert self._answer is not None
        told = self._answer.krun
        if told is None:
            raise Failed(Failure.NOT_KRUN, self._answer.line)
        self.about = dict(told)
        if not told:
            return "krun, a version that does not tell which"
        targets = told.get("targets")
        known = ", ".join(map(str, targets)) if isinstance(targets, list) else "not told"
        return f"krun {_short(str(told['krun']))}, targets {_short(known)}"

    async def _open_tunnel(self) -> str:
        way = self.way
        if not way.path and not way.connect_target:
            raise Skipped(f"the URL names no target, such as {TUNNEL_PREFIX}22")
        if way.connect_target:
            headers: Headers = tunnel_request.connect(way.connect_target, self.token)
        else:
            headers = self._headers(b"POST", way.path)
        stream = self.connection.open(headers)
        try:
            got = await _response(stream)
        except UpstreamError as error:
            raise Failed(Failure.DIAL_FAILED, str(error)) from error
        if status_of(got) == 200:
            self.stream = stream
            return f"{way.connect_target or way.path} is open"
        answer = answered(got, await StreamBytes(stream, BODY_BYTES).rest(), self.token)
        stream.close()
        raise Failed(_dial_failure(answer, way), answer.line)


def _dial_failure(answer: Answered, way: Way) -> Failure:
    if way.connect_target and answer.status in (401, 403):
        return Failure.POLICY_DENIED
    if answer.status == 404:
        is_old = way.path == INNER_PATH and answer.body.startswith(NO_TARGET.encode())
        return Failure.KRUN_TOO_OLD if is_old else Failure.NO_TARGET
    if answer.status == 503 and "HBONE_MAX_" in answer.line:
        return Failure.KRUN_FULL
    if answer.status == 503 and "connection refused" in answer.line:
        return Failure.TARGET_REFUSED
    return Failure.DIAL_FAILED


async def _response(stream: Stream) -> Headers:
    """The response's headers; the caller has the deadline. Raises UpstreamError."""
    try:
        await stream.response(LONG_S)
    except HboneError as error:
        raise error if isinstance(error, UpstreamError) else UpstreamError(str(error)) from error
    return stream.headers


def _short(text: str) -> str:
    return without_secrets("".join(char for char in text if char.isprintable()))[:100]


def _issuer(tls: ssl.SSLObject) -> str:
    """Who has issued the server's certificate, for people."""
    told = (tls.getpeercert() or {}).get("issuer", ())
    names = {str(pair[0]): str(pair[1]) for part in told for pair in part if len(pair) == 2}
    name = names.get("organizationName") or names.get("commonName")
    return f" by {_short(name)}" if name else ""


def certificate_until(ends: float) -> str:
    """How long a certificate is valid, for people; `ends` is in seconds since 1970."""
    return f"certificate until {at_utc(ends)} ({_days(ends - time.time())})"


def _days(seconds: float) -> str:
    return f"{seconds / 86400:.0f} days" if seconds > 172_800 else f"{seconds / 3600:.0f} h"
