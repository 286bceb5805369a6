"""Which source a token rule means, and how many are kept."""

from __future__ import annotations

import pytest

from gateway.routes import Token
from gateway.token_sources import MAX_TOKEN_SOURCES, TokenSources
from shared.errors import UsageError
from shared.identity.tokens import FileToken, MetadataToken, NoToken


async def test_the_sources_of_tokens() -> None:
    sources = TokenSources("127.0.0.1:1")
    audience = Token("audience", "https://a.example")
    assert isinstance(sources.of(Token("none")), NoToken)
    assert isinstance(sources.of(Token("file", "/nonexistent")), FileToken)
    assert isinstance(source := sources.of(audience), MetadataToken)
    assert sources.of(audience) is source
    for number in range(MAX_TOKEN_SOURCES):
        sources.of(Token("audience", f"https://{number}.example"))
    assert sources.of(audience) is not source, "the oldest is forgotten"


def test_a_metadata_host_that_is_none() -> None:
    with pytest.raises(UsageError, match="GCE_METADATA_HOST=http://metadata"):
        TokenSources("http://metadata")
