"""What a rule asks of the token that a request shows: which claims it has to have, as globs. No I/O.

1. A pattern matches a text as it stands, case included; `*` is any number of characters, none included. Whole
   numbers, true and false are texts as JSON writes them. A list matches if one of its members does. Anything
   else (an object, null, a fraction) matches nothing.
2. A rule that allows matches a token that has all of its claims.
3. A rule that denies matches every token, except one that has another value for a claim of the rule. A claim
   that is missing, or that rule 1 cannot read, is no other value; neither is a request without a good token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from shared import globs

MAX_STARS = 8
"""Stars in one pattern; matching costs the product of their number and the claim's length."""

Claims = tuple[tuple[str, tuple[str, ...]], ...]
"""The claims of a rule: each with its name and the patterns, one of which has to match."""


class Token(Protocol):
    """The token of one request, which is checked when the first rule asks for it."""

    @property
    def is_awaited(self) -> bool:
        """Whether `prepare` has to be called before `claims`."""
        ...

    @property
    def fault(self) -> str:
        """Why `claims` has returned None."""
        ...

    @property
    def challenge(self) -> bytes:
        """The `www-authenticate` of a refusal for that (RFC 6750 section 3)."""
        ...

    def claims(self) -> Mapping[str, Any] | None:
        """The claims of a good token; None: there is no good one. Raises KeysAwaitedError."""
        ...

    async def prepare(self) -> None:
        """Waits for what `claims` needs. Raises KeysError if it cannot be had."""
        ...


class NoToken:
    """The token of a request where nobody's tokens count."""

    __slots__ = ()
    is_awaited = False
    fault = "the request carries no token"
    challenge = b"Bearer"

    def claims(self) -> None:
        return None

    async def prepare(self) -> None:
        return None


NO_TOKEN: Token = NoToken()


class ClaimPatterns:
    """The claims of one rule, compiled. Raises ValueError with the reason if a pattern is wrong."""

    __slots__ = ("_patterns",)

    def __init__(self, claims: Claims) -> None:
        self._patterns = tuple(
            (name, tuple(compile_claim(text) for text in patterns)) for name, patterns in claims
        )

    def allow(self, said: Mapping[str, Any]) -> bool:
        """Whether a rule that allows matches a token with the claims `said` (rule 2)."""
        return all(_matches(patterns, _values(said.get(name))[0]) for name, patterns in self._patterns)

    def deny(self, said: Mapping[str, Any]) -> bool:
        """Whether a rule that denies matches it (rule 3)."""
        for name, patterns in self._patterns:
            values, is_all = _values(said.get(name))
            if is_all and not _matches(patterns, values):
                return False
        return True


def compile_claim(text: str) -> re.Pattern[str]:
    """The pattern of a glob on a claim. Raises ValueError with the reason."""
    stars = text.count("*")
    if stars > MAX_STARS:
        raise ValueError(f"has {stars} stars, more than {MAX_STARS}")
    return re.compile(globs.pattern(text, ".*"), re.DOTALL)


def _matches(patterns: tuple[re.Pattern[str], ...], values: list[str]) -> bool:
    return any(pattern.fullmatch(value) for pattern in patterns for value in values)


def _values(claim: object) -> tuple[list[str], bool]:
    """The texts in a claim, and whether it has nothing else."""
    members = claim if isinstance(claim, list) else [claim]
    texts = [text for member in members if (text := _text(member)) is not None]
    return texts, len(texts) == len(members)


def _text(member: object) -> str | None:
    if isinstance(member, bool):
        return "true" if member else "false"
    if isinstance(member, int):
        return str(member)
    return member if isinstance(member, str) else None
