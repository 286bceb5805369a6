"""Values in Google's Secret Manager, and those that berglas keeps in Cloud Storage.

berglas writes an object BASE64:BASE64. The first part is a key for this object, encrypted by the key of Cloud
KMS that the object's metadata name, with the object's name as additional authenticated data; the second is a
nonce and the value, encrypted with that key by AES-GCM (github.com/GoogleCloudPlatform/berglas, v2).

Everything is plain REST. No error has anything of a value, nor the names in a reference.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any
from urllib.parse import quote

from agent.config.mount_settings import MountSettings
from agent.config.references import SecretVersion, StoredObject
from shared.credentials.kubernetes.kubernetes_access import Bearer
from shared.credentials.token_sources.token_answers import said
from shared.errors import ConfigError, StatusError, UpstreamError
from shared.net.http1 import Response, request

TIMEOUT_S = 10.0
"""For one answer."""

MAX_BYTES = 4 << 20
"""Of an answer. Secret Manager has 64 KiB at most, and what is larger is hardly a secret."""

METADATA_KEY = "berglas-kms-key"
"""Of an object, with the resource name of its key."""

NONCE_BYTES = 12
"""Of AES-GCM as Go's standard library has it."""

_KEY = re.compile(
    r"(projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+)(?:/cryptoKeyVersions/[^/]+)?"
)

SECRET_MANAGER, STORAGE, KMS = "Secret Manager", "Cloud Storage", "Cloud KMS"

REJECTED = "it does not accept the access token of the metadata server"

HINTS = {
    SECRET_MANAGER: {
        400: "is that version enabled?",
        403: "the account needs the role secretmanager.secretAccessor on the secret",
        404: "there is no such secret, or version",
    },
    STORAGE: {
        403: "the account needs the role storage.objectViewer on the object",
        404: "there is no such object, or generation",
    },
    KMS: {
        400: "it has been encrypted with another key, or for an object of another name",
        403: "the account needs the role cloudkms.cryptoKeyDecrypter on the key",
        404: "there is no such key any more",
    },
}


class GoogleSecrets:
    """What the account that krun runs as may read."""

    def __init__(self, bearer: Bearer, settings: MountSettings) -> None:
        """`bearer` has access tokens of Google's."""
        self._bearer = bearer
        self._settings = settings

    async def secret(self, source: SecretVersion) -> bytes:
        """The payload of a version of a secret.

        Raises:
            StatusError: the service says no.
            ConfigError: what it has is malformed.
            DialError, UpstreamError, TokenError: it cannot be asked.
        """
        path = f"projects/{source.project}/secrets/{source.name}/versions/{source.version}"
        url = f"{self._settings.secret_manager_url}/v1/{path}:access"
        payload = _object(await self._ask(SECRET_MANAGER, "GET", url), SECRET_MANAGER).get("payload")
        return _decoded(SECRET_MANAGER, payload.get("data", "") if isinstance(payload, dict) else None)

    async def stored(self, source: StoredObject) -> bytes:
        """What berglas has encrypted. Raises the same."""
        place = f"{self._settings.storage_url}/storage/v1/b/{source.bucket}/o/{quote(source.name, safe='')}"
        asked = f"?generation={source.generation}" if source.generation else ""
        about = _object(await self._ask(STORAGE, "GET", f"{place}{asked}"), STORAGE)
        metadata, generation = about.get("metadata"), str(about.get("generation", ""))
        named = metadata.get(METADATA_KEY) if isinstance(metadata, dict) else None
        found = _KEY.fullmatch(named) if isinstance(named, str) else None
        if found is None:
            raise _malformed(STORAGE, f"the object is not berglas': its metadata have no {METADATA_KEY}")
        if not generation.isdigit():
            raise UpstreamError(f"broken answer from {STORAGE}: no generation")
        # Of this very generation: it may just be replaced, by one with another key.
        content = await self._ask(STORAGE, "GET", f"{place}?alt=media&generation={generation}")
        wrapped, colon, sealed = content.body.partition(b":")
        if not colon:
            raise _malformed(STORAGE, "the object is not berglas': it has no two parts")
        key = await self._unwrapped(found[1], _decoded(STORAGE, wrapped.decode("latin-1")), source.name)
        return _opened(key, _decoded(STORAGE, sealed.decode("latin-1")))

    async def _unwrapped(self, name: str, wrapped: bytes, of: str) -> bytes:
        """The key that the key `name` of Cloud KMS has encrypted for the object `of`."""
        body = {
            "ciphertext": base64.b64encode(wrapped).decode(),
            "additionalAuthenticatedData": base64.b64encode(of.encode()).decode(),
        }
        url = f"{self._settings.kms_url}/v1/{quote(name)}:decrypt"
        return _decoded(KMS, _object(await self._ask(KMS, "POST", url, body), KMS).get("plaintext"))

    async def _ask(self, service: str, method: str, url: str, body: dict[str, str] | None = None) -> Response:
        """When our token is rejected, and there is a new one, it is sent once more."""
        token = await self._bearer.token()
        response = await self._send(service, method, url, body, token)
        if response.status == 401:
            self._bearer.invalidate(token)
            renewed = await self._bearer.token()
            if renewed != token:
                response = await self._send(service, method, url, body, renewed)
        if response.status != 200:
            hint = REJECTED if response.status == 401 else HINTS[service].get(response.status)
            text = f"{service} answered {said(response)}{f'; {hint}' if hint else ''}"
            raise StatusError(response.status, text)
        return response

    async def _send(
        self, service: str, method: str, url: str, body: dict[str, str] | None, token: str | None
    ) -> Response:
        headers = {"authorization": f"Bearer {token}", "user-agent": "hbone"}
        if body is not None:
            headers["content-type"] = "application/json"
        if self._settings.quota_project:
            headers["x-goog-user-project"] = self._settings.quota_project
        content = b"" if body is None else json.dumps(body).encode()
        try:
            return await request(
                method, url, headers=headers, body=content, timeout_s=TIMEOUT_S, max_bytes=MAX_BYTES
            )
        except ValueError:
            raise UpstreamError(f"cannot ask {service}: the request cannot be sent") from None


def _opened(key: bytes, sealed: bytes) -> bytes:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], None)
    except (InvalidTag, ValueError):
        raise _malformed(STORAGE, "the object cannot be decrypted: it is damaged") from None


def _object(response: Response, service: str) -> dict[str, Any]:
    answer = response.json_object()
    if answer is None:
        raise UpstreamError(f"broken answer from {service}: no JSON object")
    return answer


def _decoded(service: str, text: object) -> bytes:
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
    except ValueError:
        pass
    raise _malformed(service, "what it has is no base64")


def _malformed(service: str, reason: str) -> ConfigError:
    return ConfigError(service, None, "", reason)
