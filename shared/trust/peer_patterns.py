"""Patterns of SPIFFE IDs: how a rule says which peers it means. The one place that knows what a `*` is. No
I/O.

A pattern is one of:

- `spiffe://DOMAIN/SEGMENT/...`: the trust domain is literal. A lone `*` stands for exactly one path segment,
  a `*` among other characters for any number of them, none included: `demo-*`. `/**` at the end stands for
  one or more further segments.
- `ns/NAMESPACE/sa/ACCOUNT`: the same of our own trust domain, in the form that Istio's names have.
- `*`, where the caller allows it: everybody whom the roots vouch for.

Our trust domain may have aliases (`TrustDomain`): a pattern that is written for one of its names matches
peers of all of them, as with Istio's `trustDomainAliases`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shared import globs
from shared.trust.spiffe import (
    MAX_URI_BYTES,
    SCHEME,
    SEGMENT_TEXT,
    SpiffeId,
    shown,
)

MAX_STARS = 8
"""Stars in one segment; matching costs the product of their number and the name's length."""

MAX_ALIASES = 16
"""Names that a trust domain had before; each is in every pattern."""

ANY = "*"

OF_WORKLOADS = "ns/"
"""How a pattern of our own trust domain begins."""

_REST = "**"

_CHARACTER = "[A-Za-z0-9._-]"

_Glob = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class TrustDomain:
    """Our trust domain, and the names that it has beside: peers of an alias count as peers of our domain.

    Raises ValueError if a name is none, or there are aliases of nothing.
    """

    name: str = ""
    """Empty: not told, and there are no aliases."""

    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.aliases and not self.name:
            raise ValueError("aliases need the trust domain that they stand for")
        if len(self.aliases) > MAX_ALIASES:
            raise ValueError(f"{len(self.aliases)} aliases are more than {MAX_ALIASES}")
        for name in (self.name, *self.aliases):
            if name:
                SpiffeId(name, "")
            elif self.aliases:
                raise ValueError("the trust domain is empty")

    def names(self, of: str) -> tuple[str, ...]:
        """All that count as the trust domain `of`."""
        own = (self.name, *self.aliases)
        return own if self.name and of in own else (of,)


UNTOLD = TrustDomain()
"""Nobody has said which trust domain is ours."""


@dataclass(frozen=True, slots=True)
class _Pattern:
    domains: tuple[str, ...]
    segments: tuple[str, ...]
    any_rest: bool


class PeerPatterns:
    """Some patterns, compiled: which peers they match. No pattern matches nobody. Raises ValueError if one is
    malformed."""

    def __init__(
        self, patterns: Iterable[str], trust: TrustDomain | None = None, *, anybody: bool = False
    ) -> None:
        """`trust` is our own domain, with its aliases; `anybody` lets `*` be among the patterns."""
        self.patterns = tuple(patterns)
        self._anybody = anybody and ANY in self.patterns
        known = [pattern for pattern in self.patterns if not (anybody and pattern == ANY)]
        self._parsed = tuple(_parse(pattern, trust or UNTOLD) for pattern in known)
        # "(?!)" never matches: the meaning of an empty list.
        regexes = [_regex(parsed, _linear_glob) for parsed in self._parsed]
        self._any = re.compile("|".join(f"(?:{regex})" for regex in regexes) or "(?!)")

    def __repr__(self) -> str:
        return f"PeerPatterns({', '.join(self.patterns)})"

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def matches(self, identity: SpiffeId) -> bool:
        """Whether a pattern matches it."""
        return self._anybody or self._any.fullmatch(str(identity)) is not None

    def first(self, identity: SpiffeId) -> str | None:
        """The first pattern that matches it, to be shown."""
        if self._anybody:
            return ANY
        for pattern, parsed in zip(self.patterns, self._parsed, strict=True):
            if re.fullmatch(_regex(parsed, _linear_glob), str(identity)):
                return pattern
        return None

    def regexes(self) -> list[str]:
        """The patterns as regular expressions that have to match the whole URI, in the syntax that RE2 and
        Python share; for Envoy's `match_typed_subject_alt_names`."""
        return [_regex(parsed, _plain_glob) for parsed in self._parsed]

    def parts(self) -> list[tuple[tuple[str, ...], tuple[str, ...], bool]]:
        """Of each pattern its trust domains, its segments (with stars), and whether any rest may follow."""
        return [(parsed.domains, parsed.segments, parsed.any_rest) for parsed in self._parsed]


def check_pattern(text: str, trust: TrustDomain | None = None, *, anybody: bool = False) -> str:
    """Returns `text`, a pattern. Raises ValueError with the reason if it is none."""
    PeerPatterns((text,), trust, anybody=anybody)
    return text


def split_patterns(text: str) -> tuple[str, ...]:
    """Patterns separated by commas, blanks around them ignored; those of our own trust domain, which may not
    be known yet, are checked as such.

    Raises ValueError when one is malformed or there is none at all, which in a setting is a slip.
    """
    patterns = tuple(pattern.strip() for pattern in text.split(",") if pattern.strip())
    if not patterns:
        raise ValueError(f"no SPIFFE ID pattern in {shown(text)}, for example {SCHEME}demo.local/ns/*/sa/*")
    for pattern in patterns:
        _parse(pattern, TrustDomain("any.domain"))
    return patterns


def of_workloads(namespace: str, service_account: str) -> str:
    """The pattern of our own trust domain for these two globs. Raises ValueError if one is none."""
    for glob in (namespace, service_account):
        if "/" in glob:
            raise ValueError(f"{shown(glob)} is no single segment")
    return check_pattern(f"{OF_WORKLOADS}{namespace}/sa/{service_account}", TrustDomain("any.domain"))


# Reading one.


def _parse(pattern: str, trust: TrustDomain) -> _Pattern:
    if len(pattern) > MAX_URI_BYTES:
        raise ValueError(f"pattern {shown(pattern)} is longer than {MAX_URI_BYTES} bytes")
    if pattern.startswith(SCHEME):
        domain, *segments = pattern[len(SCHEME) :].split("/")
    elif pattern.startswith(OF_WORKLOADS):
        domain, segments = trust.name, pattern.split("/")
        if len(segments) != 4 or segments[2] != "sa" or "**" in segments:
            raise ValueError(f"pattern {shown(pattern)} is not of the form ns/NAMESPACE/sa/ACCOUNT")
        if not domain:
            raise ValueError(f"pattern {shown(pattern)} is of our own trust domain, which is not told")
    else:
        raise ValueError(f"pattern {shown(pattern)} does not start with {SCHEME} or {OF_WORKLOADS}")
    if "*" in domain:
        raise ValueError(f"pattern {shown(pattern)}: the trust domain has to be written out, without *")
    any_rest = bool(segments) and segments[-1] == "**"
    if any_rest:
        segments.pop()
    for segment in segments:
        if "**" in segment:
            raise ValueError(f"pattern {shown(pattern)}: ** stands only for all that follows, as the last")
        if segment.count("*") > MAX_STARS:
            raise ValueError(f"pattern {shown(pattern)}: a segment has more than {MAX_STARS} stars")
    # With the stars replaced what remains has to be a SPIFFE ID, so that no pattern is silently unmatchable.
    try:
        SpiffeId(domain, "".join(f"/{segment.replace('*', 'x')}" for segment in segments))
    except ValueError as error:
        raise ValueError(f"pattern {shown(pattern)}: {error}") from error
    return _Pattern(trust.names(domain), tuple(segments), any_rest)


# Regular expressions.


def _regex(pattern: _Pattern, glob: _Glob) -> str:
    domains = "|".join(map(_literal, pattern.domains))
    domain = f"(?:{domains})" if len(pattern.domains) > 1 else domains
    path = "".join("/" + (SEGMENT_TEXT if segment == "*" else glob(segment)) for segment in pattern.segments)
    return f"{SCHEME}{domain}{path}" + (f"(?:/{SEGMENT_TEXT})+" if pattern.any_rest else "")


def _plain_glob(segment: str) -> str:
    """For RE2, whose time is linear whatever is asked."""
    return f"{_CHARACTER}*".join(map(_literal, segment.split("*")))


def _linear_glob(segment: str) -> str:
    """For Python, whose time is linear for such patterns only."""
    return globs.pattern(segment, f"{_CHARACTER}*")


def _literal(text: str) -> str:
    """Of the characters that a SPIFFE ID may have, only the dot means something to a regular expression."""
    return text.replace(".", r"\.")


def may_overlap(some: Iterable[str], others: Iterable[str]) -> bool:
    """Whether a peer might be taken by a pattern of both lists. In doubt it might: with another trust domain,
    which may be an alias, and with any `*`."""
    rest = tuple(others)
    return any(_may_both_match(one, other) for one in some for other in rest)


def _may_both_match(one: str, other: str) -> bool:
    if ANY in (one, other):
        return True
    some, others = _path(one), _path(other)
    for a, b in zip(some, others, strict=False):
        if _REST in (a, b):
            return True
        if a != b and ANY not in a + b:
            return False
    return len(some) == len(others)


def _path(pattern: str) -> list[str]:
    """The segments behind the trust domain."""
    return (pattern.removeprefix(SCHEME).partition("/")[2] if SCHEME in pattern else pattern).split("/")
