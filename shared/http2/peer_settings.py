"""The peer's SETTINGS (RFC 9113 section 6.5.2): read, checked against their ranges, and kept as far as they
matter to us."""

from __future__ import annotations

import struct

from shared.http2 import frames
from shared.http2.frame_rules import SessionError

FIRST_WINDOW = 65535
"""Both windows before any SETTINGS or WINDOW_UPDATE (RFC 9113 section 6.9.2)."""

UNLIMITED = 1 << 31
"""Streams, or bytes of a header list, where the peer has named no limit: more than there are."""

_SETTING = struct.Struct(">HI")
_FRAME_BYTES = range(1 << 14, 1 << 24)


class PeerSettings:
    """What the peer has said, and what holds until it has."""

    __slots__ = (
        "extended_connect",
        "header_list_bytes",
        "header_table_bytes",
        "initial_window_bytes",
        "max_streams",
        "seen",
    )

    def __init__(self) -> None:
        self.header_table_bytes = 4096
        self.header_list_bytes = UNLIMITED
        self.initial_window_bytes = FIRST_WINDOW
        self.max_streams = UNLIMITED
        self.extended_connect = False
        self.seen = False
        """The first SETTINGS are in force."""

    def apply(self, payload: memoryview, *, of_server: bool) -> bool:
        """Reads the payload of SETTINGS that is no acknowledgement. True if it names the initial window.

        Raises:
            SessionError: a value out of its range; what came before it counts.
        """
        names_window = False
        for code, value in _SETTING.iter_unpack(payload):
            _check(code, value, of_server)
            if code == frames.SETTING_INITIAL_WINDOW_SIZE:
                self.initial_window_bytes = value
                names_window = True
            elif code == frames.SETTING_MAX_CONCURRENT_STREAMS:
                self.max_streams = value
            elif code == frames.SETTING_HEADER_TABLE_SIZE:
                self.header_table_bytes = value
            elif code == frames.SETTING_MAX_HEADER_LIST_SIZE:
                self.header_list_bytes = value
            elif code == frames.SETTING_ENABLE_CONNECT_PROTOCOL:
                self.extended_connect = bool(value)
        return names_window


def _check(code: int, value: int, of_server: bool) -> None:
    if code == frames.SETTING_INITIAL_WINDOW_SIZE:
        if value > frames.MAX_WINDOW:
            raise SessionError(f"an initial window of {value} bytes", frames.FLOW_CONTROL_ERROR)
    elif code == frames.SETTING_MAX_FRAME_SIZE:
        if value not in _FRAME_BYTES:
            raise SessionError(f"a maximum frame size of {value} bytes", frames.PROTOCOL_ERROR)
    elif code == frames.SETTING_ENABLE_PUSH:
        # A server has nothing to allow (RFC 9113 section 6.5.2).
        if value > (0 if of_server else 1):
            raise SessionError(f"ENABLE_PUSH {value}", frames.PROTOCOL_ERROR)
    elif code == frames.SETTING_ENABLE_CONNECT_PROTOCOL and value > 1:
        raise SessionError(f"ENABLE_CONNECT_PROTOCOL {value}", frames.PROTOCOL_ERROR)
