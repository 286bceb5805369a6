"""Markdown for the reference: pages, tables, and what a setting means."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from shared.config.fields import Setting

NOTE = "<!-- Written by `make reference` from the code. Do not edit. -->"


def page(title: str, *parts: str) -> str:
    """A page with this title, of parts that each are some lines."""
    return "\n\n".join((f"# {title}", NOTE, *(part.strip() for part in parts))) + "\n"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table."""
    names = list(head)
    return "\n".join([_line(names), f"|{'---|' * len(names)}", *map(_line, rows)])


def code(text: str) -> str:
    """`text` as a word that is typed; nothing for an empty text."""
    return f"`{text}`" if text else ""


def meaning(setting: Setting[Any]) -> str:
    """What a setting means, in sentences."""
    first, blank, rest = setting.help.partition(" ")
    first = first.capitalize() if first.isalpha() and first.islower() else first
    return f"{first}{blank}{rest}. {setting.more}".strip()


def default(setting: Setting[Any]) -> str:
    """The default: the value as it is typed, or words."""
    text = setting.default_text
    return text if setting.unset else code(text)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(_plain, cells))} |"


def _plain(text: str) -> str:
    """Escapes what Markdown would take for its own; between backticks that is only the border of a cell."""
    parts = text.replace("|", "\\|").split("`")
    parts[::2] = [re.sub(r"([*_<])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)
