"""Where each of krun's settings comes from: what `krun explain` prints, and the admin port shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from agent.config.layers import PROCESS, Layers
from agent.config.mount_settings import MountSettings, is_reference
from agent.config.settings import PORT_PREFIX, groups
from shared.config.fields import Environment, Setting, table_of

SHOWN_CHARS = 100
"""Of a value; roots in PEM are longer."""

HIDDEN = "(set)"
"""Instead of a value that may be a secret."""


@dataclass(frozen=True, slots=True)
class Explained:
    """One setting."""

    group: str
    """What it is about."""
    variable: str
    value: str
    """As it is written; of one that is not set the default, in words if that is no value."""
    origin: str
    """The name of a layer, or `default`."""


def explained(layers: Layers) -> list[Explained]:
    """All settings, as `layers` have them, then the app's variables that are references."""
    told = layers.merged()
    rows = [
        Explained(group, name, _shown(one, value), layers.origin(name))
        for group, settings in groups().items()
        for one in settings
        for name, value in _variables(one, told)
    ]
    return rows + _references(layers)


def table(rows: list[Explained]) -> str:
    """The rows as text for a person: by group, in columns."""
    widths = [max(len(getattr(row, column)) for row in rows) for column in ("variable", "origin")]
    lines: list[str] = []
    for number, row in enumerate(rows):
        if not number or rows[number - 1].group != row.group:
            lines += [*([""] if lines else []), row.group]
        lines.append(f"  {row.variable:<{widths[0]}}  {row.origin:<{widths[1]}}  {row.value}".rstrip())
    return "\n".join(lines)


def _references(layers: Layers) -> list[Explained]:
    """What each is that krun would resolve, without its text, which is a value of the app's."""
    own = next((layer.values for layer in layers.layers if layer.name == PROCESS), {})
    found = {name: value for name, value in sorted(own.items()) if is_reference(value)}
    if not found or not Environment(layers.merged())(table_of(MountSettings)["references"]):
        return []
    from agent.config import references

    def shown(value: str) -> str:
        try:
            return str(references.parse(value))
        except ValueError as error:
            return f"malformed reference: {error}"

    return [Explained("The app's variables", name, shown(value), PROCESS) for name, value in found.items()]


def _variables(setting: Setting[Any], told: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The variables that a setting is read from, with what each says; itself if none is there."""
    if "*" not in setting.variable:
        yield setting.variable, told.get(setting.variable, "").strip()
        return
    for name, value in sorted(told.items()):
        the_app_s = setting.variable == f"{PORT_PREFIX}*" and value.strip().isdigit()
        if fnmatchcase(name, setting.variable) and value.strip() and not the_app_s:
            yield name, value.strip()


def _shown(setting: Setting[Any], value: str) -> str:
    if not value:
        return setting.default_text
    if setting.secret:
        return HIDDEN
    line = " ".join(value.split())
    return line if len(line) <= SHOWN_CHARS else f"{line[:SHOWN_CHARS]}..."
