"""Rules with claims on the HBONE port: real tunnels, with tokens and keys of the stand-in's issuer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.config.jwt_settings import JwtSettings
from gateway.rules.hbone_rules import Rule, Rules
from hbone.cloudrun.metadata import KEYS_PATH, MetadataServer
from shared.address import Address
from shared.credentials.token_sources import jwks
from shared.errors import StreamResetError
from shared.http2.frames import CANCEL
from shared.tasks import running
from shared.trust.jwt_check import GOOGLE_ISSUER, Issuer
from tests.shared.net.loopback import until
from tests.support import hbone_port
from tests.support.hbone_port import CALLER, TO_LOOPBACK, HbonePort
from tests.support.http2_peer import Http2Peer, PeerStream
from tests.support.key_server import served
from tests.support.metadata_server import closed_port
from tests.support.tcp_peer import TcpServer

AUDIENCE = "https://hgate.example"
EMAIL = "me@example.com"
EXAMPLES = Rule((str(CALLER),), TO_LOOPBACK.targets, claims=(("email", ("*@example.com",)),))


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture(scope="module")
def newer() -> Issuer:
    return Issuer()


@pytest.fixture
async def port(tmp_path: Path, issuer: Issuer) -> AsyncIterator[HbonePort]:
    """With EXAMPLES, and the keys of the stand-in's metadata server."""
    metadata = MetadataServer(issuer, EMAIL)
    address = await metadata.start(Address("127.0.0.1", 0))
    try:
        async with hbone_port.serving(tmp_path, EXAMPLES, jwt=jwt(f"http://{address}{KEYS_PATH}")) as port:
            yield port
    finally:
        await metadata.close()


@pytest.fixture
async def peer(port: HbonePort) -> AsyncIterator[Http2Peer]:
    async with port.caller() as peer:
        yield peer


@asynccontextmanager
async def visited(
    folder: Path, *rules: Rule, keys: str, **settings: Any
) -> AsyncIterator[tuple[HbonePort, Http2Peer]]:
    """A port with `rules`, and the caller, who is in."""
    async with hbone_port.serving(folder, *rules, jwt=jwt(keys), **settings) as port, port.caller() as peer:
        await peer.answered()
        yield port, peer


def jwt(keys: str) -> JwtSettings:
    return JwtSettings(GOOGLE_ISSUER, (AUDIENCE,), keys)


def ask(
    peer: Http2Peer, target: TcpServer | bytes, token: str = "", name: str = "authorization"
) -> PeerStream:
    more = [(name.encode(), f"Bearer {token}".encode())] if token else []
    authority = target if isinstance(target, bytes) else b"127.0.0.1:%d" % target.port
    return peer.request(b"CONNECT", b"", more, authority=authority)


async def challenged(stream: PeerStream) -> tuple[int, str]:
    """The status of a refusal, and what it asks for."""
    status = await stream.status()
    return status, dict(stream.fields).get(b"www-authenticate", b"").decode()


@pytest.mark.parametrize("name", ["authorization", "proxy-authorization"])
async def test_a_good_token_opens_a_tunnel(
    port: HbonePort, peer: Http2Peer, target: TcpServer, issuer: Issuer, name: str
) -> None:
    token = issuer.mint(AUDIENCE, email=EMAIL)
    stream = ask(peer, target, token, name)
    there = await target.accept()
    assert await stream.status() == 200
    await stream.send(b"ping")
    assert await there.read(4) == b"ping", "and nothing of the request before it"
    assert port.value("hbone_jwt_checks_total", result="good") == 1
    assert port.value("hbone_jwt_key_fetches_total", result="success") == 1
    stream.reset(CANCEL)
    assert token not in json.dumps(await port.line())


async def test_others_are_refused_and_the_log_says_why(
    port: HbonePort, peer: Http2Peer, target: TcpServer, issuer: Issuer, newer: Issuer
) -> None:
    rule, bad = "rules[0] asks for", 'Bearer error="invalid_token"'
    for token, reason, challenge in (
        ("", f"{rule} a token: the request carries no token", "Bearer"),
        ("garbage", f"{rule} a token: no JWT", bad),
        (issuer.mint("https://a", email=EMAIL), f"{rule} a token: its audience is https://a, expected", bad),
        (issuer.mint(AUDIENCE, email=EMAIL, lifetime_s=-60), f"{rule} a token: it expired 6", bad),
        (newer.mint(AUDIENCE, email=EMAIL), f"{rule} a token: it is signed with a key that is not", bad),
        (
            issuer.mint(AUDIENCE, email="me@example.com.evil.org"),
            f"{rule} other claims than its token has",
            'Bearer error="insufficient_scope"',
        ),
    ):
        stream = ask(peer, target, token)
        assert await challenged(stream) == (401, challenge)
        line = await port.line()
        assert (line["status"], line["flags"], line["identity"]) == (401, "DENY", str(CALLER))
        assert f"127.0.0.1:{target.port}: {reason}" in line["error"]
        assert not token or token not in json.dumps(line) + (await stream.rest()).decode()
    assert target.count == 0


async def test_a_refusal_for_other_reasons_asks_for_no_token(port: HbonePort, peer: Http2Peer) -> None:
    assert await challenged(ask(peer, b"10.0.0.1:80")) == (401, "")
    assert "no rule allows it" in (await port.line())["error"]


async def test_a_name_whose_address_a_rule_denies_without_a_token(
    tmp_path: Path, target: TcpServer, issuer: Issuer
) -> None:
    """The keys are asked for once the name is looked up, for no rule before wants them."""
    loopback = ("127.0.0.0/8:*", "[::1]:*")
    rules = (
        Rule(("*",), loopback, deny=True, claims=(("email", ("*@evil.org",)),)),
        Rule(("*",), (*loopback, "localhost:*")),
    )
    async with served(issuer) as keys, visited(tmp_path, *rules, keys=keys.url) as (_, peer):
        authority = b"localhost:%d" % target.port
        for email, status in ((EMAIL, 200), ("me@evil.org", 401), (None, 401)):
            assert await ask(peer, authority, issuer.mint(AUDIENCE, email=email)).status() == status
        assert await challenged(ask(peer, authority)) == (401, "Bearer")
        assert (keys.asked, target.count) == (1, 1)


async def test_no_name_is_looked_up_for_a_token_that_does_not_suffice(tmp_path: Path, issuer: Issuer) -> None:
    rule = Rule(("*",), ("*.invalid:80",), claims=(("email", (EMAIL,)),))
    async with served(issuer) as keys, visited(tmp_path, rule, keys=keys.url) as (_, peer):
        for email, status in (("me@evil.org", 401), (EMAIL, 503)):  # the latter: nobody has such a name
            token = issuer.mint(AUDIENCE, email=email)
            assert await ask(peer, b"hello.invalid:80", token).status() == status


async def test_a_file_of_keys_that_is_not_there_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with visited(tmp_path, EXAMPLES, keys=str(tmp_path / "keys.json")):
        assert f"no keys from {tmp_path}/keys.json: No such file" in caplog.text


async def test_an_issuer_that_is_not_there_lets_nobody_in(
    tmp_path: Path, target: TcpServer, issuer: Issuer
) -> None:
    other = Rule(("*",), ("127.0.0.0/8:*",))
    absent = f"http://127.0.0.1:{closed_port()}/certs"
    async with visited(tmp_path, EXAMPLES, other, keys=absent) as (port, peer):
        assert await challenged(ask(peer, target, issuer.mint(AUDIENCE, email=EMAIL))) == (503, "")
        line = await port.line()
        assert (line["status"], line["flags"]) == (503, "IDENTITY_ERROR")
        assert f"the token cannot be checked: no keys from {absent}: cannot connect" in line["error"]
        assert port.value("hbone_jwt_checks_total", result="no_keys") == 1
        assert port.value("hbone_jwt_key_fetches_total", result="failure") == 1
        assert await ask(peer, target).status() == 200, "by the second rule, which asks for none"


async def test_who_leaves_while_keys_are_fetched(tmp_path: Path, target: TcpServer, issuer: Issuer) -> None:
    token = issuer.mint(AUDIENCE, email=EMAIL)
    async with served(issuer) as keys, visited(tmp_path, EXAMPLES, keys=keys.url) as (port, peer):
        keys.gate.clear()
        before = running()
        gone, stays = ask(peer, target, token), ask(peer, target, token)
        await peer.answered()
        assert (port.listener.open_tunnels, running()) == (2, before + 3)  # and the request for the keys
        gone.reset(CANCEL)
        line = await port.line()
        assert (line["status"], line["flags"]) == (499, "DOWNSTREAM_RESET")
        keys.gate.set()
        assert await stays.status() == 200
        assert (keys.asked, target.count, port.listener.open_tunnels) == (1, 1, 1)


async def test_the_end_while_keys_are_fetched(tmp_path: Path, target: TcpServer, issuer: Issuer) -> None:
    token = issuer.mint(AUDIENCE, email=EMAIL)
    async with served(issuer) as keys, visited(tmp_path, EXAMPLES, keys=keys.url) as (port, peer):
        keys.gate.clear()
        before = running()
        ask(peer, target, token)
        await peer.answered()
        await port.listener.close(StreamResetError("the gateway stops", CANCEL))
        assert (await port.line())["status"] == 503
        now = asyncio.get_running_loop().time
        closed_at = now()
        await until(lambda: running() == before)
        assert now() - closed_at < jwks.TIMEOUT_S / 2, "nobody waits for the keys any more"
        keys.gate.set()
    assert target.count == 0


async def test_waiting_for_keys_is_an_open_tunnel_to_the_limits(
    tmp_path: Path, target: TcpServer, issuer: Issuer
) -> None:
    token = issuer.mint(AUDIENCE, email=EMAIL)
    async with (
        served(issuer) as keys,
        visited(tmp_path, EXAMPLES, keys=keys.url, max_tunnels=1) as (port, peer),
    ):
        keys.gate.clear()
        first = ask(peer, target, token)
        assert await ask(peer, target, token).status() == 503
        assert (await port.line())["flags"] == "LIMIT"
        keys.gate.set()
        assert await first.status() == 200


async def test_keys_are_rotated(
    tmp_path: Path, target: TcpServer, issuer: Issuer, newer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks, "MIN_PACE_S", 0.0)
    async with served(issuer) as keys, visited(tmp_path, EXAMPLES, keys=keys.url) as (_, peer):
        tokens = [each.mint(AUDIENCE, email=EMAIL) for each in (issuer, newer)]
        assert [await ask(peer, target, token).status() for token in tokens] == [200, 401]
        keys.issuers = [issuer, newer]
        assert [await ask(peer, target, token).status() for token in tokens] == [200, 200]
        keys.issuers = [newer]
        unknown = Issuer().mint(AUDIENCE, email=EMAIL)
        assert await ask(peer, target, unknown).status() == 401
        assert [await ask(peer, target, token).status() for token in tokens] == [401, 200]


async def test_a_file_of_keys_is_followed(
    tmp_path: Path, target: TcpServer, issuer: Issuer, newer: Issuer
) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps(issuer.jwks()))
    async with visited(tmp_path, EXAMPLES, keys=str(file)) as (_, peer):
        tokens = [each.mint(AUDIENCE, email=EMAIL) for each in (issuer, newer)]
        assert [await ask(peer, target, token).status() for token in tokens] == [200, 401]
        (tmp_path / "next.json").write_text(json.dumps(newer.jwks()))
        (tmp_path / "next.json").replace(file)
        assert [await ask(peer, target, token).status() for token in reversed(tokens)] == [200, 401]


async def test_a_reload_changes_whose_tokens_count(
    port: HbonePort,
    peer: Http2Peer,
    target: TcpServer,
    issuer: Issuer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    token = issuer.mint("https://new.example", email=EMAIL)
    assert await ask(peer, target, token).status() == 401
    settings = port.listener.tunnels.settings
    assert settings.jwt is not None
    new = replace(settings.jwt, audiences=("https://new.example",))
    port.listener.apply(replace(settings, jwt=new))
    assert await ask(peer, target, token).status() == 200
    assert port.value("hbone_jwt_key_fetches_total", result="success") == 1, "the keys were kept"
    absent = str(tmp_path / "absent.json")
    port.listener.apply(replace(settings, jwt=replace(new, keys=absent)))
    assert f"no keys from {absent}: No such file" in caplog.text
    assert await ask(peer, target, token).status() == 503
    failed = port.value("hbone_jwt_key_fetches_total", result="failure")
    port.listener.apply(replace(settings, rules=(TO_LOOPBACK,), jwt=None))
    assert await ask(peer, target).status() == 200
    assert port.value("hbone_jwt_checks_total", result="good") == 1
    assert port.value("hbone_jwt_key_fetches_total", result="failure") == failed > 0, "no counter goes back"
    assert isinstance(port.listener.tunnels.rules, Rules)
