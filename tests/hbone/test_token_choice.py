"""Which token the flags and the environment mean, and what is said when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from hbone import target
from hbone.token_choice import MintedToken, for_tunnel
from shared.errors import TokenError, UsageError
from shared.identity.token_sources.metadata import MetadataMinter
from shared.identity.tokens import FileToken, NoToken, TokenSource, claims_of
from tests.support.metadata_server import Answer, MetadataServer
from tests.support.wall_clock import Clock, Mint


def test_which_token_the_flags_mean(tmp_path: Path) -> None:
    def chosen(
        url: str, *, token_file: Path | None = None, audience: str | None = None, none: bool = False
    ) -> type:
        where = target.parse(url)
        return type(for_tunnel(where, {}, token_file=token_file, audience=audience, none=none))

    assert chosen("https://h/x") is MintedToken
    assert chosen("https://h/x", none=True) is NoToken
    assert chosen("https://h/x", token_file=tmp_path) is FileToken
    assert chosen("http://h/x") is NoToken, "nothing would keep it secret"
    assert chosen("http://h/x", token_file=tmp_path) is FileToken, "asked for, as behind a TLS proxy"
    assert chosen("http://h/x", audience="a") is MintedToken


def test_a_metadata_host_that_is_none() -> None:
    with pytest.raises(UsageError, match=r"invalid GCE_METADATA_HOST=http://x \("):
        for_tunnel(target.parse("h:22"), {"GCE_METADATA_HOST": "http://x"})


def test_a_token_in_the_place_of_its_file() -> None:
    with pytest.raises(UsageError, match="--token-file has to be a file's path") as caught:
        for_tunnel(target.parse("h:22"), {}, token_file=Path("eyJhbGciOi.x.x"))
    assert "eyJ" not in str(caught.value)


@pytest.mark.parametrize("audience", ["", "a\nb", "\udcff"])
def test_audiences_that_nobody_can_have(audience: str) -> None:
    with pytest.raises(UsageError, match="--audience is empty, or has characters"):
        for_tunnel(target.parse("h:22"), {}, audience=audience)


async def test_a_new_token_each_time() -> None:
    clock = Clock()
    async with MetadataServer(Mint(clock)) as server:
        source: TokenSource = MintedToken(MetadataMinter(server.host), "a", now=clock)
        assert source.at_hand() is None
        first = await source.token()
        source.invalidate(first)
        assert claims_of(first or "")["aud"] == "a"
        assert await source.token() != first


async def test_what_a_person_can_do_instead() -> None:
    async with MetadataServer(lambda _: Answer(status=500)) as server:
        environ = {"GCE_METADATA_HOST": server.host}
        with pytest.raises(TokenError, match=r"--token-file FILE, or --no-token$") as caught:
            await for_tunnel(target.parse("h:22"), environ).token()
        assert caught.value.reason == "refused"
        with pytest.raises(TokenError, match=r"--token-file FILE$"):
            await MintedToken(MetadataMinter(server.host), "a").token()


async def test_a_token_that_is_not_fit() -> None:
    clock = Clock()
    async with MetadataServer(Mint(clock, lifetime_s=-1)) as server:
        source = MintedToken(MetadataMinter(server.host), "a", now=clock)
        with pytest.raises(
            TokenError, match=r"it expired 1 s ago; is the clock right\?; on your own machine"
        ):
            await source.token()
