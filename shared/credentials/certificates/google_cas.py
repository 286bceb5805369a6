"""Google's Certificate Authority Service: certificates signed by a pool of authorities, over REST.

The requests are `certificates.create` and `fetchCaCerts` of privateca v1.

We ask for a certificate by its public key and what it is for, and do not pass on the certificate request: the
service adds what the mesh needs (server and client authentication) even if the request asks for nothing, and
as a rule names the caller itself (REFLECTED_SPIFFE), for which a smaller role is enough.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import ssl
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

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
from shared.credentials.certificates.signing import Signed
from shared.errors import HboneError, SigningError
from shared.net import http1
from shared.net.http1 import Response, Target

log = logging.getLogger("hbone.google_cas")

ENDPOINT = "https://privateca.googleapis.com"

RETRY_PAUSE_S = 0.5
"""Before a request is made once more: long enough for another server of the service to be found."""

ANSWER_S = 1.0
"""What the service takes for an answer; with less time left there is no second attempt."""

HINTS = {
    400: "is the pool's issuance policy one that allows such certificates?",
    401: "is the access token for the scope cloud-platform?",
    404: "there is no such pool, or no authority in it is enabled",
    429: "the pool's quota is used up",
}
"""What mostly is behind a status."""

REFLECTED_ROLE = "privateca.workloadCertificateRequester"
"""Enough for certificates that name the caller."""

REQUESTED_ROLE = "privateca.certificateRequester"
"""Needed for all others."""

_POOL = re.compile(r"projects/[A-Za-z0-9:._-]+/locations/[a-z0-9-]+/caPools/[A-Za-z0-9_-]+")


def is_pool(name: str) -> bool:
    """Whether `name` is projects/P/locations/L/caPools/NAME."""
    return _POOL.fullmatch(name) is not None


class GoogleCas:
    """A pool of the service as a `Signer`."""

    def __init__(
        self,
        pool: str,
        token: Token,
        *,
        rejected: Callable[[str], None] = lambda token: None,
        endpoint: str = ENDPOINT,
        reflected: bool = True,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
        retry_pause_s: float = RETRY_PAUSE_S,
    ) -> None:
        """`pool` is `projects/P/locations/L/caPools/N`; `rejected` hears of a token that the service does not
        take, so that the next one is another. With `reflected` the certificate names whom the token
        stands for, else what the request asks for, which takes the role privateca.certificateRequester. `tls`
        None means the system's trust. `timeout_s` bounds one `sign` in seconds, `retry_pause_s` lie before
        a second attempt.

        Raises ValueError when `pool` or `endpoint` is malformed.
        """
        if not is_pool(pool):
            raise ValueError(f"CA pool {quoted(pool)} is not projects/P/locations/L/caPools/NAME")
        self._pool = pool
        self._url = f"{endpoint.rstrip('/')}/v1/{pool}"
        self._target = Target.parse(self._url)
        self._token = token
        self._rejected = rejected
        self._reflected = reflected
        self._tls = tls
        self._timeout_s = timeout_s
        self._retry_pause_s = retry_pause_s

    @property
    def name(self) -> str:
        return f"CA pool {self._pool} at {self._target}"

    async def sign(self, request_pem: bytes, lifetime_s: float) -> Signed:
        """As `signing.Signer.sign` has it. A request that got no answer is made again under the same id, so
        that the service makes one certificate."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        certificate = self._certificate(request_pem, lifetime_s)
        token = await bearer(self._token, self.name, self._timeout_s)
        roots = await self._roots(token, deadline)
        request_id = str(uuid.uuid4())
        path = f"/certificates?certificateId=hbone-{request_id}&requestId={request_id}"
        response = await self._post(path, certificate, token, deadline)
        if response.status != 200:
            raise self._refusal(response, token)
        return self._signed(self._content(response), roots)

    # Requests.

    def _certificate(self, request_pem: bytes, lifetime_s: float) -> dict[str, object]:
        """The resource `Certificate` as we want it."""
        try:
            request = x509.load_pem_x509_csr(request_pem)
            key = request.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        except ValueError as error:
            raise SigningError(f"{self.name}: our own certificate request cannot be read") from error
        subject: dict[str, object] = {"subject": {}}
        if not self._reflected:
            subject["subjectAltName"] = {"uris": _uris(request)}
        usage = {
            "baseKeyUsage": {"digitalSignature": True, "keyEncipherment": True},
            "extendedKeyUsage": {"serverAuth": True, "clientAuth": True},
        }
        return {
            "lifetime": f"{int(lifetime_s)}s",
            "config": {
                "subjectConfig": subject,
                "x509Config": {"keyUsage": usage, "caOptions": {"isCa": False}},
                "publicKey": {"format": "PEM", "key": base64.b64encode(key).decode()},
            },
            "subjectMode": "REFLECTED_SPIFFE" if self._reflected else "DEFAULT",
        }

    async def _post(self, path: str, content: Mapping[str, object], token: str, deadline: float) -> Response:
        """The answer to a request; it is made once more if there was none, or the service is in trouble."""
        try:
            response = await self._exchange(path, content, token, deadline)
        except SigningError:
            if left(deadline) < self._retry_pause_s + ANSWER_S:
                raise
        else:
            if response.status < 500 or left(deadline) < self._retry_pause_s + ANSWER_S:
                return response
        await asyncio.sleep(self._retry_pause_s)
        return await self._exchange(path, content, token, deadline)

    async def _exchange(
        self, path: str, content: Mapping[str, object], token: str, deadline: float
    ) -> Response:
        try:
            return await http1.request(
                "POST",
                self._url + path,
                headers={"authorization": f"Bearer {token}", "content-type": "application/json"},
                body=json.dumps(content).encode(),
                timeout_s=left(deadline),
                max_bytes=MAX_ANSWER_BYTES,
                tls=self._tls,
            )
        except (HboneError, ValueError) as error:
            raise SigningError(f"CA pool {self._pool}: {error}") from error

    async def _roots(self, token: str, deadline: float) -> list[x509.Certificate] | None:
        """What the pool's certificates lead to; None: we may not ask, for want of privateca.caPools.get."""
        response = await self._post(":fetchCaCerts", {}, token, deadline)
        if response.status == 403:
            log.debug("%s: the role privateca.poolReader is missing to see all its roots", self.name)
            return None
        if response.status != 200:
            raise self._refusal(response, token)
        chains = self._content(response).get("caCerts")
        found = chains if isinstance(chains, list) else []
        lists = [_texts(chain.get("certificates")) for chain in found if isinstance(chain, dict)]
        last = [texts[-1] for texts in lists if texts]
        return certificates(list(dict.fromkeys(last)), self.name, "its list of roots")

    # Answers.

    def _signed(self, answer: Mapping[str, Any], roots: list[x509.Certificate] | None) -> Signed:
        texts = _texts([answer.get("pemCertificate")]) + _texts(answer.get("pemCertificateChain"))
        chain = certificates(texts, self.name, "the certificate in its answer")
        # The service sends the root along; a chain for peers goes without.
        own = [certificate for certificate in chain[1:] if certificate.issuer == certificate.subject]
        sent = [certificate for certificate in chain if certificate not in own]
        return Signed(to_pem(sent), to_pem(own if roots is None else roots))

    def _refusal(self, response: Response, token: str) -> SigningError:
        if response.status == 401:
            self._rejected(token)
        error = (response.json_object() or {}).get("error")
        parts = (error.get("status"), error.get("message")) if isinstance(error, dict) else ()
        said = ": ".join(part for part in parts if isinstance(part, str))
        hint = HINTS.get(response.status, "")
        if response.status == 403:
            role = REFLECTED_ROLE if self._reflected else REQUESTED_ROLE
            hint = f"the caller needs the role {role} on the pool"
        return refused(self.name, str(response.status), quoted(said, token), hint)

    def _content(self, response: Response) -> dict[str, Any]:
        content = response.json_object()
        if not content:
            raise SigningError(f"{self.name}: its answer is not JSON, or has nothing in it")
        return content


def _texts(content: object) -> list[str]:
    return [text for text in content if isinstance(text, str)] if isinstance(content, list) else []


def _uris(request: x509.CertificateSigningRequest) -> list[str]:
    try:
        names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)
