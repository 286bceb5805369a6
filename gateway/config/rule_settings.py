"""Rules in hgate's file: who may do what, for the HBONE port and for registrations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from gateway.config.sections import Context, Structure, Table, read_field
from gateway.config.yaml_nodes import Value
from shared.config.fields import Setting
from shared.config.kinds import Choice, Kind, Parsed
from shared.trust.peer_patterns import ANY, check_pattern, of_workloads

T = TypeVar("T")

MAX_RULES = 1000
"""A tunnel is held against each, about a microsecond each, before it is refused."""

MAX_PATTERNS = 100
"""Patterns of one field of a rule."""


def patterns(value: Value, read: Callable[[Value], str]) -> tuple[str, ...]:
    """A list of patterns, each read by `read`: at least one. Raises ConfigError."""
    return tuple(value.each(MAX_PATTERNS, read, needed="pattern"))


def peers(value: Value, context: Context, *, anybody: bool) -> tuple[str, ...]:
    """Patterns of peers; of our own trust domain they may be written as `namespace` and `service_account`.
    With `anybody` one may be `*`."""

    def read(item: Value) -> str:
        if not item.is_mapping:
            return item.parsed(lambda text: check_pattern(text, context.trust, anybody=anybody))
        given = item.mapping(("namespace", "service_account"))
        namespace, account = (
            given.read(name, lambda found: found.parsed(_glob), ANY)
            for name in ("namespace", "service_account")
        )
        try:
            return check_pattern(of_workloads(namespace, account), context.trust)
        except ValueError as error:
            raise item.error(str(error)) from error

    return patterns(value, read)


def _glob(text: str) -> str:
    of_workloads(text, ANY)
    return text


def _anybody_or_peers(value: Value, context: Context) -> tuple[str, ...]:
    return peers(value, context, anybody=True)


CERTIFICATES = "They may have any of the customary names, and are read again when they change."
"""What is so with a folder of certificates."""

PEERS_FORM = "list of SPIFFE ID patterns, or of {namespace: GLOB, service_account: GLOB} in our trust domain"

FROM: Setting[tuple[str, ...]] = Setting(
    Structure(_anybody_or_peers, PEERS_FORM),
    (),
    "whom the rule is about",
    "In a pattern * is any characters but a slash, and ** any characters at its end; '*' alone is anybody.",
    needed="",
)
TRUE_OR_FALSE: Kind[bool] = Parsed(
    lambda text: Choice(("true", "false")).parse(text) == "true", "true or false"
)
DENY: Setting[bool] = Setting(
    TRUE_OR_FALSE,
    False,
    "whether the rule denies what it is about",
    unset="`false`",
)


def rules(value: Value, context: Context, table: Table, make: Callable[..., T]) -> tuple[T, ...]:
    """A list of rules, each made by `make` of the fields in `table`, in their order. Raises ConfigError."""

    def read(item: Value) -> T:
        given = item.mapping(tuple(table))
        inside = context.within(given)
        denies = read_field(given, "deny", table["deny"], inside)
        inside = replace(inside, denies=denies)
        return make(
            *(
                denies if name == "deny" else read_field(given, name, one, inside)
                for name, one in table.items()
            )
        )

    return tuple(value.each(MAX_RULES, read))
