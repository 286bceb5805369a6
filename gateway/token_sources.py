"""The gateway's token sources: one for each token rule, shared by all tunnels that the rule counts for.

Owned here: which source a rule means, and how many are kept. How a token is had and renewed is
`shared/identity/tokens.py`'s matter, what it is asked for `upstream.py`'s.
"""

from __future__ import annotations

from pathlib import Path

from gateway.routes import Token
from shared.errors import UsageError
from shared.identity.tokens import FileToken, MetadataToken, NoToken, TokenSource

MAX_TOKEN_SOURCES = 1000
"""Audiences with a cached token. Beyond it the oldest is forgotten: it costs one more token request."""


class TokenSources:
    """One source per token rule, made when first asked for."""

    def __init__(self, metadata_host: str) -> None:
        """Raises UsageError if `metadata_host`, as in GCE_METADATA_HOST, is malformed."""
        try:
            MetadataToken("any", metadata_host)
        except ValueError as error:
            raise UsageError(f"invalid GCE_METADATA_HOST={metadata_host} ({error})") from error
        self._metadata_host = metadata_host
        self._sources: dict[Token, TokenSource] = {}

    def of(self, rule: Token) -> TokenSource:
        """The source for `rule`."""
        source = self._sources.get(rule)
        if source is None:
            if len(self._sources) >= MAX_TOKEN_SOURCES:
                del self._sources[next(iter(self._sources))]
            source = self._sources[rule] = self._make(rule)
        return source

    def _make(self, rule: Token) -> TokenSource:
        if rule.kind == "file":
            return FileToken(Path(rule.value))
        if rule.kind == "audience":
            return MetadataToken(rule.value, self._metadata_host)
        return NoToken()
