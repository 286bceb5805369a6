"""What `hbone.jwt` in the gateway's file can set, and the `claims` of a rule.

Owned here: the fields, their bounds, and that no mistake gets past the start or a reload. How tokens are
checked is `hbone_tokens.py`'s matter, what claims mean `claims.py`'s. The only I/O is a look at `ca`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.config.named_files import ca_file, note_missing
from gateway.config.yaml_nodes import Value
from gateway.rules.claims import Claims, compile_claim

MAX_AUDIENCES = 100
"""Names of one gateway; each is compared with a token's."""

MAX_CLAIMS = 32
"""Claims that one rule names: a token has fewer."""

MAX_PATTERNS = 100
"""Of one claim, as of a rule's peers."""


@dataclass(frozen=True, slots=True)
class JwtSettings:
    """All of `hbone.jwt`: whose tokens count."""

    issuer: str
    """`issuer`: what `iss` has to be, to the letter."""

    audiences: tuple[str, ...]
    """`audiences`: what `aud` has to be, or to have one of."""

    keys: str
    """`keys`: the issuer's JSON Web Key Set, an https URL (http on this machine) or a file's path."""

    ca: Path | None = None
    """`ca`: PEM file with the certificates to trust when they are fetched; None: the system's."""


def read(value: Value, folder: Path) -> JwtSettings:
    """The settings of the mapping `value`; paths in it start from `folder`. Raises ConfigError."""
    given = value.mapping(("issuer", "audiences", "keys", "ca"))
    audiences = given.read_needed("audiences", _audiences, ())
    issuer = given.read_needed("issuer", Value.text, "")
    keys = given.read_needed("keys", lambda value: _keys(value, folder), "")
    ca = given.get("ca")
    if ca is not None and keys and not keys.startswith("https:"):
        ca.refuse(ca.error("has a meaning only for keys that are fetched with https"))
        ca = None
    return JwtSettings(
        issuer, audiences, keys, None if ca is None else ca.tried(lambda ca: ca_file(ca, folder), None)
    )


def read_claims(value: Value, *, deny: bool, has_jwt: bool) -> Claims:
    """A rule's `claims`; `has_jwt` says whether it is told whose tokens count. Raises ConfigError."""
    if not has_jwt:
        raise value.error("needs jwt beside rules: whose tokens count")
    claims = tuple(
        (name, patterns.tried(_claim_patterns, ())) for name, patterns in value.pairs(MAX_CLAIMS).items()
    )
    if deny and not claims:
        raise value.error("denies with any token and without one: leave it out")
    return claims


def _audiences(value: Value) -> tuple[str, ...]:
    audiences = tuple(value.each(MAX_AUDIENCES, Value.text))
    if not value.items(MAX_AUDIENCES):
        raise value.error("needs at least one audience: who we are to the issuer")
    return audiences


def _claim_patterns(value: Value) -> tuple[str, ...]:
    if not value.items(MAX_PATTERNS):
        raise value.error("needs at least one pattern")
    return tuple(value.each(MAX_PATTERNS, lambda item: item.parsed(_pattern)))


def _pattern(text: str) -> str:
    compile_claim(text)
    return text


def _keys(value: Value, folder: Path) -> str:
    text = value.text()
    if "://" not in text:
        note_missing(value, folder / text)
        return str(folder / text)
    from shared.credentials.token_sources.jwks import (
        check_url,  # brings in PyJWT, which nobody else needs here
    )

    def checked(url: str) -> str:
        check_url(url)
        return url

    return value.parsed(checked)
