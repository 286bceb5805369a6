"""A setting, declared once: where it can be set, its kind, default and bounds, what it means.

Settings are the fields of frozen dataclasses, made by `setting`; `table_of` has those of a class. Where a
field is made of several settings, each of these is a `Setting` by itself. Readers, `krun --help`, reloads and
the reference are made from the tables.

One order of precedence holds everywhere: a flag, then an environment variable, then the file, then the
default.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from shared.config.kinds import Kind
from shared.errors import UsageError

T = TypeVar("T")
D = TypeVar("D")

_USER = re.compile(r"(?<=://)[^/?#]*@")
"""The user and password of a URL, which are shown to nobody."""

SHOWN_CHARS = 60
"""How much of a wrong value an error repeats: enough to find it."""


class Setting(NamedTuple, Generic[T]):
    """One setting. `T` is the type of its value. (A dataclass would cost each start another 0.4 ms.)"""

    kind: Kind[Any]
    default: T
    help: str
    """Its meaning, in part of a line: `krun --help` shows it."""

    more: str = ""
    """What else an operator should know, in whole sentences, for the reference."""

    unset: str = ""
    """Words for documents in place of the default; empty: the default, as its kind shows it."""

    variable: str = ""
    """Its environment variable, empty if it has none."""

    name: str = ""
    """Its name in hgate's file, empty: that of the field without its unit."""

    in_file: bool = True
    """Whether it can be set in hgate's file, where its class is a section of it."""

    needed: str | None = None
    """None: the field may be left out of the file. Otherwise it has to be there, and the error about its
    absence ends with this text."""

    restart: bool = False
    """Whether a change in the file takes effect at the next start only."""

    secret: bool = False
    """Whether a wrong value is shown nowhere: a URL may have a password, and a path may be the token or key
    itself, put there by mistake."""

    @property
    def default_text(self) -> str:
        """The default in words or as it is written; empty if there is nothing to say."""
        if self.unset or self.default in (None, "", ()):
            return self.unset
        return self.kind.show(self.default)

    @property
    def line(self) -> str:
        """Its meaning with the default, for `--help`."""
        return f"{self.help} ({self.default_text})" if self.default_text else self.help


def setting(kind: Kind[T], default: D, help: str, more: str = "", **others: Any) -> T | D:
    """A dataclass's field that is a setting; the parameters are the fields of `Setting`."""
    made = Setting(kind, default, help, more, **others)
    found: D = dataclasses.field(default=default, metadata={"setting": made})
    return found


def table_of(settings: Any) -> dict[str, Setting[Any]]:
    """The settings of a dataclass, or of an instance, by field."""
    return {
        field.name: field.metadata["setting"]
        for field in dataclasses.fields(settings)
        if "setting" in field.metadata
    }


def file_name(field: str, setting: Setting[Any]) -> str:
    """What the setting of a dataclass's `field` is called in hgate's file, where values have units."""
    return setting.name or field.removesuffix("_s").removesuffix("_bytes")


class Environment:
    """Reads settings from environment variables.

    A variable that is set but empty counts as not set, for that is how manifests switch one off. A value that
    its kind refuses is a UsageError: `invalid NAME=VALUE (reason)`.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    def __call__(self, setting: Setting[T]) -> T:
        """The setting's value, or its default."""
        text = self.text(setting.variable)
        return self.parsed(setting.variable, setting.kind, text, setting.secret) if text else setting.default

    def given(self, settings: type) -> dict[str, Any]:
        """The values of those settings of a dataclass that are set, by field."""
        found = {}
        for field, one in table_of(settings).items():
            if one.variable and (text := self.text(one.variable)):
                found[field] = self.parsed(one.variable, one.kind, text, one.secret)
        return found

    def text(self, variable: str) -> str:
        """What the variable says, empty if it is not set."""
        return self.environ.get(variable, "").strip()

    def parsed(self, variable: str, kind: Kind[T], text: str, secret: bool = False) -> Any:
        """The value that `text` says. Raises UsageError."""
        try:
            return kind.parse(text)
        except ValueError as error:
            shown = "" if secret else f"={_shown(text)}"
            # Without the original where the value is a secret: its traceback may have it.
            raise UsageError(f"invalid {variable}{shown} ({error})") from (None if secret else error)


def _shown(text: str) -> str:
    text = _USER.sub("...@", text)
    cut = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
    return cut if cut.isprintable() else ascii(cut)
