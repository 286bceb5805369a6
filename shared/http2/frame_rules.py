"""The form of each frame other than DATA: its length, and whether it belongs to a stream or to the connection
(RFC 9113 sections 6.2 to 6.10). A frame of a wrong form ends the connection.
"""

from __future__ import annotations

from shared.http2 import frames


class SessionError(Exception):
    """The connection is beyond repair; `code` is the GOAWAY error code (RFC 9113 section 7)."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


_PRIORITY_BYTES = 5
_SETTING_BYTES = 6
_GOAWAY_BYTES = 8

_EXACT_BYTES = {
    frames.PRIORITY: _PRIORITY_BYTES,
    frames.RST_STREAM: 4,
    frames.PING: 8,
    frames.WINDOW_UPDATE: 4,
}

_OF_THE_CONNECTION = frozenset({frames.SETTINGS, frames.PING, frames.GOAWAY})
_OF_EITHER = frames.WINDOW_UPDATE


def check(kind: int, flags: int, stream_id: int, length: int) -> None:
    """Holds a frame of a kind that RFC 9113 defines, DATA excepted, against its form. A stream error where
    the RFC has one (PRIORITY of a wrong length) is a connection error here, as section 5.4 allows: such a
    peer has lost its count of bytes.

    Raises:
        SessionError: it is malformed.
    """
    name = frames.FRAME_NAMES[kind]
    if kind in _OF_THE_CONNECTION:
        if stream_id:
            raise SessionError(f"{name} on a stream", frames.PROTOCOL_ERROR)
    elif not stream_id and kind != _OF_EITHER:
        raise SessionError(f"{name} on stream 0", frames.PROTOCOL_ERROR)
    exact = _EXACT_BYTES.get(kind)
    if exact is not None:
        if length != exact:
            raise SessionError(f"{name} of {length} bytes", frames.FRAME_SIZE_ERROR)
    elif kind == frames.SETTINGS:
        if flags & frames.FLAG_ACK and length:
            raise SessionError("SETTINGS acknowledgement with a payload", frames.FRAME_SIZE_ERROR)
        if length % _SETTING_BYTES:
            raise SessionError(f"SETTINGS of {length} bytes", frames.FRAME_SIZE_ERROR)
    elif kind == frames.GOAWAY and length < _GOAWAY_BYTES:
        raise SessionError("GOAWAY too short", frames.FRAME_SIZE_ERROR)


def field_block(flags: int, stream_id: int, payload: memoryview) -> memoryview:
    """What is left of the payload of HEADERS without padding and priority (RFC 9113 section 6.2).

    Raises:
        SessionError: they do not fit, or the stream depends on itself (RFC 7540 section 5.3.1).
    """
    begin, end = 0, len(payload)
    if flags & frames.FLAG_PADDED:
        if not end:
            raise SessionError("padded HEADERS without a pad length", frames.FRAME_SIZE_ERROR)
        begin = 1
        end -= payload[0]
    if flags & frames.FLAG_PRIORITY:
        if len(payload) < begin + _PRIORITY_BYTES:
            raise SessionError("HEADERS without the priority that they announce", frames.FRAME_SIZE_ERROR)
        depends_on(stream_id, payload[begin:])
        begin += _PRIORITY_BYTES
    if begin > end:
        raise SessionError("more padding than HEADERS", frames.PROTOCOL_ERROR)
    return payload[begin:end]


def depends_on(stream_id: int, priority: memoryview) -> None:
    """Looks at what priority there is; nothing follows from it (RFC 9113 section 5.3).

    Raises:
        SessionError: the stream depends on itself.
    """
    if int.from_bytes(priority[:4], "big") & frames.MAX_STREAM_ID == stream_id:
        raise SessionError("a stream that depends on itself", frames.PROTOCOL_ERROR)
