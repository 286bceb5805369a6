"""`/_hbone/`, the path below which the tunnels are: what krun says of itself, and the far ends of probes.

Whoever may open tunnels may ask. krun tells its version and the names of its targets, no addresses. The
answer to a POST comes at once, before the request's end; so a client sees whether answers pass so early.

Probes are for `hbone doctor --probe`, which measures what lies between: `POST /_hbone/?probe=KIND`, if
HBONE_PROBES allows it. Each holds what its windows hold, lives for MAX_PROBE_S and moves MAX_PROBE_BYTES at
most, and there are at most MAX_PROBES.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from http import HTTPStatus

from agent.config.settings import Settings
from shared.errors import HboneError
from shared.net.http2.answers import answer
from shared.net.legs.contract import Buffer, Leg
from shared.net.legs.stream import Stream, header_value
from shared.tunnel.tunnel_request import TUNNEL_PREFIX

MAX_PROBES = 32
"""At once: a doctor needs a handful."""

MAX_PROBE_S = 3700.0
"""A little more than the longest request timeout of Cloud Run, which is to be measured."""

MAX_PROBE_BYTES = 4 << 20

FIRST_BYTES_S = 5.0
"""How long `wait` waits for the first bytes: if they come so late, something on the way holds them."""

PROBE = "probe="
"""The query of a probe begins with it."""

ECHO, WAIT, END_FIRST = "echo", "wait", "end"

ENDED = b"ended\n"
"""What `echo` says when the request has ended."""

NOTHING = b"nothing\n"
"""What `wait` says if nothing came; else it gives back what did."""

BYE = b"bye\n"


_OWN = TUNNEL_PREFIX.encode()
_OWN_WITH_QUERY = _OWN + b"?"


def is_own(path: bytes) -> bool:
    """Whether a request's path is krun's own, and no tunnel's; asked for every stream."""
    return path == _OWN or path.startswith(_OWN_WITH_QUERY)


@functools.lru_cache(maxsize=1)
def _version() -> str:
    from shared import version  # 20 ms, once, for whoever asks

    return version.installed() or "checkout"


class OwnPath:
    """Answers the requests for it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._probes: set[_Probe] = set()

    def serve(self, stream: Stream) -> None:
        """Answers a request whose path `is_own`."""
        method = header_value(stream.headers, b":method")
        if method not in (b"GET", b"HEAD", b"POST"):
            answer(stream, HTTPStatus.METHOD_NOT_ALLOWED, "GET or POST", [(b"allow", b"GET, HEAD, POST")])
            return
        query = header_value(stream.headers, b":path").partition(b"?")[2].decode("latin-1")
        if method == b"POST" and query.startswith(PROBE):
            self._probe(stream, query.removeprefix(PROBE))
        else:
            self._tell(stream, with_body=method != b"HEAD")

    def close(self) -> None:
        """Ends all probes."""
        for probe in list(self._probes):
            probe.abort()

    def _tell(self, stream: Stream, *, with_body: bool) -> None:
        settings = self._settings
        about = {
            "krun": _version(),
            "targets": settings.target_names,
            "probes": settings.probes,
        }
        body = json.dumps(about).encode() + b"\n"
        stream.respond(
            [
                (b":status", b"200"),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"cache-control", b"no-store"),
            ]
        )
        if with_body:
            stream.write(body)
        stream.close()

    def _probe(self, stream: Stream, kind: str) -> None:
        if not self._settings.probes:
            answer(stream, HTTPStatus.FORBIDDEN, "no probes here: HBONE_PROBES=1 allows them")
        elif kind not in (ECHO, WAIT, END_FIRST):
            answer(stream, HTTPStatus.NOT_FOUND, f"no such probe; known are {ECHO}, {WAIT}, {END_FIRST}")
        elif len(self._probes) >= MAX_PROBES:
            answer(stream, HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_PROBES} probes are open")
        else:
            probe = _Probe(stream, kind, self._probes.discard)
            self._probes.add(probe)
            probe.begin()


class _Probe:
    """The far end of one probe, in place of a relay; `over(self)` is called once."""

    def __init__(self, stream: Stream, kind: str, over: Callable[[_Probe], None]) -> None:
        self._stream = stream
        self._kind = kind
        self._over = over
        self._moved = 0
        self._answered = False
        loop = asyncio.get_running_loop()
        self._end = loop.call_later(MAX_PROBE_S, self.abort)
        self._late = loop.call_later(FIRST_BYTES_S, self._nothing) if kind == WAIT else None

    def begin(self) -> None:
        """Answers, or waits for what is to come first."""
        if self._kind != WAIT:
            self._answer()
        if self._kind == END_FIRST:
            self._stream.write(BYE)
            self._stream.write_eof()
        self._stream.join(self)

    def abort(self) -> None:
        """Ends it at once."""
        self._stream.abort()
        self._finish()

    def _answer(self) -> None:
        if not self._answered:
            self._answered = True
            self._stream.respond([(b":status", b"200"), (b"content-type", b"application/octet-stream")])

    def _nothing(self) -> None:
        self._answer()
        self._stream.write(NOTHING)
        self._close()

    def _close(self) -> None:
        self._stream.close()
        self._finish()

    def _finish(self) -> None:
        self._end.cancel()
        if self._late is not None:
            self._late.cancel()
        self._over(self)

    # The relay's end of a leg.

    def received(self, leg: Leg, data: Buffer) -> None:
        self._moved += len(data)
        if self._moved > MAX_PROBE_BYTES:
            self.abort()
        elif self._kind == ECHO:
            self._stream.write(data)
        elif self._kind == WAIT:
            self._answer()
            self._stream.write(data)
            self._close()

    def ended(self, leg: Leg) -> None:
        if self._kind == WAIT:
            self._nothing()
            return
        if self._kind == ECHO:
            self._stream.write(ENDED)
        self._close()

    def failed(self, leg: Leg, error: HboneError) -> None:
        self._finish()

    def full(self, leg: Leg) -> None:
        self._stream.pause_reading()

    def drained(self, leg: Leg) -> None:
        self._stream.resume_reading()
