"""Sections of hgate's file, read by their tables of settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gateway.config.named_files import check_ca_file, later_file
from gateway.config.yaml_nodes import Fields, Value
from shared.address import Address
from shared.config.fields import Setting, file_name, table_of
from shared.config.kinds import ADDRESS, FilePath, FolderPath, Kind
from shared.trust.peer_patterns import UNTOLD, TrustDomain

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Table = Mapping[str, Setting[Any]]
"""The settings of a section by their names in the file."""


MAX_LISTENERS = 16
"""Addresses in `listen`; each is a socket for as long as the process runs."""


@dataclass(frozen=True, slots=True)
class Context:
    """What values are read with."""

    folder: Path = Path()
    """Where paths start from: the folder of the file."""

    trust: TrustDomain = UNTOLD
    """Our trust domain and its aliases."""

    beside: frozenset[str] = frozenset()
    """The fields of the section that is being read, those with a mistake included."""

    above: frozenset[str] = frozenset()
    """Those of the section that this one is in."""

    denies: bool = False
    """Whether the rule that is being read denies what it is about."""

    good_cas: set[Path] = field(default_factory=set)
    """CA files that are known to hold certificates: many routes share one, and reading a system's bundle
    takes 10 ms each time."""

    def within(self, given: Fields) -> Context:
        """For the values of a section in this one, whose fields are `given`."""
        return replace(self, beside=frozenset(given.values) | given.failed, above=self.beside)


class Structure(Kind[T_co]):
    """A value of more than a word: a list, a section, or either a word or one of these."""

    def __init__(
        self,
        read: Callable[[Value, Context], T_co],
        form: str,
        inner: Table | None = None,
        *,
        each: bool = False,
    ) -> None:
        """`read` makes the value and raises ConfigError. `inner` has the fields of the section, or, with
        `each`, those of each entry of the list."""
        self.read = read
        self.inner = inner
        self.each = each
        self._form = form

    def form(self) -> str:
        return self._form

    def show(self, value: Any) -> str:
        return ""


class Section(Structure[T_co]):
    """A section whose fields are those of a dataclass."""

    def __init__(
        self, settings: type[T_co], read: Callable[[Value, Context], T_co], *, opens_port: bool = False
    ) -> None:
        """`opens_port` says that the section opens ports, which is done at the start only."""
        super().__init__(read, "section", file_table(settings))
        self.opens_port = opens_port


def file_table(settings: type) -> Table:
    """The settings of a dataclass that can stand in the file, by their names there."""
    return {file_name(name, one): one for name, one in table_of(settings).items() if one.in_file}


def read_section(settings: type[T], value: Value, context: Context, **more: Any) -> T:
    """The dataclass of the mapping `value`; `more` are fields of it that are no settings of the file. Raises
    ConfigError."""
    given = value.mapping(tuple(file_table(settings)))
    return settings(**read_fields(settings, given, context), **more)


def read_fields(
    settings: type, given: Fields, context: Context, known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The values of a dataclass's settings, by field, of which some may be `known` already."""
    found = dict(known or {})
    inside = context.within(given)
    for name, one in table_of(settings).items():
        if one.in_file and name not in found:
            found[name] = read_field(given, file_name(name, one), one, inside)
    return found


def read_field(given: Fields, name: str, setting: Setting[T], context: Context) -> T:
    """The value of the field `name`, in the context of its section; the default if the field is absent or has
    a mistake, which is noted."""
    if name not in given.values and setting.needed is None:
        return setting.default
    read = partial(_read, kind=setting.kind, context=context)
    if setting.needed is not None:
        return given.read_needed(name, read, setting.default, setting.needed)
    return given.read(name, read, setting.default)


def addresses(value: Value, _: Context) -> tuple[Address, ...]:
    """A list of addresses to listen on, at least one and none twice. Raises ConfigError."""
    found: list[Address] = []

    def read(item: Value) -> None:
        address = item.of(ADDRESS)
        if address.port and address in found:
            raise item.error(f"{address} stands in the list twice")
        found.append(address)

    value.each(MAX_LISTENERS, read, needed="address")
    return tuple(found)


def _ca_file(value: Value, context: Context) -> Path:
    path = context.folder / value.text()
    if path not in context.good_cas:
        check_ca_file(value, path)
        context.good_cas.add(path)
    return path


CA_FILE = Structure(_ca_file, "path of a PEM file")
"""A file with certificates to trust, which has to be there."""


def _read(value: Value, kind: Kind[Any], context: Context) -> Any:
    if isinstance(kind, Structure):
        return kind.read(value, context)
    if isinstance(kind, FilePath):
        return later_file(value, context.folder)
    if isinstance(kind, FolderPath):
        return context.folder / value.of(kind)
    return value.of(kind)


LISTEN = Structure(addresses, f"list of HOST:PORT, {MAX_LISTENERS} at most")
