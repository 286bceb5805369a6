"""A new key and the request for its certificate."""

from __future__ import annotations

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from shared.credentials.certificates.authority import Authority
from shared.credentials.certificates.certificate_request import KEY_KINDS, KeyKind, new_request
from shared.net.tls.certificate_check import load_chain, public_key_der
from shared.trust.spiffe import SpiffeId

HELLO = SpiffeId.of_workload("demo.local", "demo", "hello")


@pytest.mark.parametrize("kind", KEY_KINDS)
def test_the_request_asks_for_one_name_and_is_signed_with_its_key(kind: KeyKind) -> None:
    made = new_request(HELLO, kind)
    request = x509.load_pem_x509_csr(made.request_pem)
    assert request.is_signature_valid
    (extension,) = request.extensions
    assert list(extension.value) == [x509.UniformResourceIdentifier(str(HELLO))]
    assert extension.critical, "the subject is empty"
    assert list(request.subject) == []
    key = load_pem_private_key(made.key_pem, None)
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert public == made.public_key_der
    if kind == "rsa":
        assert isinstance(key, rsa.RSAPrivateKey)
        assert key.key_size == 2048
    else:
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        assert isinstance(key.curve, ec.SECP256R1)


def test_each_has_a_key_of_its_own_which_it_does_not_show() -> None:
    one, other = new_request(HELLO), new_request(HELLO)
    assert one.public_key_der != other.public_key_der
    assert "PRIVATE" not in repr(one)


@pytest.mark.parametrize("kind", KEY_KINDS)
def test_an_authority_signs_it(kind: KeyKind) -> None:
    made, mesh = new_request(HELLO, kind), Authority.create("demo.local")
    leaf = mesh.sign(made.request_pem, HELLO)
    assert public_key_der(leaf) == made.public_key_der
    assert load_chain(leaf.public_bytes(Encoding.PEM)) == (leaf,)
