"""Google's CA Service on loopback: REST over TLS, as far as `google_cas` talks to it.

Checks what the service checks (token, path, query, the resource's fields), makes one certificate for each
request id, and signs with an `Authority`. Tests make it slow, refuse, or answer what they like.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_public_key

from shared.credentials.certificates.authority import Authority, KeyPair
from shared.trust.spiffe import SpiffeId
from tests.support.http1_server import PATIENCE_S, NotingServer, received, server_tls

POOL = "projects/mesh-project/locations/us-central1/caPools/workloads"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the server was asked."""

    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    content: Any


@dataclass(frozen=True, slots=True)
class Said:
    """An answer; a body that is no JSON goes out as it is."""

    content: object
    status: int = 200

    @property
    def body(self) -> bytes:
        return self.content.encode() if isinstance(self.content, str) else json.dumps(self.content).encode()


def error(status: int, name: str, message: str) -> Said:
    """An error in the form that Google's services have in common (google.aip.dev/193)."""
    return Said({"error": {"code": status, "message": message, "status": name}}, status)


@dataclass(slots=True)
class CasServer(NotingServer[Asked]):
    """`async with CasServer(authority, identity) as server:` listens at `server.endpoint` until the block
    ends. Whoever shows `token` is `identity`."""

    authority: Authority
    identity: SpiffeId
    token: str = "access-token"
    certificate: KeyPair | None = None
    """The server's own; one for 127.0.0.1 if not given."""
    answers: dict[str, Said | bytes] = field(default_factory=dict)
    """What is answered instead, by the path's end: `certificates`, `fetchCaCerts`. Bytes are sent as they
    are, empty ones close the connection; the certificate is made all the same."""
    once: dict[str, Said | bytes] = field(default_factory=dict)
    """The same for the next request only."""
    accepts: Callable[[str], bool] | None = None
    """Whether a token is good, in place of `token`."""
    made: dict[str, dict[str, object]] = field(default_factory=dict)
    """Certificates by request id."""
    endpoint: str = ""

    def tls(self) -> ssl.SSLContext:
        """What a client needs to trust it."""
        return ssl.create_default_context(cadata=self.authority.root_pem.decode())

    async def __aenter__(self) -> Self:
        pair = self.certificate or self.authority.issue(ip_addresses=["127.0.0.1"])
        self.endpoint = f"https://127.0.0.1:{await self._listen(self._serve, tls=server_tls(pair))}"
        return self

    @property
    def asked(self) -> list[Asked]:
        return self.requests

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await received(reader)
        assert request.method == "POST"
        url = urlsplit(request.target)
        asked = Asked(url.path, parse_qs(url.query), request.headers, json.loads(request.body))
        await self._note(asked)
        said = self._answer(asked)
        await asyncio.wait_for(self.gate.wait(), PATIENCE_S)
        writer.write(said if isinstance(said, bytes) else request.answer(said.status, said.body))
        await writer.drain()

    def _answer(self, asked: Asked) -> Said | bytes:
        scheme, _, token = asked.headers.get("authorization", "").partition(" ")
        good = token == self.token if self.accepts is None else self.accepts(token)
        if scheme != "Bearer" or not good:
            return error(401, "UNAUTHENTICATED", "Request had invalid authentication credentials.")
        if asked.path == f"/v1/{POOL}:fetchCaCerts":
            chains = [{"certificates": [self.authority.root_pem.decode()]}]
            return self.answers.get("fetchCaCerts") or Said({"caCerts": chains})
        if asked.path == f"/v1/{POOL}/certificates":
            made = self._certificate(asked)
            return self.once.pop("certificates", self.answers.get("certificates", made))
        return Said("<html>not found</html>", 404)

    def _certificate(self, asked: Asked) -> Said:
        (request_id,), (name,) = asked.query["requestId"], asked.query["certificateId"]
        if request_id in self.made:
            return Said(self.made[request_id])
        uuid.UUID(request_id)
        config, mode = asked.content["config"], asked.content["subjectMode"]
        assert config["x509Config"]["caOptions"] == {"isCa": False}
        usage = config["x509Config"]["keyUsage"]
        assert usage["extendedKeyUsage"] == {"serverAuth": True, "clientAuth": True}
        assert config["publicKey"]["format"] == "PEM"
        identity = self.identity
        if mode == "DEFAULT":
            (uri,) = config["subjectConfig"]["subjectAltName"]["uris"]
            identity = SpiffeId.parse(uri)
        key = load_pem_public_key(base64.b64decode(config["publicKey"]["key"], validate=True))
        lifetime_s = int(asked.content["lifetime"].removesuffix("s"))
        assert isinstance(key, rsa.RSAPublicKey | ec.EllipticCurvePublicKey)
        leaf = self.authority.certify(key, identity, lifetime_s=lifetime_s)
        self.made[request_id] = {
            "name": f"{POOL}/certificates/{name}",
            "pemCertificate": leaf.public_bytes(Encoding.PEM).decode(),
            "pemCertificateChain": [self.authority.root_pem.decode()],
        }
        return Said(self.made[request_id])
