"""The metadata server of the stand-in: ID tokens in Google's form, signed with a key of our own.

Serves the paths that Google's libraries and the gateway request (cloud.google.com/compute/docs/metadata). Its
tokens are no credentials for anything real.
"""

from __future__ import annotations

import json

from shared.address import Address
from shared.ops.http_server import Handler, HttpServer, Request, Response
from shared.trust.jwt_check import Issuer

_ACCOUNT = "/computeMetadata/v1/instance/service-accounts/default"
_FLAVOR = (("Metadata-Flavor", "Google"),)

KEYS_PATH = "/oauth2/v3/certs"
"""The path on www.googleapis.com of the keys that sign Google's tokens; here it has our own."""


class MetadataServer:
    """Mints tokens for `email` with `issuer`."""

    def __init__(self, issuer: Issuer, email: str) -> None:
        self._issuer = issuer
        self._email = email
        fixed = {
            f"{_ACCOUNT}/email": email,
            "/computeMetadata/v1/project/project-id": "local",
            "/computeMetadata/v1/project/numeric-project-id": "1",
            "/computeMetadata/v1/instance/region": "projects/1/regions/local",
        }
        keys = json.dumps(issuer.jwks()).encode()
        routes: dict[tuple[str, str], Handler] = {("GET", path): _fixed(text) for path, text in fixed.items()}
        routes["GET", "/"] = lambda _: Response(
            200, "text/html", b"", _FLAVOR
        )  # Google's libraries ask whether this is one
        routes["GET", f"{_ACCOUNT}/identity"] = self._identity
        routes["GET", KEYS_PATH] = lambda _: Response(200, "application/json", keys)
        self._server = HttpServer(routes, name="metadata")

    async def start(self, address: Address) -> Address:
        """Listens on `address` and returns where it really does. Raises UnavailableError."""
        return await self._server.start(address)

    async def close(self) -> None:
        """Stops listening."""
        await self._server.close()

    def _identity(self, request: Request) -> Response:
        if not _has_flavor(request):
            return _REFUSED
        audience = request.query.get("audience")
        if not audience:
            return Response.text(400, "non-empty audience parameter required")
        token = self._issuer.mint(audience, email=self._email)
        return Response(200, "text/html", token.encode(), _FLAVOR)


_REFUSED = Response.text(403, "Missing required header: Metadata-Flavor: Google")


def _has_flavor(request: Request) -> bool:
    return request.headers.get("metadata-flavor") == "Google"


def _fixed(text: str) -> Handler:
    def handler(request: Request) -> Response:
        return Response(200, "application/text", text.encode(), _FLAVOR) if _has_flavor(request) else _REFUSED

    return handler
