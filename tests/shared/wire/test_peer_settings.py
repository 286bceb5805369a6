"""The peer's SETTINGS."""

from __future__ import annotations

import pytest
from hyperframe.frame import SettingsFrame

from tests.shared.wire.dialogue import Dialogue, settings


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({SettingsFrame.INITIAL_WINDOW_SIZE: 2**31}, "FLOW_CONTROL_ERROR"),
        ({SettingsFrame.MAX_FRAME_SIZE: 16383}, "PROTOCOL_ERROR"),
        ({SettingsFrame.ENABLE_PUSH: 2}, "PROTOCOL_ERROR"),
    ],
)
def test_settings_out_of_range(values: dict[int, int], code: str) -> None:
    assert Dialogue.server().broke(settings(values)).startswith(code)
