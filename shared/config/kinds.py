"""Kinds of values that a setting can have: how each is written, with its units and bounds.

A value is a word in hgate's file or in an environment variable; each kind reads it the same way in both.
`parse` raises ValueError with the reason: FormError if the text is no such value at all, BoundError if it is
one out of bounds. The reason never repeats the text, which may be a secret; a reader may add it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from shared.address import Address, check_host_name

T_co = TypeVar("T_co", covariant=True)
Word = TypeVar("Word", bound=str)

NONE = "-"
"""What an environment variable says for "none": XDS_ADDR=- is no mesh."""

# Compiled only for what is set: most starts have set next to nothing, and ssh users wait.
_DURATION = r"([0-9]{1,10}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})(ms|s|m|h)?"
_SIZE = r"([0-9]{1,15})(KiB|MiB|GiB)?"
_COUNT = r"0|[1-9][0-9]{0,17}"  # no leading zeros: YAML 1.1 reads 010 as eight
_UNIT_S = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_UNIT_BYTES = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_JWT = r"eyJ[A-Za-z0-9_-]*\."


class FormError(ValueError):
    """The text is no value of this kind."""


class BoundError(ValueError):
    """The text is a value of this kind, but one out of bounds."""


class Kind(Generic[T_co]):
    """A kind of value."""

    quoted = False
    """Whether the value in a YAML file has to be a text, so that what YAML reads as a number or a boolean
    needs quotes."""

    def parse(self, text: str) -> T_co:
        """The value that `text` says. Raises ValueError."""
        raise NotImplementedError

    def form(self) -> str:
        """How a value is written, for tables in documents."""
        raise NotImplementedError

    def show(self, value: Any) -> str:
        """The text for `value`."""
        return str(value)


class Parsed(Kind[T_co]):
    """What a function makes of the text."""

    def __init__(self, parse: Callable[[str], T_co], form: str, *, quoted: bool = False) -> None:
        self._parse = parse
        self._form = form
        self.quoted = quoted

    def parse(self, text: str) -> T_co:
        return self._parse(text)

    def form(self) -> str:
        return self._form


class Duration(Kind[float]):
    """Seconds, written as 10s, 500ms, 5m, 1h or a plain number of seconds."""

    def __init__(self, least_s: float = 0.0, most_s: float | None = None, *, off: bool = False) -> None:
        """From `least_s` to `most_s`, both included; None: no bound. With `off` it may be 0 as well."""
        self.least_s = least_s
        self.most_s = most_s
        self.off = off

    def form(self) -> str:
        least = show_duration(self.least_s)
        bounds = f"{least} or more" if self.most_s is None else f"{least} to {show_duration(self.most_s)}"
        return f"duration, {'0 or ' if self.off else ''}{bounds}"

    def parse(self, text: str) -> float:
        match = re.fullmatch(_DURATION, text)
        if match is None:
            raise FormError("must be a duration such as 10s, 500ms or 5m")
        seconds = float(match[1]) * _UNIT_S[match[2] or ""]
        if self.off and seconds == 0:
            return seconds
        if seconds < self.least_s or (self.most_s is not None and seconds > self.most_s):
            zero = "0 or " if self.off else ""
            if self.most_s is None:
                raise BoundError(f"must be {zero}{self.least_s:g}s at least")
            raise BoundError(f"must be {zero}between {self.least_s:g}s and {self.most_s:.15g}s")
        return seconds

    def show(self, value: Any) -> str:
        return show_duration(value)


def show_duration(seconds: float) -> str:
    """Seconds in the largest unit that needs no fraction."""
    if seconds == 0:
        return "0"
    for unit in ("h", "m", "s", "ms"):
        count = seconds / _UNIT_S[unit]
        if count == int(count):
            return f"{int(count)}{unit}"
    return f"{seconds:g}s"


class Size(Kind[int]):
    """Bytes, written as 64KiB, 256MiB, 1GiB or a plain number of bytes."""

    def __init__(self, least: int, most: int, *, off: bool = False) -> None:
        """From `least` to `most` bytes, both included. With `off` it may be 0 as well."""
        self.least = least
        self.most = most
        self.off = off

    def form(self) -> str:
        return f"size, {'0 or ' if self.off else ''}{show_size(self.least)} to {show_size(self.most)}"

    def parse(self, text: str) -> int:
        match = re.fullmatch(_SIZE, text)
        if match is None:
            raise FormError("must be a size such as 64KiB, 256MiB or 1GiB")
        size = int(match[1]) * _UNIT_BYTES[match[2] or ""]
        if not self.least <= size <= self.most and not (self.off and size == 0):
            raise BoundError(f"must be {'0 or ' if self.off else ''}in {self.least}..{self.most} bytes")
        return size

    def show(self, value: Any) -> str:
        return show_size(value)


def show_size(size: int) -> str:
    """Bytes in the largest unit that needs no fraction."""
    for unit in ("GiB", "MiB", "KiB"):
        if size and size % _UNIT_BYTES[unit] == 0:
            return f"{size // _UNIT_BYTES[unit]}{unit}"
    return str(size)


class Count(Kind[int]):
    """A whole number."""

    def __init__(self, least: int, most: int) -> None:
        self.least = least
        self.most = most

    def form(self) -> str:
        return f"whole number, {self.least} to {self.most}"

    def parse(self, text: str) -> int:
        if not re.fullmatch(_COUNT, text):
            raise FormError("must be a whole number")
        if not self.least <= int(text) <= self.most:
            raise BoundError(f"must be in {self.least}..{self.most}")
        return int(text)


class Number(Kind[float]):
    """A number that may have a fraction."""

    def __init__(self, least: float, most: float) -> None:
        self.least = least
        self.most = most

    def form(self) -> str:
        return f"number, {self.least:g} to {self.most:g}"

    def parse(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError as error:
            raise FormError("must be a number") from error
        if not self.least <= value <= self.most:
            raise BoundError(f"must be in {self.least:g}..{self.most:g}")
        return value


class Choice(Kind[Word]):
    """One of some words, in capitals or not."""

    def __init__(self, words: Sequence[Word]) -> None:
        self.words = words

    def form(self) -> str:
        return " or ".join(filter(None, (", ".join(self.words[:-1]), self.words[-1])))

    def parse(self, text: str) -> Word:
        for word in self.words:
            if word.lower() == text.lower():
                return word
        raise FormError(f"must be {self.form()}")


class Switch(Kind[bool]):
    """1 or 0."""

    def form(self) -> str:
        return "0 or 1"

    def parse(self, text: str) -> bool:
        if text not in ("0", "1"):
            raise FormError("must be 0 or 1")
        return text == "1"

    def show(self, value: Any) -> str:
        return "1" if value else "0"


class Text(Kind[str]):
    """Any text of one line."""

    quoted = True

    def parse(self, text: str) -> str:
        return text

    def form(self) -> str:
        return "text"


class FilePath(Kind[Path]):
    """The path of a file, which may be written later. In hgate's file it starts from that file's folder."""

    quoted = True

    def form(self) -> str:
        return "path of a file"

    def parse(self, text: str) -> Path:
        return file_path(text)


class FolderPath(Kind[Path]):
    """The path of a folder. In hgate's file it starts from that file's folder."""

    quoted = True

    def form(self) -> str:
        return "path of a folder"

    def parse(self, text: str) -> Path:
        return Path(text)


class OrNone(Kind[T_co | None]):
    """A value of another kind, or a word that means none."""

    def __init__(self, kind: Kind[T_co], word: str = NONE) -> None:
        self.kind = kind
        self.word = word
        self.quoted = kind.quoted

    def form(self) -> str:
        return f"{self.kind.form()}, or {self.word}"

    def parse(self, text: str) -> T_co | None:
        return None if text == self.word else self.kind.parse(text)

    def show(self, value: Any) -> str:
        return self.word if value is None else self.kind.show(value)


class List(Kind[tuple[T_co, ...]]):
    """Words between commas, each once: one at least."""

    def __init__(self, parse: Callable[[str], T_co], most: int, form: str) -> None:
        self._parse_each = parse
        self._most = most
        self._form = form

    def parse(self, text: str) -> tuple[T_co, ...]:
        return tuple(map(self._parse_each, words(text, self._most)))

    def form(self) -> str:
        return f"{self._form}, with commas between them"

    def show(self, value: Any) -> str:
        return ",".join(map(str, value))


def words(text: str, most: int) -> list[str]:
    """Words between commas, each once. Raises ValueError if there is none, or more than `most`."""
    found = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise ValueError("nothing but commas")
    if len(found) > most:
        raise ValueError(f"{len(found)} are more than {most}")
    return found


def file_path(text: str) -> Path:
    """A file's path. Raises ValueError for what looks like the content of a file."""
    if text.startswith("{") or re.match(_JWT, text) or not text.isprintable():
        raise ValueError("has to be a file's path; this looks like what should be in the file")
    return Path(text)


def host_name(text: str) -> str:
    """A host name, in lower case. Raises ValueError."""
    check_host_name(text)
    return text.lower()


def target(text: str, default_port: int | None = None) -> Address:
    """HOST:PORT that can be dialled; HOST alone, if there is a `default_port`. Raises ValueError."""
    if default_port is not None and ":" not in text.rpartition("]")[2]:
        text = f"{text}:{default_port}"
    address = Address.parse(text)
    if address.port == 0:
        raise ValueError("port 0 cannot be dialled")
    return address


ADDRESS: Kind[Address] = Parsed(Address.parse, "HOST:PORT")
"""To listen on: the port may be 0, any free one."""

TARGET: Kind[Address] = Parsed(target, "HOST:PORT")
"""To be dialled."""
