"""x-forwarded-client-cert: what the app is told of its client's certificate, as Envoy tells it (Envoy, "HTTP
header manipulation", with subject, URI and DNS names)."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from cryptography import x509

_SEPARATORS = frozenset(',;="')


def forwarded(client: bytes, own: bytes) -> bytes:
    """The field's value: By (our name), Hash, Subject, URI and DNS (the client's). Both are certificates in
    DER, which TLS has accepted."""
    certificate = x509.load_der_x509_certificate(client)
    subject = certificate.subject.rfc4514_string()  # which escapes quotes
    elements = [f"By={_quoted(name)}" for name in _own_names(own)]
    elements += [f"Hash={hashlib.sha256(client).hexdigest()}", f'Subject="{subject}"']
    elements += [f"URI={_quoted(name)}" for name in _names(certificate, x509.UniformResourceIdentifier)]
    elements += [f"DNS={_quoted(name)}" for name in _names(certificate, x509.DNSName)]
    return ";".join(elements).encode("utf-8")


@lru_cache(maxsize=4)
def _own_names(own: bytes) -> list[str]:
    return _names(x509.load_der_x509_certificate(own), x509.UniformResourceIdentifier)


def _names(certificate: x509.Certificate, kind: type[x509.GeneralName]) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return [str(name.value) for name in names if isinstance(name, kind)]


def _quoted(value: str) -> str:
    """Quoted if it needs to be: it could be taken for several elements."""
    if _SEPARATORS.isdisjoint(value):
        return value
    return '"' + value.replace('"', '\\"') + '"'
