from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.rules.templates import (
    PLACEHOLDERS,
    Template,
    TunnelUrl,
    shown,
)


@given(st.text())
def test_any_text_is_a_template_or_a_value_error(text: str) -> None:
    try:
        template = Template.parse(text)
    except ValueError:
        return
    assert set(template.pieces[1::2]) <= set(PLACEHOLDERS)
    assert template.is_fixed == (len(template.pieces) == 1)


@given(st.text())
def test_what_is_shown_of_a_name_is_short_and_visible(text: str) -> None:
    assert len(shown(text)) <= 100
    assert shown(text).isprintable()


@pytest.mark.parametrize(
    "text", ["https://a.mesh/", "a.mesh:80", "10.0.0.1", "[::1]", "", "a b", "a.mesh/?x"]
)
def test_what_nobody_registers(text: str) -> None:
    with pytest.raises(ValueError):
        TunnelUrl.parse_registered(text)
