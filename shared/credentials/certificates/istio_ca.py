"""Istio's own authority: certificates signed by istiod, over gRPC.

The call is `istio.v1.auth.IstioCertificateService/CreateCertificate`. A bearer token proves us, or the
certificate that is to be renewed.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from shared import regular_files
from shared.address import Address
from shared.credentials.certificates.authority_client import (
    MAX_ANSWER_BYTES,
    TIMEOUT_S,
    Token,
    bearer,
    certificates,
    left,
    quoted,
    refused,
    to_pem,
)
from shared.credentials.certificates.protobuf_fields import bytes_field, fields, integer_field
from shared.credentials.certificates.signing import Signed
from shared.errors import HboneError, SigningError
from shared.net import grpc
from shared.net.dial import reason
from shared.net.tls import certificate_check, contexts

log = logging.getLogger("hbone.istio_ca")

METHOD = "/istio.v1.auth.IstioCertificateService/CreateCertificate"

SERVER_NAME = "istiod.istio-system.svc"
"""What istiod's certificate says, however it is reached (port-forward, a gateway)."""

CLUSTER_ID = "Kubernetes"
"""What Istio calls a cluster unless told otherwise; istiod looks there for whoever issued the token."""

HINTS = {
    "UNAUTHENTICATED": "is the token for the audience istio-ca, and of the cluster that CLUSTER_ID names?",
    "PERMISSION_DENIED": "the authority does not sign for this identity",
    "INVALID_ARGUMENT": "is the trust domain the authority's?",
    "UNIMPLEMENTED": "there is no Istio CA at this address; it is on port 15012 of istiod",
    "UNAVAILABLE": "is istiod ready?",
    "DEADLINE_EXCEEDED": "is istiod overloaded?",
}
"""What mostly is behind a status."""

# Fields of istio.v1.auth.IstioCertificateRequest, its metadata (google.protobuf.Struct), and the answer.
_CSR, _VALIDITY_DURATION, _METADATA = 1, 3, 4
_STRUCT_FIELDS, _ENTRY_KEY, _ENTRY_VALUE, _STRING_VALUE = 1, 1, 2, 3
_CERT_CHAIN = 1


class IstioCa:
    """istiod as a `Signer`."""

    def __init__(
        self,
        address: Address,
        *,
        roots: Callable[[], bytes] | None,
        token: Token | None = None,
        certificate: tuple[Path, Path] | None = None,
        cluster_id: str = CLUSTER_ID,
        server_name: str = SERVER_NAME,
        cert_signer: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`roots` gives what the server's certificate has to lead to, in PEM, and is asked for each call;
        None: the system's. `certificate` names the files of our own chain and key: shown to the server while
        the first is valid, else only `token` speaks for us. `cert_signer` names one of several signers, where
        istiod has them. `timeout_s` bounds one `sign` in seconds.

        Raises ValueError when there is neither `token` nor `certificate`.
        """
        if token is None and certificate is None:
            raise ValueError("nothing to prove ourselves with to Istio's CA: no token, no certificate")
        self._address = address
        self._roots = roots
        self._token = token
        self._certificate = certificate
        self._cluster_id = cluster_id
        self._server_name = server_name
        self._cert_signer = cert_signer
        self._timeout_s = timeout_s

    @property
    def name(self) -> str:
        return f"Istio's CA at {self._address}"

    async def sign(self, request_pem: bytes, lifetime_s: float) -> Signed:
        """As `signing.Signer.sign` has it."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        token = "" if self._token is None else await bearer(self._token, self.name, self._timeout_s)
        try:
            reply = await grpc.call(
                self._address,
                METHOD,
                self._message(request_pem, lifetime_s),
                tls=self._context(),
                server_name=self._server_name,
                metadata=self._metadata(token),
                timeout_s=left(deadline),
                max_bytes=MAX_ANSWER_BYTES,
            )
        except (HboneError, ValueError) as error:
            raise SigningError(f"{self.name}: {error}{self._roots_hint(error)}") from error
        if reply.code != "OK":
            raise self._refusal(reply, token)
        return self._signed(reply.message)

    def _message(self, request_pem: bytes, lifetime_s: float) -> bytes:
        message = bytes_field(_CSR, request_pem) + integer_field(_VALIDITY_DURATION, int(lifetime_s))
        if self._cert_signer:
            value = bytes_field(_STRING_VALUE, self._cert_signer.encode())
            entry = bytes_field(_ENTRY_KEY, b"CertSigner") + bytes_field(_ENTRY_VALUE, value)
            message += bytes_field(_METADATA, bytes_field(_STRUCT_FIELDS, entry))
        return message

    def _metadata(self, token: str) -> dict[str, str]:
        metadata = {"clusterid": self._cluster_id}
        if token:
            metadata["authorization"] = f"Bearer {token}"
        return metadata

    def _roots_hint(self, error: Exception) -> str:
        """Which variables would make the server's certificate a trusted one, if that is what is wrong."""
        if not isinstance(error.__cause__, ssl.SSLCertVerificationError):
            return ""
        if self._roots is None:
            return (
                "; no roots of the mesh are set (HBONE_ROOTS, CAROOT_ISTIOD), so only public ones are trusted"
            )
        return "; are its roots among those of HBONE_ROOTS and CAROOT_ISTIOD?"

    def _refusal(self, reply: grpc.Reply, token: str) -> SigningError:
        return refused(self.name, reply.code, quoted(reply.text, token), HINTS.get(reply.code, ""))

    def _signed(self, message: bytes) -> Signed:
        """The chain without its last part, which is the root, or several."""
        try:
            parts = [_text(value) for number, value in fields(message) if number == _CERT_CHAIN]
        except ValueError as error:
            raise SigningError(f"{self.name}: its answer cannot be read: {error}") from error
        # A single part is a leaf under roots that the mesh knows already.
        chain, roots = (parts[:-1], parts[-1:]) if len(parts) > 1 else (parts, [])
        found = certificates(chain, self.name, "the certificate chain in its answer")
        trusted = certificates(roots, self.name, "the root in its answer") if roots else []
        return Signed(to_pem(found), to_pem(trusted))

    # What the connection is made with; files and roots are read each time, for they change.

    def _context(self) -> ssl.SSLContext:
        try:
            context = contexts.client_of(
                None if self._roots is None else self._roots(), alpn=contexts.ALPN_H2
            )
        except ValueError as error:
            told = "the roots that its own certificate has to lead to cannot be used"
            raise SigningError(f"{told}: {error}") from error
        if self._certificate is not None:
            chain, key = self._certificate
            try:
                _check_dates(chain)
                contexts.load_own(context, chain, key)
            except (OSError, ValueError) as error:
                cause = reason(error) if isinstance(error, OSError) else str(error)
                told = f"our certificate {chain} with key {key} does not serve: {cause}"
                if self._token is None:
                    raise SigningError(told) from error
                log.debug("%s is asked with a token only: %s", self.name, told)
        return context


def _text(value: int | bytes) -> str:
    if isinstance(value, int):
        raise ValueError("its certificates are numbers")
    return value.decode()


def _check_dates(chain: Path) -> None:
    """Raises ValueError for a certificate that istiod's TLS would refuse, and the token with it."""
    leaf = certificate_check.load_chain(regular_files.read(chain, regular_files.MAX_PEM_BYTES))[0]
    if leaf.not_valid_after_utc <= datetime.now(UTC):
        raise ValueError(f"it expired at {certificate_check.shown(leaf.not_valid_after_utc)}")
