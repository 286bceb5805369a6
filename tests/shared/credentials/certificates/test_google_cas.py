"""Google's CA Service: a server that signs, refuses with Google's errors, is slow, or is somebody else."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from shared.credentials.certificates.authority import Authority, KeyPair
from shared.credentials.certificates.google_cas import GoogleCas
from shared.errors import SigningError, TokenError
from shared.tasks import spawn
from shared.trust.spiffe import SpiffeId, ids_of
from tests.support.cas_server import POOL, CasServer, Said, error
from tests.support.certificate_requests import gives, new_key, refusal, request_pem
from tests.support.metadata_server import PATIENCE_S, closed_port

HELLO = SpiffeId.of_workload("mesh-project.svc.id.goog", "demo", "hello")
TOKEN = "ya29.c.b0Aaekm1K4xYQ-access-token-of-a-federated-identity"


@pytest.fixture
async def server() -> AsyncIterator[CasServer]:
    async with CasServer(Authority.create("mesh-project.svc.id.goog"), HELLO, TOKEN) as server:
        yield server


def client(
    server: CasServer,
    *,
    token: str = TOKEN,
    reflected: bool = True,
    timeout_s: float = PATIENCE_S,
    tls: ssl.SSLContext | None = None,
) -> GoogleCas:
    return GoogleCas(
        POOL,
        gives(token),
        endpoint=server.endpoint,
        reflected=reflected,
        tls=tls or server.tls(),
        timeout_s=timeout_s,
        retry_pause_s=0.01,
    )


def place(server: CasServer) -> str:
    return f"CA pool {POOL} at {server.endpoint.removeprefix('https://')}"


async def refused(ca: GoogleCas, *secrets: str) -> str:
    return await refusal(ca, TOKEN, *secrets)


# Certificates.


async def test_a_certificate_for_whom_the_token_stands_for(server: CasServer) -> None:
    key = new_key()
    somebody = x509.UniformResourceIdentifier("spiffe://elsewhere.local/ns/a/sa/b")
    signed = await client(server).sign(request_pem(key, somebody), 86400)
    (leaf,) = x509.load_pem_x509_certificates(signed.chain_pem)
    assert leaf.public_key() == key.public_key()
    assert ids_of(leaf.public_bytes(Encoding.DER)) == [HELLO]
    assert signed.roots_pem == server.authority.root_pem
    assert timedelta(hours=23) < leaf.not_valid_after_utc - datetime.now(UTC) <= timedelta(hours=24)
    roots, made = server.asked
    assert roots.path == f"/v1/{POOL}:fetchCaCerts"
    assert made.path == f"/v1/{POOL}/certificates"
    assert (made.content["lifetime"], made.content["subjectMode"]) == ("86400s", "REFLECTED_SPIFFE")
    assert "subjectAltName" not in made.content["config"]["subjectConfig"]
    assert len(made.query["certificateId"][0]) <= 63


async def test_a_certificate_for_what_the_request_names(server: CasServer) -> None:
    named = x509.UniformResourceIdentifier("spiffe://mesh-project.svc.id.goog/ns/demo/sa/other")
    signed = await client(server, reflected=False).sign(request_pem(new_key(), named), 60)
    leaf = x509.load_pem_x509_certificate(signed.chain_pem)
    assert [str(identity) for identity in ids_of(leaf.public_bytes(Encoding.DER))] == [named.value]


async def test_roots_of_all_authorities_in_the_pool_each_once(server: CasServer) -> None:
    old, new, middle = (Authority.create(name).root_pem.decode() for name in ("a.x", "b.x", "c.x"))
    chains = [{"certificates": chain} for chain in ([middle, old], [new], [new], [])]
    server.answers["fetchCaCerts"] = Said({"caCerts": chains})
    signed = await client(server).sign(request_pem(new_key()), 60)
    assert signed.roots_pem.decode() == old + new


async def test_roots_that_we_may_not_ask_for_are_taken_from_the_chain(server: CasServer) -> None:
    server.answers["fetchCaCerts"] = error(403, "PERMISSION_DENIED", "privateca.caPools.get denied")
    signed = await client(server).sign(request_pem(new_key()), 60)
    assert signed.roots_pem == server.authority.root_pem
    assert len(x509.load_pem_x509_certificates(signed.chain_pem)) == 1


# A request that got no answer.


async def test_a_request_without_an_answer_is_made_once_more_under_its_id(server: CasServer) -> None:
    for answer in (b"", error(503, "UNAVAILABLE", "The service is currently unavailable.")):
        server.asked.clear()
        server.made.clear()
        server.once["certificates"] = answer
        signed = await client(server).sign(request_pem(new_key()), 60)
        _, first, second = server.asked
        assert (first.query, first.content) == (second.query, second.content)
        ((_, made),) = server.made.items()
        assert made["pemCertificate"] == signed.chain_pem.decode()


async def test_a_request_is_made_twice_at_most_each_time_under_its_own_id(server: CasServer) -> None:
    ca = client(server)
    server.answers["certificates"] = b""
    for _ in range(2):
        await refused(ca)
    assert len(server.made) == 2
    assert len([asked for asked in server.asked if asked.path.endswith("/certificates")]) == 4


# Refusals.


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (
            error(403, "PERMISSION_DENIED", "Permission 'privateca.certificates.createForSelf' denied"),
            "403: PERMISSION_DENIED: Permission 'privateca.certificates.createForSelf' denied; "
            "the caller needs the role privateca.workloadCertificateRequester on the pool",
        ),
        (
            error(404, "NOT_FOUND", "CaPool not found"),
            "404: NOT_FOUND: CaPool not found; there is no such pool, or no authority in it is enabled",
        ),
        (
            error(400, "INVALID_ARGUMENT", "lifetime\n\x1b[0m too long"),
            "400: INVALID_ARGUMENT: lifetime ?[0m too long; ",
        ),
        (error(500, "INTERNAL", f"token {TOKEN}?"), "500: INTERNAL: token [secret]"),
        (error(429, "RESOURCE_EXHAUSTED", "x" * 5000), "429: RESOURCE_EXHAUSTED: xxx"),
        (Said("<html>Bad Gateway</html>", 502), "502"),
        (Said({"error": "invalid"}, 400), "400; "),
        (Said({"error": {"status": 1, "message": [2]}}, 400), "400; "),
        (Said("[" * 5000, 500), "500"),
        (Said("", 302), "302"),
    ],
)
async def test_it_refuses(server: CasServer, answer: Said, shown: str) -> None:
    server.answers["certificates"] = answer
    said = await refused(client(server))
    assert said.startswith(f"{place(server)} refused: {shown}")
    assert len(said) < 700
    attempts = len(server.asked) - 1  # the first request was for the roots
    assert attempts == (2 if answer.status >= 500 else 1), "what was refused is not asked again"


async def test_a_token_that_it_does_not_take(server: CasServer) -> None:
    said = await refused(client(server, token="ya29.some-other-token"), "ya29.some-other-token")
    assert said == (
        f"{place(server)} refused: 401: UNAUTHENTICATED: Request had invalid authentication credentials.; "
        "is the access token for the scope cloud-platform?"
    )


async def test_no_token(server: CasServer) -> None:
    async def none() -> str:
        raise TokenError("no metadata server: connection refused")

    said = await refused(GoogleCas(POOL, none, endpoint=server.endpoint, tls=server.tls()))
    assert said == f"{place(server)}: no token for it: no metadata server: connection refused"


async def test_a_token_that_no_header_can_carry(server: CasServer) -> None:
    said = await refused(client(server, token="two\nlines-of-a-token"), "lines-of-a-token")
    assert "malformed header" in said


# Answers that are none.


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (Said("<html>sign in</html>"), "its answer is not JSON, or has nothing in it"),
        (Said([1]), "its answer is not JSON, or has nothing in it"),
        (Said({}), "its answer is not JSON, or has nothing in it"),
        (Said({"name": "a"}), "the certificate in its answer is empty"),
        (Said({"pemCertificate": 5, "pemCertificateChain": 6}), "the certificate in its answer is empty"),
        (Said({"pemCertificate": "garbage"}), "the certificate in its answer cannot be read"),
        (
            Said({"pemCertificate": "ROOT", "pemCertificateChain": ["?"]}),
            "the certificate in its answer cannot",
        ),
        (
            Said({"pemCertificate": "ROOT", "pemCertificateChain": ["ROOT"] * 32}),
            "has more than 32 certificates",
        ),
        (Said(" " * 300_000), "is longer than 262144 bytes"),
        (b"garbage\r\n\r\n", "broken answer"),
        (b"", "broken answer"),
    ],
)
async def test_it_answers_garbage(server: CasServer, answer: Said | bytes, complaint: str) -> None:
    if isinstance(answer, Said):
        pem = json.dumps(server.authority.root_pem.decode())
        answer = Said(json.loads(json.dumps(answer.content).replace('"ROOT"', pem)), answer.status)
    server.answers["certificates"] = answer
    said = await refused(client(server))
    assert said.startswith(f"CA pool {POOL}")
    assert server.endpoint.removeprefix("https://") in said
    assert complaint in said


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (Said("<html>"), "its answer is not JSON"),
        (Said({"caCerts": 5}), "its list of roots is empty"),
        (Said({"caCerts": [1, {"certificates": [2]}]}), "its list of roots is empty"),
        (Said({"caCerts": [{"certificates": ["garbage"]}]}), "its list of roots cannot be read"),
        (error(404, "NOT_FOUND", "no pool"), "refused: 404: NOT_FOUND: no pool; there is no such pool"),
    ],
)
async def test_its_roots_are_garbage(server: CasServer, answer: Said, complaint: str) -> None:
    server.answers["fetchCaCerts"] = answer
    assert complaint in await refused(client(server))
    assert server.made == {}


async def test_it_never_answers(server: CasServer) -> None:
    server.gate.clear()
    address = server.endpoint.removeprefix("https://")
    said = await refused(client(server, timeout_s=0.5))
    assert said == f"CA pool {POOL}: no complete answer from {address} within 0.5 s"


async def test_one_deadline_for_all_of_it(server: CasServer) -> None:
    """The roots take up some of the time, and the certificate never comes."""
    ca = client(server, timeout_s=1.0)
    asking = spawn(refused(ca), name="asking")
    server.gate.clear()
    await server.seen(1)
    await asyncio.sleep(0.3)  # the time that the answer takes is what counts here
    server.gate.set()
    server.gate.clear()
    assert re.search(r"within 0\.[1-7] s$", await asking)


async def test_nobody_listens() -> None:
    ca = GoogleCas(POOL, gives(TOKEN), endpoint=f"https://127.0.0.1:{closed_port()}")
    assert "cannot connect to 127.0.0.1:" in await refused(ca)


# The server's own certificate.


@pytest.mark.parametrize(
    ("certificate", "complaint"),
    [
        (lambda ca: Authority.create("evil.local").issue(ip_addresses=["127.0.0.1"]), "unable to get local"),
        (lambda ca: ca.issue(dns_names=["privateca.test"]), "not valid for '127.0.0.1'"),
        (lambda ca: ca.issue(ip_addresses=["127.0.0.1"], lifetime_s=-60), "certificate has expired"),
    ],
)
async def test_a_server_that_is_not_googles(
    certificate: Callable[[Authority], KeyPair], complaint: str
) -> None:
    authority = Authority.create("mesh-project.svc.id.goog")
    async with CasServer(authority, HELLO, TOKEN, certificate(authority)) as server:
        said = await refused(client(server))
        assert said.startswith(
            f"CA pool {POOL}: cannot connect to {server.endpoint.removeprefix('https://')}: "
        )
        assert complaint in said
        assert server.asked == []


# Settings.


@pytest.mark.parametrize(
    "pool", ["", "workloads", POOL + "/", POOL + "?x=y", "projects/p/locations/l/caPools/..%2f", "a\nb"]
)
def test_a_pool_that_is_none(pool: str) -> None:
    with pytest.raises(ValueError, match=r"is not projects/P/locations/L/caPools/NAME") as caught:
        GoogleCas(pool, gives(TOKEN))
    assert str(caught.value).isprintable()


def test_an_endpoint_that_is_none() -> None:
    with pytest.raises(ValueError, match="scheme"):
        GoogleCas(POOL, gives(TOKEN), endpoint="ftp://example")


def test_its_name_says_where_it_is() -> None:
    assert GoogleCas(POOL, gives(TOKEN)).name == f"CA pool {POOL} at privateca.googleapis.com:443"


async def test_a_request_that_is_none(server: CasServer) -> None:
    with pytest.raises(SigningError, match="our own certificate request cannot be read"):
        await client(server).sign(b"garbage", 60)
    assert server.asked == []
