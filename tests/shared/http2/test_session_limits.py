"""What a session announces."""

from __future__ import annotations

import pytest

from shared.http2.session import Session, SessionLimits
from tests.shared.http2.dialogue import PREFACE, WINDOW, read


def test_a_client_speaks_first() -> None:
    session = Session(client=True)
    wire = bytes(session.data_to_send())
    assert wire.startswith(PREFACE)
    assert read(wire.removeprefix(PREFACE)) == [
        "SETTINGS {2: 0, 3: 250, 4: 1048576, 5: 16384, 6: 65536}",
        "WINDOW_UPDATE 0 +16711681",
    ]
    assert session.data_to_send() == b""


def test_a_server_says_the_same_without_the_clients_settings() -> None:
    limits = SessionLimits(5, 70000, 70000, WINDOW, 20000, 10000)
    session = Session(client=False, limits=limits)
    assert read(bytes(session.data_to_send())) == ["SETTINGS {3: 5, 4: 70000, 5: 20000, 6: 10000}"]


def test_a_server_that_takes_extended_connect_says_so() -> None:
    session = Session(client=False, limits=SessionLimits(extended_connect=True))
    assert read(bytes(session.data_to_send()))[0].endswith(", 8: 1}"), "RFC 8441 section 3"


def test_windows_that_a_peer_could_overrun_before_it_knows_them() -> None:
    with pytest.raises(ValueError, match="windows below 65535 bytes"):
        SessionLimits(stream_window_bytes=WINDOW - 1)
    with pytest.raises(ValueError, match="windows below 65535 bytes"):
        SessionLimits(connection_window_bytes=WINDOW - 1)
