"""What `hbone.jwt` in hgate's file can set, and the `claims` of a rule. The only I/O is reading `ca`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gateway.config.named_files import note_missing
from gateway.config.rule_settings import patterns
from gateway.config.sections import CA_FILE, Context, Structure, file_table, read_field, read_fields
from gateway.config.yaml_nodes import Value
from gateway.rules.claims import Claims, compile_claim
from shared.config.fields import Setting, setting
from shared.config.kinds import Text

MAX_AUDIENCES = 100
"""Names of one gateway; each is compared with a token's."""

MAX_CLAIMS = 32
"""Claims that one rule names: a token has fewer."""


def _audiences(value: Value, _: Context) -> tuple[str, ...]:
    return tuple(value.each(MAX_AUDIENCES, Value.text, needed="audience: who we are to the issuer"))


def _keys(value: Value, context: Context) -> str:
    text = value.text()
    if "://" not in text:
        note_missing(value, context.folder / text)
        return str(context.folder / text)
    from shared.credentials.token_sources.jwks import (
        check_url,  # brings in PyJWT, which nobody else needs here
    )

    def checked(url: str) -> str:
        check_url(url)
        return url

    return value.parsed(checked)


@dataclass(frozen=True, slots=True)
class JwtSettings:
    """All of `hbone.jwt`: whose tokens count."""

    issuer: str = setting(Text(), "", "what iss has to be, to the letter", needed="")
    audiences: tuple[str, ...] = setting(
        Structure(_audiences, "list of texts"), (), "what aud has to be, or to have one of", needed=""
    )
    keys: str = setting(
        Structure(_keys, "https URL (http on this machine), or path of a file"),
        "",
        "the issuer's JSON Web Key Set",
        needed="",
    )
    ca: Path | None = setting(
        CA_FILE, None, "certificates to trust when keys are fetched", unset="the system's"
    )


def read(value: Value, context: Context) -> JwtSettings:
    """The settings of the mapping `value`. Raises ConfigError."""
    table = file_table(JwtSettings)
    given = value.mapping(tuple(table))
    settings = JwtSettings(**read_fields(JwtSettings, given, context, {"ca": None}))
    ca = given.get("ca")
    if ca is not None and settings.keys and not settings.keys.startswith("https:"):
        ca.refuse(ca.error("has a meaning only for keys that are fetched with https"))
        return settings
    return replace(settings, ca=read_field(given, "ca", table["ca"], context.within(given)))


def _claims(value: Value, context: Context) -> Claims:
    """A rule's `claims`. Raises ConfigError."""
    if "jwt" not in context.above:
        raise value.error("needs jwt beside rules: whose tokens count")
    claims = tuple(
        (name, found.tried(_claim_patterns, ())) for name, found in value.pairs(MAX_CLAIMS).items()
    )
    if context.denies and not claims:
        raise value.error("denies with any token and without one: leave it out")
    return claims


def _claim_patterns(value: Value) -> tuple[str, ...]:
    return patterns(value, lambda item: item.parsed(_pattern))


def _pattern(text: str) -> str:
    compile_claim(text)
    return text


CLAIMS: Setting[Claims | None] = Setting(
    Structure(_claims, "mapping of claims to lists of patterns"),
    None,
    "claims that the request's token has to have",
    unset="no token is asked for",
)
