"""Which source a token rule means, and how many are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.rules.routes import Token
from gateway.sni import token_sources
from gateway.sni.token_sources import TokenSources
from shared.credentials.token_sources.metadata import MetadataMinter
from shared.credentials.tokens.tokens import FileToken, NoToken, TokenSource
from shared.errors import TokenError
from shared.ops.token_counts import TokenCounts
from shared.trust.token_claims import claims_of
from tests.support.metadata_server import MetadataServer
from tests.support.wall_clock import Clock, Mint


async def test_the_sources_of_tokens(tmp_path: Path) -> None:
    clock = Clock()
    counts: dict[tuple[str, str], TokenCounts] = {}
    (tmp_path / "token").write_text("opaque")
    async with MetadataServer(Mint(clock)) as server:
        sources = TokenSources(
            MetadataMinter(server.host), lambda *key: counts.setdefault(key[:2], TokenCounts()), now=clock
        )
        nothing: TokenSource = sources.of(Token("none"))
        assert isinstance(nothing, NoToken)
        minted = sources.of(Token("audience", "https://a.example"))
        assert claims_of(await minted.token() or "")["aud"] == "https://a.example"
        assert await sources.of(Token("file", str(tmp_path / "token"))).token() == "opaque"
        place = f"metadata server at {server.host}"
        assert [(told.identity, told.audience) for told in sources.statuses()] == [
            (place, "https://a.example"),
            (f"file {tmp_path}/token", ""),
        ]
        assert set(counts) == {(place, "https://a.example"), (f"file {tmp_path}/token", "")}
        assert all(each.refreshes_total == 1 for each in counts.values())
        sources.close()
        assert sources.cache.new_size == 0


async def test_a_file_for_an_audience_is_a_file_of_its_own(tmp_path: Path) -> None:
    sources = TokenSources(MetadataMinter("127.0.0.1:1"))
    one, other = Token("file", "/t", "https://a.example"), Token("file", "/t", "https://b.example")
    assert isinstance(file := sources.of(one), FileToken)
    assert sources.of(one) is file
    assert sources.of(other) is not file


async def test_files_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_sources, "MAX_TOKEN_FILES", 2)
    sources = TokenSources(MetadataMinter("127.0.0.1:1"))
    first = sources.of(Token("file", "/0"))
    for number in range(3):
        sources.of(Token("file", f"/{number}"))
    assert len(list(sources.statuses())) == 2
    assert sources.of(Token("file", "/0")) is not first, "the oldest is forgotten"


async def test_an_account_of_a_rule_has_a_minter_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_sources, "MAX_ACCOUNTS", 2)
    made: list[str] = []

    def of_account(account: str) -> MetadataMinter:
        made.append(account)
        return MetadataMinter("127.0.0.1:1")

    sources = TokenSources(MetadataMinter("127.0.0.1:1"), of_account=of_account)
    for account in ("a", "a", "", "b", "c", "b", "a"):
        sources.of(Token("audience", "https://a.example", service_account=account))
    assert made == ["a", "b", "c", "a"], "the oldest is forgotten"


async def test_nobody_gets_the_token_of_another_account() -> None:
    sources = TokenSources(MetadataMinter("127.0.0.1:1"))
    with pytest.raises(TokenError, match="no tokens of a@b: nobody is there to impersonate it"):
        sources.of(Token("audience", "https://a.example", service_account="a@b"))
