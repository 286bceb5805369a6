"""The token exchange as a client sees it: requests over a real port, answers and errors as in the RFCs."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.identity.sts_server import (
    ACCESS_TOKEN,
    FORM,
    GRANT_TYPE,
    ID_TOKEN,
    JWT,
    StsError,
    StsServer,
    is_google_api,
    read_form,
)
from shared.address import Address
from shared.credentials.tokens.minting import Minted
from shared.errors import SubjectRefusedError, TargetRefusedError, TokenError, UpstreamError
from shared.net.http1 import Response, request
from shared.ops.http_server import Limits, Request
from tests.support.metadata_server import PATIENCE_S, unsigned_token
from tests.support.process import run

NOW_S = 1_800_000_000.0
SUBJECT = unsigned_token(aud="PROJECT.svc.id.goog", sub="system:serviceaccount:demo:hello", exp=NOW_S + 600)
CLOUD_RUN = "https://hello-123456789.europe-west1.run.app"


@dataclass
class Exchanges:
    """Says what it was asked, and gives tokens that tell the same."""

    asked: list[tuple[str, ...]] = field(default_factory=list)
    failure: TokenError | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def access_token(self, subject: str) -> Minted:
        return await self._given("access", subject)

    async def id_token(self, subject: str, audience: str) -> Minted:
        return await self._given("id", subject, audience)

    async def _given(self, kind: str, *asked: str) -> Minted:
        self.asked.append((kind, *asked))
        self.begun.set()
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return Minted(f"{kind}-token", NOW_S + 3599.9)


class Sts:
    """A client of a running one."""

    def __init__(self, address: Address | str, exchanges: Exchanges | None = None) -> None:
        self.exchanges = exchanges or Exchanges()
        self.url = f"http://{address}/token"

    async def post(
        self, fields: Mapping[str, str] | None = None, *, body: bytes | None = None, kind: str = FORM
    ) -> Response:
        return await request(
            "POST",
            self.url,
            headers={"content-type": kind},
            body=urlencode(fields or {}).encode() if body is None else body,
            timeout_s=PATIENCE_S,
            max_bytes=65536,
        )


@pytest.fixture
async def sts() -> AsyncIterator[Sts]:
    exchanges = Exchanges()
    exchanges.gate.set()
    server = StsServer(exchanges, now=lambda: NOW_S)
    yield Sts(await server.start(Address("127.0.0.1", 0)), exchanges)
    await server.close(0)


def form(**changes: str) -> dict[str, str]:
    """A request that is good, but for the changes; an empty value leaves a field out."""
    fields = {"grant_type": GRANT_TYPE, "subject_token": SUBJECT, "subject_token_type": JWT, **changes}
    return {name: value for name, value in fields.items() if value}


async def test_for_googles_apis_the_federated_token(sts: Sts) -> None:
    response = await sts.post(form(scope="https://www.googleapis.com/auth/cloud-platform"))
    assert response.status == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["pragma"] == "no-cache"
    assert json.loads(response.body) == {
        "access_token": "access-token",
        "issued_token_type": ACCESS_TOKEN,
        "token_type": "Bearer",
        "expires_in": 3599,
    }
    assert sts.exchanges.asked == [("access", SUBJECT)]


async def test_for_any_other_audience_an_id_token(sts: Sts) -> None:
    response = await sts.post(form(audience=CLOUD_RUN, requested_token_type=ACCESS_TOKEN))
    answer = json.loads(response.body)
    assert (answer["access_token"], answer["issued_token_type"]) == ("id-token", ID_TOKEN)
    assert sts.exchanges.asked == [("id", SUBJECT, CLOUD_RUN)]


async def test_an_id_token_for_a_google_api_when_that_is_asked_for(sts: Sts) -> None:
    await sts.post(form(audience="https://x.googleapis.com", requested_token_type=ID_TOKEN))
    assert sts.exchanges.asked == [("id", SUBJECT, "https://x.googleapis.com")]


@pytest.mark.parametrize(
    ("audience", "expected"),
    [
        ("", True),
        ("googleapis.com", True),
        ("https://trafficdirector.googleapis.com", True),
        ("trafficdirector.googleapis.com:443", True),
        ("//sts.googleapis.com/x", True),
        ("https://evilgoogleapis.com", False),
        ("https://googleapis.com.example", False),
        ("https://example/?x=.googleapis.com", False),
        (CLOUD_RUN, False),
        ("anything at all", False),
        ("http://[::1", False),
    ],
)
def test_which_audience_is_googles(audience: str, expected: bool) -> None:
    assert is_google_api(audience) is expected


# Requests that are refused.


@pytest.mark.parametrize(
    ("changes", "code", "about"),
    [
        ({"grant_type": ""}, "invalid_request", "grant_type"),
        ({"grant_type": "client_credentials"}, "unsupported_grant_type", "grant_type"),
        ({"subject_token": ""}, "invalid_request", "subject_token is missing"),
        ({"subject_token": "opaque"}, "invalid_request", "subject_token is no JWT"),
        ({"subject_token": f"{SUBJECT}.x"}, "invalid_request", "subject_token is no JWT"),
        ({"subject_token": "a" * 17_000}, "invalid_request", "longer than 16384 bytes"),
        ({"subject_token_type": ""}, "invalid_request", "subject_token_type is missing"),
        ({"subject_token_type": ACCESS_TOKEN}, "invalid_request", "subject_token_type has to be"),
        ({"requested_token_type": "urn:x"}, "invalid_request", "requested_token_type"),
        ({"requested_token_type": ID_TOKEN}, "invalid_target", "needs an audience"),
        ({"actor_token": SUBJECT}, "invalid_request", "actor_token"),
        ({"actor_token_type": JWT}, "invalid_request", "actor_token"),
        ({"resource": "https://x"}, "invalid_target", "resource"),
        ({"audience": "a" * 3000}, "invalid_target", "too long"),
        ({"audience": "a\nb"}, "invalid_target", "not printable"),
    ],
)
async def test_what_is_refused(sts: Sts, changes: dict[str, str], code: str, about: str) -> None:
    await refused(await sts.post(form(**changes)), 400, code, about)
    assert sts.exchanges.asked == []


async def refused(response: Response, status: int, code: str, about: str) -> dict[str, Any]:
    assert response.status == status
    assert response.headers["content-type"] == "application/json"
    assert response.headers["cache-control"] == "no-store"
    answer: dict[str, Any] = json.loads(response.body)
    assert set(answer) == {"error", "error_description"}
    assert answer["error"] == code
    assert about in answer["error_description"]
    assert not set('"\\\n') & set(answer["error_description"])
    assert SUBJECT[:20] not in response.body.decode()
    return answer


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_request"),
        (b"{}", "invalid_request"),
        (b"\xff=\xff", "invalid_request"),
        (urlencode(form()).encode() + b"&a=b" * 30, "invalid_request"),
        (urlencode(form()).encode() + b"&subject_token=x", "invalid_request"),
        (urlencode(form()).encode() + b"&audience=a&audience=b", "invalid_target"),
    ],
)
async def test_bodies_that_are_no_such_form(sts: Sts, body: bytes, code: str) -> None:
    await refused(await sts.post(body=body), 400, code, "")


async def test_json_is_no_form(sts: Sts) -> None:
    response = await sts.post(body=json.dumps(form()).encode(), kind="application/json")
    await refused(response, 400, "invalid_request", "content-type")


async def test_a_form_with_a_charset_is_one(sts: Sts) -> None:
    response = await sts.post(form(), kind="Application/X-WWW-Form-Urlencoded; charset=UTF-8")
    assert response.status == 200


async def test_the_same_twice_is_no_contradiction(sts: Sts) -> None:
    response = await sts.post(
        body=urlencode([*form().items(), ("audience", "a"), ("audience", "a")]).encode()
    )
    assert response.status == 200


# Failures behind it.


async def test_a_subject_that_google_refuses(sts: Sts) -> None:
    sts.exchanges.failure = SubjectRefusedError(
        'no token from Google\'s STS: it answered 400 ("invalid_grant")'
    )
    await refused(await sts.post(form()), 400, "invalid_request", "it answered 400 ('invalid_grant')")


async def test_google_is_away(sts: Sts) -> None:
    sts.exchanges.failure = TokenError("no token from Google's STS: cannot connect to 127.0.0.1:1\nrefused")
    answer = await refused(
        await sts.post(form()), 503, "temporarily_unavailable", "no token from Google's STS"
    )
    assert answer["error_description"].endswith("cannot connect to 127.0.0.1:1'nrefused")


async def test_an_id_token_that_nobody_could_have(sts: Sts) -> None:
    sts.exchanges.failure = TargetRefusedError("no token exchange: set PROJECT_NUMBER")
    await refused(await sts.post(form(audience=CLOUD_RUN)), 400, "invalid_target", "set PROJECT_NUMBER")


async def test_no_token_is_in_the_log(sts: Sts, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    await sts.post(form(audience=CLOUD_RUN))
    sts.exchanges.failure = TokenError("no token: away")
    await sts.post(form(audience=CLOUD_RUN))
    assert "subject system:serviceaccount:demo:hello" in caplog.text
    assert "id-token" not in caplog.text and SUBJECT[:20] not in caplog.text


# Bounds.


async def test_other_paths_and_methods(sts: Sts) -> None:
    async def status(method: str, url: str) -> int:
        answer = await request(method, url, headers={}, timeout_s=PATIENCE_S, max_bytes=1000)
        return answer.status

    assert await status("GET", sts.url) == 405
    assert await status("POST", f"{sts.url}/x") == 404


async def test_a_body_that_is_too_long(sts: Sts) -> None:
    response = await sts.post(body=b"a=" + b"b" * 32 * 1024)
    assert response.status == 413
    assert sts.exchanges.asked == []


async def test_an_exchange_that_takes_too_long_is_given_up() -> None:
    exchanges = Exchanges()  # whose gate is closed
    server = StsServer(exchanges, limits=Limits(request_s=0.1), now=lambda: NOW_S)
    sts = Sts(await server.start(Address("127.0.0.1", 0)))
    response = await sts.post(form())
    assert (response.status, len(exchanges.asked)) == (503, 1)
    await server.close(0)


async def test_an_exchange_under_way_ends_when_the_server_does() -> None:
    exchanges = Exchanges()
    server = StsServer(exchanges, now=lambda: NOW_S)
    sts = Sts(await server.start(Address("127.0.0.1", 0)))
    posting = asyncio.ensure_future(sts.post(form()))  # noqa: TID251  # the test's own, awaited below
    async with asyncio.timeout(PATIENCE_S):
        await exchanges.begun.wait()
    await server.close(0.01)
    with pytest.raises(UpstreamError):
        await posting


# The form, as anybody may send it.


@given(st.binary(max_size=300) | st.text(alphabet="agrnt_yp=&%+;2 ", max_size=60).map(str.encode))
def test_any_body_is_read_or_refused(body: bytes) -> None:
    try:
        read_form(Request("POST", "/token", headers={"content-type": FORM}, body=body))
    except StsError as error:
        assert error.code in ("invalid_request", "unsupported_grant_type")


# With a client that is not ours.


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
async def test_curl(sts: Sts) -> None:
    arguments = [
        word for name, value in form(audience=CLOUD_RUN).items() for word in ("-d", f"{name}={value}")
    ]
    code, out, _ = await run("curl", "--silent", "--fail", *arguments, sts.url)
    assert code == 0
    assert json.loads(out)["access_token"] == "id-token"


# Web pages, and programs that say nothing.


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "rebound.example:15463"},
        {"origin": "http://page.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
    ],
)
async def test_a_web_page_exchanges_nothing(sts: Sts, headers: dict[str, str]) -> None:
    """Neither by a form, which a browser sends anywhere unasked, nor by a name that leads here."""
    lines = [f"-H{name}: {value}" for name, value in headers.items()]
    _, status, _ = await run(
        *("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--noproxy", "*", *lines),
        *("--data", urlencode(form(audience=CLOUD_RUN)), sts.url),
    )
    assert status == b"403"
    assert sts.exchanges.asked == []


async def test_programs_that_never_finish_their_request(sts: Sts) -> None:
    address = Address.parse(sts.url.removeprefix("http://").removesuffix("/token"))
    writers = []
    for _ in range(100):
        _, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"P")
        writers.append(writer)
    assert (await sts.post(form(audience=CLOUD_RUN))).status == 200
    for writer in writers:
        writer.transport.abort()
