"""Each response flag has a cure, and the section that it points at is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.ops.cures import CURES
from gateway.ops.page import anchor
from shared.errors import Flag

TROUBLESHOOT = (Path(__file__).parents[3] / "docs" / "troubleshoot.md").read_text()
SECTIONS = {
    anchor(title): text
    for title, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TROUBLESHOOT, re.MULTILINE | re.DOTALL)
}


@pytest.mark.parametrize("flag", Flag)
def test_every_flag_has_a_cure_with_a_section_to_read(flag: Flag) -> None:
    cure = CURES[flag]
    assert cure.section in SECTIONS
    assert re.fullmatch(r"[A-Z0-9].*\.", cure.text), "whole sentences"


@pytest.mark.parametrize(
    "flag",
    [
        *(Flag.NOT_TLS, Flag.NO_SNI, Flag.BAD_SNI, Flag.NO_ROUTE, Flag.ALPN, Flag.CONNECT, Flag.UPSTREAM),
        *(Flag.LIMIT, Flag.STOPPED, Flag.STATUS, Flag.UPSTREAM_RESET, Flag.IDLE, Flag.HALF_CLOSED),
        *(Flag.LIFETIME_RESET, Flag.OVERLOAD, Flag.DENY),
    ],
)
def test_the_section_is_about_the_flag(flag: Flag) -> None:
    assert f"`{flag}`" in SECTIONS[CURES[flag].section]
