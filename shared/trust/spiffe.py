"""SPIFFE names: read, and taken from certificates, by the text rules of the SPIFFE-ID standard and the leaf
rules of X509-SVID. Chains are verified by the TLS library before `peer_id` is called.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.errors import DeniedError

if TYPE_CHECKING:
    from cryptography import x509

SCHEME = "spiffe://"

MAX_URI_BYTES = 2048
"""SPIFFE-ID section 2.3: what everybody has to accept and nobody may exceed."""

MAX_TRUST_DOMAIN_BYTES = 255
"""SPIFFE-ID section 2.3, from the limit that RFC 3986 names for a host."""

SHOWN_CHARS = 200
"""How much of a refused name goes into an error: enough to recognise it, too little to fill a log."""

_TRUST_DOMAIN = re.compile(r"[a-z0-9._-]+")
SEGMENT_TEXT = r"[A-Za-z0-9._-]+"
"""A path segment, as a regular expression."""

_SEGMENT = re.compile(SEGMENT_TEXT)


@dataclass(frozen=True, slots=True)
class SpiffeId:
    """One workload's name, always a valid one (SPIFFE-ID section 2).

    Raises ValueError with the reason when made from parts that no SPIFFE ID may have.
    """

    trust_domain: str
    """The authority that issues the name, `demo.local`."""

    path: str
    """Empty for the trust domain itself, else `/` and segments: `/ns/demo/sa/hello`."""

    def __post_init__(self) -> None:
        reason = _fault(self.trust_domain, self.path)
        if reason is not None:
            raise ValueError(f"no SPIFFE ID: {shown(str(self))}: {reason}")

    def __str__(self) -> str:
        return f"{SCHEME}{self.trust_domain}{self.path}"

    @classmethod
    def parse(cls, uri: str) -> SpiffeId:
        """Reads a SPIFFE ID from its URI text.

        Raises ValueError with the reason: another scheme (compared as written, in lower case), characters
        outside the standard's set (which leaves no room for a port, a query or percent signs), empty
        segments, `.` and `..`, or more than 2048 bytes.
        """
        if not uri.startswith(SCHEME):
            raise ValueError(f"no SPIFFE ID: {shown(uri)}: it does not start with {SCHEME}")
        if len(uri) > MAX_URI_BYTES:
            raise ValueError(f"no SPIFFE ID: {shown(uri)}: it is longer than {MAX_URI_BYTES} bytes")
        trust_domain, slash, rest = uri[len(SCHEME) :].partition("/")
        return cls(trust_domain, slash + rest)

    @classmethod
    def of_workload(cls, trust_domain: str, namespace: str, service_account: str) -> SpiffeId:
        """The name Istio gives to a Kubernetes service account: `/ns/NAMESPACE/sa/SERVICE_ACCOUNT`."""
        return cls(trust_domain, f"/ns/{namespace}/sa/{service_account}")

    @property
    def namespace(self) -> str | None:
        """The Kubernetes namespace, None where the path is not of the form `/ns/X/sa/Y`."""
        workload = self._workload()
        return None if workload is None else workload[0]

    @property
    def service_account(self) -> str | None:
        """The Kubernetes service account, None where the path is not of the form `/ns/X/sa/Y`."""
        workload = self._workload()
        return None if workload is None else workload[1]

    def _workload(self) -> tuple[str, str] | None:
        match self.path.split("/"):
            case ["", "ns", namespace, "sa", service_account]:
                return namespace, service_account
        return None


def _fault(trust_domain: str, path: str) -> str | None:
    """What keeps these two parts from being a SPIFFE ID, None when nothing does."""
    if not trust_domain:
        return "the trust domain is empty"
    if len(trust_domain) > MAX_TRUST_DOMAIN_BYTES:
        return f"the trust domain is longer than {MAX_TRUST_DOMAIN_BYTES} bytes"
    if _TRUST_DOMAIN.fullmatch(trust_domain) is None:
        return "the trust domain may have only a-z 0-9 . - _"
    if len(SCHEME) + len(trust_domain) + len(path) > MAX_URI_BYTES:
        return f"it is longer than {MAX_URI_BYTES} bytes"
    if not path:
        return None
    root, *segments = path.split("/")
    if root:
        return "the path does not start with /"
    return next((fault for fault in map(_segment_fault, segments) if fault is not None), None)


def _segment_fault(segment: str) -> str | None:
    if not segment:
        return "a path segment is empty"
    if segment in (".", ".."):
        return "a path segment is . or .."
    if _SEGMENT.fullmatch(segment) is None:
        return "a path segment may have only a-z A-Z 0-9 . - _"
    return None


def shown(text: str) -> str:
    """`text` for an error: quoted, and cut short."""
    return repr(text) if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]!r}..."


# Names in certificates.


def ids_of(certificate_der: bytes) -> list[SpiffeId]:
    """All SPIFFE IDs among a certificate's URI names, in its order, for showing; URIs of other schemes are
    left out.

    Raises ValueError when the certificate cannot be read or a `spiffe:` URI in it is malformed. To decide
    about a peer use `peer_id`, which is strict.
    """
    return [SpiffeId.parse(uri) for uri in _uris(_load(certificate_der)) if uri.startswith("spiffe:")]


def peer_id(certificate_der: bytes) -> SpiffeId:
    """The one identity that a verified peer certificate proves (X509-SVID sections 2, 3.1 and 5.2).

    Raises DeniedError when it names none or several URIs, when the URI is no SPIFFE ID with a path, or when
    the certificate is one that signs others.
    """
    try:
        certificate = _load(certificate_der)
        uris = _uris(certificate)
        if len(uris) != 1:
            raise DeniedError(
                f"peer certificate denied: it has {len(uris)} URI names instead of one, so it is no X509-SVID"
            )
        identity = SpiffeId.parse(uris[0])
        signs = _may_sign(certificate)
    except ValueError as error:
        raise DeniedError(f"peer certificate denied: {error}") from error
    if signs:
        raise DeniedError(f"peer certificate denied: {identity} signs certificates and may not act as a peer")
    if not identity.path:
        raise DeniedError(f"peer certificate denied: {identity} names a trust domain, not a workload")
    return identity


def _load(certificate_der: bytes) -> x509.Certificate:
    from cryptography import x509

    try:
        certificate = x509.load_der_x509_certificate(certificate_der)
        # Parsed on first access: done here, so that every later look at an extension is sure to succeed.
        _ = certificate.extensions
    except (x509.DuplicateExtension, x509.InvalidVersion, x509.UnsupportedGeneralNameType) as error:
        raise ValueError(f"certificate cannot be read: {error}") from error
    return certificate


def _uris(certificate: x509.Certificate) -> list[str]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def _may_sign(certificate: x509.Certificate) -> bool:
    from cryptography import x509

    for extension in certificate.extensions:
        value = extension.value
        if isinstance(value, x509.BasicConstraints) and value.ca:
            return True
        if isinstance(value, x509.KeyUsage) and (value.key_cert_sign or value.crl_sign):
            return True
    return False
