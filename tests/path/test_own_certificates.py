"""A workload that has no certificates mounted: krun gets token and certificate itself, and renews them.

TLS client → hgate → hbone cloudrun → krun → Envoy or built-in → app, where krun keeps the token that it asks
the API server for, shows it to istiod, and what istiod signs is what the client sees.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from hbone.demo.mesh import TRUST_DOMAIN
from shared.credentials.certificates.authority import Authority
from tests.path.app import App, lasting
from tests.path.tls_client import another_serial, connected, says_back, serial_of
from tests.support.api_server import SERVICE_ACCOUNT, kubeconfig, threaded_api_server
from tests.support.istiod import Istiod
from tests.support.revocation import serial_in
from tests.support.tls_client import read_to_the_end
from tests.support.world import INBOUNDS, WORKLOAD, running

LIFETIME_S = 20
"""Of a certificate, which is renewed after 2 to 4 s and so has another 16 to live on a busy machine."""

RENEWALS = 3


@pytest.mark.parametrize("inbound", INBOUNDS)
def test_token_and_certificate_of_krun_s_own(inbound: str, tmp_path: Path) -> None:
    mesh = Authority.create(TRUST_DOMAIN)
    with ExitStack() as block:
        app = block.enter_context(App(lasting(b"hello\n")))
        server = block.enter_context(threaded_api_server())
        istiod = Istiod(
            mesh, WORKLOAD, review=lambda token: server.reviewed(token, TRUST_DOMAIN), lifetime_s=LIFETIME_S
        )
        block.enter_context(istiod.serving())
        (tmp_path / "kubeconfig").write_text(kubeconfig(server))
        own, token_file = tmp_path / "own", tmp_path / "tokens" / "istio-token"
        told = {
            "HBONE_CERTS": str(own),
            "HBONE_CA": "istio",
            "CA_ADDR": str(istiod.address),
            "CAROOT_ISTIOD": mesh.root_pem.decode(),
            "HBONE_CERT_RENEW_AT": "0.2",
            "TRUST_DOMAIN": TRUST_DOMAIN,
            "WORKLOAD_SERVICE_ACCOUNT": SERVICE_ACCOUNT,  # the namespace is the kubeconfig's
            "HBONE_K8S_TOKENS": f"istio-ca={token_file}",
            "KUBECONFIG": str(tmp_path / "kubeconfig"),
        }
        world = block.enter_context(
            running(tmp_path, inbound=inbound, app=app.address, environ=told, mesh=mesh)
        )
        with connected(world) as first:
            assert first.recv(100) == b"hello\n"
            serials = [serial_of(first)]
            while len(serials) <= RENEWALS:
                serials.append(another_serial(world, serials, b"hello\n"))
                says_back(first, b"still here\n")
            first.shutdown()
            assert read_to_the_end(first) == b""
        token = token_file.read_text()
        calls = list(istiod.calls)
        assert {call.metadata["authorization"] for call in calls} == {f"Bearer {token}"}
        assert server.reviewed(token, TRUST_DOMAIN) == WORKLOAD
        assert [one.method for one in server.asked].count("POST") == 1, "a token of an hour"
        assert len({public_key(call.message.csr) for call in calls}) == len(calls), "a new key each time"
        assert serial_in(own) not in serials[:RENEWALS]
    for file, mode in ((token_file, 0o600), (own / "private_key.pem", 0o600)):
        assert file.stat().st_mode & 0o777 == mode


def public_key(request_pem: str) -> bytes:
    request = x509.load_pem_x509_csr(request_pem.encode())
    return request.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
