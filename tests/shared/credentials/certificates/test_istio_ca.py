"""Istio's authority: a real gRPC server that signs, refuses, is slow, or is somebody else."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from shared.address import Address
from shared.credentials.certificates.authority import Authority, KeyPair
from shared.credentials.certificates.istio_ca import SERVER_NAME, IstioCa
from shared.credentials.tokens.tokens import FileToken
from shared.errors import TokenError, UnavailableError
from shared.net.tls.contexts import server_context
from shared.tasks import spawn
from shared.trust.spiffe import SpiffeId
from tests.support.certificate_requests import gives, new_key, refusal, request_pem
from tests.support.http2_peer import Service
from tests.support.istiod import Istiod
from tests.support.metadata_server import PATIENCE_S, closed_port, listening, unsigned_token

HELLO = SpiffeId.of_workload("cluster.local", "demo", "hello")
TOKEN = unsigned_token(aud="istio-ca", sub="system:serviceaccount:demo:hello")

ENCRYPTED_KEY = new_key().private_bytes(
    Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password")
)
OTHER_KEY = Authority.create("other.local").issue(HELLO).key_pem


@pytest.fixture
def istiod() -> Istiod:
    return Istiod(Authority.create("cluster.local"), HELLO, token=TOKEN)


def client(istiod: Istiod, token: str = TOKEN, timeout_s: float = PATIENCE_S) -> IstioCa:
    return IstioCa(istiod.address, roots=istiod.roots, token=gives(token), timeout_s=timeout_s)


async def refused(ca: IstioCa, *secrets: str) -> str:
    return await refusal(ca, TOKEN, *secrets)


# Certificates.


async def test_a_certificate_for_a_token(istiod: Istiod, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    key = new_key()
    with istiod.serving():
        ca = IstioCa(istiod.address, roots=istiod.roots, token=FileToken(tmp_path / "token").token)
        signed = await ca.sign(request_pem(key, x509.UniformResourceIdentifier(str(HELLO))), 3600)
    leaf = x509.load_pem_x509_certificate(signed.chain_pem)
    assert leaf.public_key() == key.public_key()
    assert signed.roots_pem == istiod.authority.root_pem
    assert timedelta(minutes=59) < leaf.not_valid_after_utc - datetime.now(UTC) <= timedelta(hours=1)
    (call,) = istiod.calls
    assert call.metadata["clusterid"] == "Kubernetes"
    assert call.metadata["authorization"] == f"Bearer {TOKEN}"
    assert (call.message.validity_duration, call.message.HasField("metadata")) == (3600, False)
    assert 0 < call.time_left_s <= 10


async def test_a_token_is_asked_for_each_time(istiod: Istiod) -> None:
    tokens = iter(["the-first-token", "another-token"])

    async def source() -> str:
        return next(tokens)

    with istiod.serving():
        ca = IstioCa(istiod.address, roots=istiod.roots, token=source, timeout_s=PATIENCE_S)
        await refused(ca, "the-first-token")
        istiod.token = "another-token"
        await ca.sign(request_pem(new_key()), 60)


async def test_another_cluster_and_signer(istiod: Istiod) -> None:
    with istiod.serving():
        ca = IstioCa(
            istiod.address,
            roots=istiod.roots,
            token=gives(TOKEN),
            cluster_id="cn-mesh-us-central1-c-demo",
            cert_signer="clusterissuers.istio-system",
        )
        await ca.sign(request_pem(new_key()), 60)
    (call,) = istiod.calls
    assert call.metadata["clusterid"] == "cn-mesh-us-central1-c-demo"
    assert dict(call.message.metadata) == {"CertSigner": "clusterissuers.istio-system"}


async def test_a_chain_with_intermediates(istiod: Istiod) -> None:
    leaf, middle, roots = ([Authority.create(name).root_pem.decode()] for name in ("a.x", "b.x", "c.x"))
    istiod.chain = [leaf[0], middle[0] + middle[0], roots[0] + leaf[0]]
    with istiod.serving():
        signed = await client(istiod).sign(request_pem(new_key()), 60)
    assert signed.chain_pem.decode() == leaf[0] + middle[0] + middle[0]
    assert signed.roots_pem.decode() == roots[0] + leaf[0]


async def test_a_leaf_alone_has_roots_elsewhere(istiod: Istiod) -> None:
    istiod.chain = [istiod.authority.root_pem.decode()]
    with istiod.serving():
        signed = await client(istiod).sign(request_pem(new_key()), 60)
    assert (signed.chain_pem, signed.roots_pem) == (istiod.authority.root_pem, b"")


# Our own certificate as the proof.


def files(folder: Path, pair: KeyPair) -> tuple[Path, Path]:
    chain, key = folder / "cert-chain.pem", folder / "key.pem"
    chain.write_bytes(pair.certificate_pem)
    key.write_bytes(pair.key_pem)
    return chain, key


async def test_a_renewal_with_our_certificate(istiod: Istiod, tmp_path: Path) -> None:
    ours = files(tmp_path, istiod.authority.issue(HELLO))
    with istiod.serving(wants_certificate=True):
        ca = IstioCa(istiod.address, roots=istiod.roots, certificate=ours)
        signed = await ca.sign(request_pem(new_key()), 60)
        # What is in the files next time counts.
        files(tmp_path, istiod.authority.issue(SpiffeId.of_workload("cluster.local", "demo", "other")))
        assert "UNAUTHENTICATED" in await refused(ca)
    assert signed.roots_pem == istiod.authority.root_pem
    assert [call.identity for call in istiod.calls] == [str(HELLO), "spiffe://cluster.local/ns/demo/sa/other"]
    assert "authorization" not in istiod.calls[0].metadata


async def test_a_certificate_of_another_authority(istiod: Istiod, tmp_path: Path) -> None:
    theirs = files(tmp_path, Authority.create("other.local").issue(HELLO))
    with istiod.serving(wants_certificate=True):
        said = await refused(IstioCa(istiod.address, roots=istiod.roots, certificate=theirs))
    assert said.startswith(f"Istio's CA at {istiod.address}: ")


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda chain, key: chain.unlink(), "No such file or directory"),
        (lambda chain, key: chain.write_bytes(b"garbage"), "no certificates in PEM, or broken ones"),
        (lambda chain, key: key.write_bytes(b"garbage"), "TLS failed: "),
        (lambda chain, key: key.unlink(), "No such file or directory"),
        (lambda chain, key: key.write_bytes(OTHER_KEY), "TLS failed: KEY_VALUES_MISMATCH"),
        (lambda chain, key: key.write_bytes(ENCRYPTED_KEY), "the key is encrypted"),
        (
            lambda chain, key: files(chain.parent, Authority.create("a").issue(HELLO, lifetime_s=-9)),
            "it expired at ",
        ),
    ],
)
async def test_a_certificate_that_does_not_serve(
    istiod: Istiod, tmp_path: Path, spoil: Callable[[Path, Path], object], complaint: str
) -> None:
    """Alone it is an error; with a token it does not stand in the token's way."""
    ours = files(tmp_path, istiod.authority.issue(HELLO))
    key = ours[1].read_text().splitlines()[1]
    spoil(*ours)
    with istiod.serving():
        ca = IstioCa(istiod.address, roots=istiod.roots, certificate=ours)
        said = await refused(ca, key)
        place = (
            f"Istio's CA at {istiod.address}: our certificate {ours[0]} with key {ours[1]} does not serve: "
        )
        assert said.startswith(place + complaint)
        ca = IstioCa(istiod.address, roots=istiod.roots, token=gives(TOKEN), certificate=ours)
        await ca.sign(request_pem(new_key()), 60)


def test_nothing_to_prove_ourselves_with() -> None:
    with pytest.raises(ValueError, match="nothing to prove ourselves with to Istio's CA"):
        IstioCa(Address("istiod", 15012), roots=None)


# Refusals.


@pytest.mark.parametrize(
    ("code", "text", "shown", "hint"),
    [
        (
            grpc.StatusCode.PERMISSION_DENIED,
            "no",
            "PERMISSION_DENIED: no; ",
            "does not sign for this identity",
        ),
        (grpc.StatusCode.UNAVAILABLE, "", "UNAVAILABLE; ", "is istiod ready?"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "slow", "DEADLINE_EXCEEDED: slow; ", "overloaded"),
        (grpc.StatusCode.INTERNAL, "x" * 5000, "INTERNAL: " + "x" * 400 + "...", ""),
        (
            grpc.StatusCode.UNAUTHENTICATED,
            f"bad {TOKEN}",
            "UNAUTHENTICATED: bad [secret]; ",
            "audience istio-ca",
        ),
    ],
)
async def test_it_refuses(istiod: Istiod, code: grpc.StatusCode, text: str, shown: str, hint: str) -> None:
    istiod.refuse = (code, text)
    with istiod.serving():
        said = await refused(client(istiod))
    assert said.startswith(f"Istio's CA at {istiod.address} refused: {shown}")
    assert hint in said
    assert len(said) < 600


async def test_a_token_that_it_does_not_take(istiod: Istiod) -> None:
    with istiod.serving():
        said = await refused(client(istiod, token="some-other-token"), "some-other-token")
    assert said == (
        f"Istio's CA at {istiod.address} refused: UNAUTHENTICATED: authentication failure; "
        "is the token for the audience istio-ca, and of the cluster that CLUSTER_ID names?"
    )


async def test_another_service_on_that_port(istiod: Istiod) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    pair = istiod.authority.issue(dns_names=[SERVER_NAME])
    credentials = grpc.ssl_server_credentials([(pair.key_pem, pair.certificate_pem)])
    istiod.port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        assert "UNIMPLEMENTED: Method not found!; there is no Istio CA" in await refused(client(istiod))
    finally:
        server.stop(grace=0).wait(PATIENCE_S)


# Answers that are none.


@pytest.mark.parametrize(
    ("chain", "complaint"),
    [
        ([], "the certificate chain in its answer is empty"),
        (["garbage"], "the certificate chain in its answer cannot be read: it is no certificate in PEM"),
        (["ROOT", "garbage"], "the root in its answer cannot be read"),
        (["ROOT"] * 40, "the certificate chain in its answer has more than 32 certificates"),
    ],
)
async def test_it_answers_garbage(istiod: Istiod, chain: list[str], complaint: str) -> None:
    istiod.chain = [text.replace("ROOT", istiod.authority.root_pem.decode()) for text in chain]
    with istiod.serving():
        assert (await refused(client(istiod))).startswith(f"Istio's CA at {istiod.address}: {complaint}")


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"", "the certificate chain in its answer is empty"),
        (b"\x0a\xff", "its answer cannot be read: no protobuf message"),
        (b"\x08\x01", "its answer cannot be read: its certificates are numbers"),
        (b"\x0a\x02\xff\xfe", "its answer cannot be read: "),
        (bytes(300_000), "is longer than 262144 bytes"),
    ],
)
async def test_it_answers_no_message(istiod: Istiod, raw: bytes, complaint: str) -> None:
    istiod.raw = raw
    with istiod.serving():
        said = await refused(client(istiod))
    assert said.startswith(f"Istio's CA at {istiod.address}: ")
    assert complaint in said


async def test_a_web_server(istiod: Istiod, tmp_path: Path) -> None:
    chain, key = files(tmp_path, istiod.authority.issue(dns_names=[SERVER_NAME]))
    async with Service.listening(server_context(chain, key)) as service:
        istiod.port = service.port
        asking = spawn(refused(client(istiod)), name="asking")
        stream = await service.request()
        stream.respond(200, [(b"content-type", b"text/html")])
        await stream.send(b"<html>hello</html>")
        stream.end()
        said = await asking
    assert said == f"Istio's CA at {istiod.address} refused: UNKNOWN: not the answer of a gRPC server"


# No answer.


async def test_it_never_answers(istiod: Istiod) -> None:
    with istiod.serving():
        istiod.gate.clear()
        said = await refused(client(istiod, timeout_s=0.5))
    assert said == (f"Istio's CA at {istiod.address}: no complete answer from {istiod.address} within 0.5 s")


async def test_a_peer_that_says_nothing_at_all(istiod: Istiod) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(silent) as istiod.port:
        assert "within 0.3 s" in await refused(client(istiod, timeout_s=0.3))


async def test_nobody_listens(istiod: Istiod) -> None:
    istiod.port = closed_port()
    said = await refused(client(istiod))
    assert said == f"Istio's CA at {istiod.address}: connect to {istiod.address}: connection refused"


async def test_no_token(istiod: Istiod) -> None:
    async def none() -> str:
        raise TokenError(
            "cannot read token file /var/run/secrets/tokens/istio-token: No such file or directory"
        )

    said = await refused(IstioCa(istiod.address, roots=istiod.roots, token=none))
    assert said.startswith(f"Istio's CA at {istiod.address}: no token for it: cannot read token file /var")


async def test_a_token_that_no_header_can_carry(istiod: Istiod) -> None:
    said = await refused(client(istiod, token="two\nlines-of-it"), "lines-of-it")
    assert said == f"Istio's CA at {istiod.address}: authorization has characters that no header can carry"


# The server's own certificate.


@pytest.mark.parametrize(
    ("certificate", "complaint"),
    [
        (
            lambda ca: Authority.create("evil.local").issue(dns_names=[SERVER_NAME]),
            "unable to get local issuer",
        ),
        (lambda ca: ca.issue(dns_names=["other.example"]), SERVER_NAME),
        (lambda ca: ca.issue(dns_names=[SERVER_NAME], lifetime_s=-60), "certificate has expired"),
    ],
)
async def test_a_server_that_is_not_istiod(
    istiod: Istiod, certificate: Callable[[Authority], KeyPair], complaint: str
) -> None:
    with istiod.serving(certificate(istiod.authority)):
        said = await refused(client(istiod))
    place = (
        f"Istio's CA at {istiod.address}: connect to {istiod.address} as {SERVER_NAME}: certificate refused: "
    )
    assert said.startswith(place)
    assert complaint in said
    assert istiod.calls == []


async def test_another_server_name(istiod: Istiod) -> None:
    with istiod.serving(istiod.authority.issue(dns_names=["istiod-canary.example"])):
        ca = IstioCa(
            istiod.address, roots=istiod.roots, token=gives(TOKEN), server_name="istiod-canary.example"
        )
        await ca.sign(request_pem(new_key()), 60)


def missing() -> bytes:
    raise UnavailableError("root certificates: /etc/root.pem: No such file or directory")


@pytest.mark.parametrize(
    ("roots", "complaint"),
    [
        (missing, "root certificates: /etc/root.pem: No such file or directory"),
        (lambda: b" \n", "certificate has to lead to cannot be used: empty"),
        (lambda: b"garbage", "certificate has to lead to cannot be used: no certificate in PEM"),
        (lambda: b"\xff", "certificate has to lead to cannot be used: no certificate in PEM"),
        (None, "certificate refused"),
    ],
)
async def test_roots_that_do_not_help(
    istiod: Istiod, roots: Callable[[], bytes] | None, complaint: str
) -> None:
    with istiod.serving():
        said = await refused(IstioCa(istiod.address, roots=roots, token=gives(TOKEN)))
    assert said.startswith(f"Istio's CA at {istiod.address}: ")
    assert complaint in said
    assert istiod.calls == []


# Beside an app that krun starts.


def test_a_call_leaves_no_thread_and_no_library(istiod: Istiod, tmp_path: Path) -> None:
    """krun forks to start the app: threads of a gRPC library would be in the way, and its memory stays."""
    (tmp_path / "root.pem").write_bytes(istiod.authority.root_pem)
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "request.pem").write_bytes(request_pem(new_key()))
    program = """
import os, sys, uvloop
from pathlib import Path
from shared.credentials.certificates.istio_ca import IstioCa
from shared.credentials.tokens.tokens import FileToken
from shared.address import Address
folder = Path(sys.argv[2])
token = FileToken(folder / "token").token
ca = IstioCa(Address.parse(sys.argv[1]), roots=(folder / "root.pem").read_bytes, token=token)
signed = uvloop.run(ca.sign((folder / "request.pem").read_bytes(), 60))
child = os.fork()
if child == 0:
    os._exit(7)
ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(len(signed.roots_pem) > 0, len(os.listdir("/proc/self/task")), ended, "grpc" in sys.modules)
"""
    with istiod.serving():
        command = [sys.executable, "-c", program, str(istiod.address), str(tmp_path)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said == "True 1 7 False\n"
