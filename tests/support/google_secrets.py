"""Google's Secret Manager, Cloud Storage and Cloud KMS on loopback, in one server: their REST APIs as far as
krun and berglas use them, with keys and encryption of its own."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shared.credentials.certificates.authority import Authority
from tests.support.gke_server import TOKEN
from tests.support.http1_server import NotingServer, received, server_tls

KEY = "projects/kms-project/locations/global/keyRings/berglas/cryptoKeys/berglas-key"

Answer = tuple[int, bytes]

_SECRET = re.compile(r"/v1/projects/([^/]+)/secrets/([^/]+)/versions/([^/]+):access")
_OBJECT = re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)")
_DECRYPT = re.compile(r"/v1/(projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+):decrypt")


@dataclass(slots=True)
class GoogleSecretsServer(NotingServer[str]):
    """`async with GoogleSecretsServer(authority) as server:` listens at `server.url` until the block ends; it
    notes the paths that it is asked for."""

    authority: Authority
    secrets: dict[tuple[str, str, str], bytes] = field(default_factory=dict)
    """Payloads by project, name and version."""
    stored: dict[tuple[str, str, str], tuple[dict[str, str], bytes]] = field(default_factory=dict)
    """Metadata and content by bucket, name and generation; the last one of a name is the latest."""
    kms: dict[str, bytes] = field(default_factory=lambda: {KEY: AESGCM.generate_key(256)})
    """Keys by their name."""
    tokens: set[str] = field(default_factory=lambda: {TOKEN})
    answer: Callable[[str], Answer | None] = lambda _: None
    """What it answers to a path instead of what it should; None: what it should."""
    headers: dict[str, str] = field(default_factory=dict)
    """Of the last request."""
    url: str = ""

    async def __aenter__(self) -> Self:
        pair = self.authority.issue(ip_addresses=["127.0.0.1"])
        self.url = f"https://127.0.0.1:{await self._listen(self._serve, tls=server_tls(pair))}"
        return self

    def settings(self) -> dict[str, str]:
        """krun's variables that lead here."""
        names = ("HBONE_SECRET_MANAGER_URL", "HBONE_STORAGE_URL", "HBONE_KMS_URL")
        return dict.fromkeys(names, self.url)

    def berglas(self, bucket: str, name: str, value: bytes, generation: str = "1", key: str = KEY) -> None:
        """Stores `value` as `berglas create` does."""
        own, nonce = AESGCM.generate_key(256), os.urandom(12)
        sealed = nonce + AESGCM(own).encrypt(nonce, value, None)
        outer = os.urandom(12)
        wrapped = outer + AESGCM(self.kms[key]).encrypt(outer, own, name.encode())
        content = base64.b64encode(wrapped) + b":" + base64.b64encode(sealed)
        self.stored[bucket, name, generation] = {"berglas-secret": "1", "berglas-kms-key": key}, content

    # Serving.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await received(reader)
        self.headers = request.headers
        await self._note(request.target)
        await self.gate.wait()
        status, body = self.answer(request.target) or self._answer(request.target, request.body)
        writer.write(request.answer(status, body, ("content-type", "application/json")))
        await writer.drain()

    def _answer(self, target: str, body: bytes) -> Answer:
        if self.headers.get("authorization", "").removeprefix("Bearer ") not in self.tokens:
            return error(401, "UNAUTHENTICATED")
        url = urlsplit(target)
        if found := _SECRET.fullmatch(url.path):
            return self._secret(*found.groups())
        if found := _OBJECT.fullmatch(url.path):
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            return self._object(unquote(found[1]), unquote(found[2]), query)
        if found := _DECRYPT.fullmatch(url.path):
            return self._decrypted(found[1], json.loads(body))
        return error(404, "NOT_FOUND")

    def _secret(self, project: str, name: str, version: str) -> Answer:
        value = self.secrets.get((project, name, version))
        if value is None:
            return error(404, "NOT_FOUND")
        payload = {"data": base64.b64encode(value).decode()}
        return _json({"name": f"projects/1/secrets/{name}/versions/1", "payload": payload})

    def _object(self, bucket: str, name: str, query: dict[str, str]) -> Answer:
        generations = [key[2] for key in self.stored if key[:2] == (bucket, name)]
        generation = query.get("generation") or (generations[-1] if generations else "")
        found = self.stored.get((bucket, name, generation))
        if found is None:
            return error(404, "NOT_FOUND")
        metadata, content = found
        if query.get("alt") == "media":
            return 200, content
        return _json({"bucket": bucket, "name": name, "generation": generation, "metadata": metadata})

    def _decrypted(self, name: str, body: dict[str, str]) -> Answer:
        if name not in self.kms:
            return error(404, "NOT_FOUND")
        sealed = base64.b64decode(body["ciphertext"])
        bound = base64.b64decode(body.get("additionalAuthenticatedData", ""))
        try:
            plain = AESGCM(self.kms[name]).decrypt(sealed[:12], sealed[12:], bound)
        except InvalidTag:
            return error(400, "INVALID_ARGUMENT")
        return _json({"plaintext": base64.b64encode(plain).decode(), "usedPrimary": True})


def error(status: int, code: str) -> Answer:
    """As Google's services answer it; like theirs, the message repeats what was asked for."""
    told = {"code": status, "status": code, "message": "Secret [projects/1/secrets/hunter2-name] is not so."}
    return status, json.dumps({"error": told}).encode()


def _json(content: dict[str, Any]) -> Answer:
    return 200, json.dumps(content).encode()
