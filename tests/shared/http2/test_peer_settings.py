"""The peer's SETTINGS."""

from __future__ import annotations

import pytest
from hyperframe.frame import SettingsFrame

from shared.http2 import frames
from shared.http2.frame_rules import SessionError
from shared.http2.peer_settings import UNLIMITED, PeerSettings
from tests.shared.http2.dialogue import Dialogue, settings


def taken(*values: tuple[int, int], of_server: bool = False) -> tuple[PeerSettings, bool]:
    """What is kept of SETTINGS, and whether they name the window."""
    kept = PeerSettings()
    body = b"".join(frames.settings({code: value})[9:] for code, value in values)
    return kept, kept.apply(memoryview(body), of_server=of_server)


def test_what_holds_until_something_is_said() -> None:
    kept, names_window = taken()
    assert (kept.initial_window_bytes, kept.header_table_bytes) == (65535, 4096)
    assert kept.max_streams >= 2**31
    assert not kept.extended_connect
    assert not names_window


def test_what_is_kept() -> None:
    kept, names_window = taken((3, 7), (1, 100), (4, 2**31 - 1), (0xFF, 1))
    assert (kept.max_streams, kept.header_table_bytes, kept.initial_window_bytes) == (7, 100, 2**31 - 1)
    assert names_window


def test_the_size_of_a_header_list() -> None:
    assert taken((6, 8192))[0].header_list_bytes == 8192
    assert taken((1, 0))[0].header_list_bytes == UNLIMITED


def test_extended_connect() -> None:
    assert taken((8, 1))[0].extended_connect
    assert not taken((8, 0))[0].extended_connect


def test_the_last_of_several_holds() -> None:
    assert taken((3, 7), (3, 8))[0].max_streams == 8


@pytest.mark.parametrize(
    "value", [(5, 16384), (5, 2**24 - 1), (2, 0), (2, 1), (6, 0), (8, 0), (8, 1), (3, 0)]
)
def test_values_in_range(value: tuple[int, int]) -> None:
    taken(value)


@pytest.mark.parametrize("value", [(5, 16383), (5, 2**24), (2, 2), (8, 2), (4, 2**31)])
def test_values_out_of_range_even_where_a_later_one_is_right(value: tuple[int, int]) -> None:
    with pytest.raises(SessionError) as caught:
        taken(value, (value[0], 0 if value[0] != 5 else 16384))
    assert caught.value.code == (frames.FLOW_CONTROL_ERROR if value[0] == 4 else frames.PROTOCOL_ERROR)


def test_a_server_has_no_push_to_allow() -> None:
    taken((2, 0), of_server=True)
    with pytest.raises(SessionError, match="ENABLE_PUSH 1"):
        taken((2, 1), of_server=True)


def test_a_window_that_no_stream_waits_for() -> None:
    assert Dialogue.server().received(settings({SettingsFrame.INITIAL_WINDOW_SIZE: 70_000})) == [
        ("settings",)
    ]
