"""Which token the flags and the environment mean, and what is said when there is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hbone import target
from hbone.token_choice import MintedToken, for_tunnel
from shared.address import Address
from shared.credentials.token_sources.metadata import MetadataMinter
from shared.credentials.tokens.tokens import FileToken, NoToken, TokenSource
from shared.errors import TokenError, UsageError
from shared.trust.token_claims import claims_of
from tests.support.metadata_server import Answer, MetadataServer, unsigned_token
from tests.support.wall_clock import Clock, Mint


def test_which_token_the_flags_mean(tmp_path: Path) -> None:
    def chosen(
        url: str, *, token_file: Path | None = None, audience: str | None = None, none: bool = False
    ) -> type:
        where = target.parse(url)
        return type(for_tunnel(where, {}, token_file=token_file, audience=audience, none=none))

    assert chosen("https://h/x") is MintedToken
    assert chosen("https://h/x", none=True) is NoToken
    assert issubclass(chosen("https://h/x", token_file=tmp_path), FileToken)
    assert chosen("http://127.0.0.1/x") is NoToken, "a local krun asks for none"
    assert chosen("http://h/x", none=True) is NoToken


# Where a token may go.

TOKEN = {"token_file": Path("token.jwt")}
FOR_A = {"audience": "a"}


@pytest.mark.parametrize("flags", [TOKEN, FOR_A, {}], ids=["--token-file", "--audience", "no flag"])
@pytest.mark.parametrize(
    ("url", "connect"),
    [
        ("http://h/x", None),
        ("http://10.0.0.1:8080/x", None),
        ("http://127.0.0.1.h.example/x", None),
        ("http://127.0.0.1/x", "10.0.0.1:80"),
        ("http://localhost/x", "h:80"),
    ],
)
def test_nothing_in_the_clear_to_another_machine(
    flags: dict[str, Any], url: str, connect: str | None
) -> None:
    with pytest.raises(UsageError, match=rf"^{re.escape(url)} .*use https, or --no-token if that is meant$"):
        for_tunnel(target.parse(url), {}, connect=Address.parse(connect) if connect else None, **flags)


@pytest.mark.parametrize("flags", [TOKEN, FOR_A], ids=["--token-file", "--audience"])
@pytest.mark.parametrize(
    ("url", "connect"),
    [
        ("https://h/x", None),
        ("https://h/x", "10.0.0.1:443"),
        ("http://127.0.0.1:8080/x", None),
        ("http://[::1]/x", None),
        ("http://localhost/x", None),
        ("http://h/x", "127.0.0.2:80"),
    ],
)
def test_a_token_over_tls_or_to_this_machine(flags: dict[str, Any], url: str, connect: str | None) -> None:
    source = for_tunnel(target.parse(url), {}, connect=Address.parse(connect) if connect else None, **flags)
    assert not isinstance(source, NoToken)


HELLO = "https://hello-123.europe-west1.run.app"
OTHER = "https://other-123.europe-west1.run.app"
GCLOUD = "32555940559.apps.googleusercontent.com"


async def sent(
    folder: Path, url: str, claims: dict[str, object] | None, audience: str | None = None
) -> str | None:
    """The token of a file that would be sent to `url`; `claims` None: one that is no JWT."""
    text = "opaque" if claims is None else unsigned_token(**claims)
    (folder / "token").write_text(text)
    token = await for_tunnel(target.parse(url), {}, token_file=folder / "token", audience=audience).token()
    assert token == text
    return token


@pytest.mark.parametrize(
    ("url", "claims"),
    [
        (f"{HELLO}/x", {"aud": HELLO}),
        (f"{HELLO}/x", {"aud": [OTHER, HELLO]}),
        (f"{HELLO}:443/x", {"aud": f"{HELLO}/path"}),
        ("https://h.example:8443/x", {"aud": "https://H.example:8443"}),
        ("https://tag---hello-123.europe-west1.run.app/x", {"aud": HELLO}),
        (f"{HELLO}/x", {"aud": GCLOUD}),
        (f"{HELLO}/x", {"sub": "somebody"}),
        (f"{HELLO}/x", None),
    ],
    ids=["host", "list", "path", "port", "traffic tag", "gcloud's", "no audience", "no JWT"],
)
async def test_a_files_token_for_the_host(tmp_path: Path, url: str, claims: dict[str, object] | None) -> None:
    assert await sent(tmp_path, url, claims)


@pytest.mark.parametrize(
    ("url", "aud"),
    [
        (f"{HELLO}/x", OTHER),
        (f"{HELLO}/x", [OTHER, "https://third.example"]),
        (f"{HELLO}/x", "my-service"),
        (f"{HELLO}/x", "https://user@hello-123.europe-west1.run.app"),
        ("https://hello.example/x", GCLOUD),
        ("https://tag---h.example/x", "https://h.example"),
        ("http://127.0.0.1:8080/x", HELLO),
        (f"{HELLO}/x", 7),
    ],
)
async def test_a_files_token_for_somebody_else(tmp_path: Path, url: str, aud: object) -> None:
    theirs = " ".join(aud) if isinstance(aud, list) else str(aud)
    ours = target.parse(url).audience
    with pytest.raises(
        TokenError,
        match=f"/token: its token is for {re.escape(theirs)}, not for {re.escape(ours)}; .*--audience",
    ) as caught:
        await sent(tmp_path, url, {"aud": aud})
    assert caught.value.reason == "audience"


async def test_an_audience_that_the_service_takes_all_the_same(tmp_path: Path) -> None:
    assert await sent(tmp_path, f"{HELLO}/x", {"aud": "my-service"}, "my-service")
    with pytest.raises(TokenError, match=f"its token cannot be sent: it is for {OTHER}, not for my-service"):
        await sent(tmp_path, f"{HELLO}/x", {"aud": OTHER}, "my-service")
    with pytest.raises(TokenError, match=r"no JWT.* so nobody knows whether it is for my-service"):
        await sent(tmp_path, f"{HELLO}/x", None, "my-service")


def test_a_token_in_the_place_of_its_file() -> None:
    with pytest.raises(UsageError, match="--token-file has to be a file's path") as caught:
        for_tunnel(target.parse("h:22"), {}, token_file=Path("eyJhbGciOi.x.x"))
    assert "eyJ" not in str(caught.value)


@pytest.mark.parametrize("audience", ["", "a\nb", "\udcff"])
def test_audiences_that_nobody_can_have(audience: str) -> None:
    with pytest.raises(UsageError, match="--audience must not be empty"):
        for_tunnel(target.parse("h:22"), {}, audience=audience)


async def test_a_new_token_each_time() -> None:
    clock = Clock()
    async with MetadataServer(Mint(clock)) as server:
        source: TokenSource = MintedToken(lambda: MetadataMinter(server.host), "a", "h", now=clock)
        assert source.token_now() is None
        first = await source.token()
        source.invalidate(first)
        assert claims_of(first or "")["aud"] == "a"
        assert await source.token() != first


async def test_what_a_person_can_do_instead() -> None:
    async with MetadataServer(lambda _: Answer(status=500)) as server:
        environ = {"GCE_METADATA_HOST": server.host}
        with pytest.raises(TokenError, match=r"--token-file FILE, or --no-token$") as caught:
            await for_tunnel(target.parse("h.example:22"), environ).token()
        assert caught.value.reason == "refused"
        with pytest.raises(TokenError, match=r"--token-file FILE$"):
            await MintedToken(lambda: MetadataMinter(server.host), "a", "h").token()


async def test_a_token_that_is_not_fit() -> None:
    clock = Clock()
    async with MetadataServer(Mint(clock, lifetime_s=-1)) as server:
        source = MintedToken(lambda: MetadataMinter(server.host), "a", "h", now=clock)
        with pytest.raises(
            TokenError, match=r"it expired 1 s ago; is the clock right\?; on your own machine"
        ):
            await source.token()
