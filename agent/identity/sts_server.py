"""A token exchange for Envoy and other programs in the container (RFC 8693): their token for one of Google's.

The errors are those of RFC 6749 section 5.2 and RFC 8693 section 2.2.2. Callers keep the tokens themselves,
by `expires_in`. The subject token is the caller's only credential, and krun lends nothing of its own
identity: so whoever reaches the port gains nothing that the token would not give at Google's own. The port
is on loopback all the same, for the answers are not encrypted, and it answers no web page.

For which audience which token, as the original has it: none, or one of Google's APIs: the federated access
token; any other, such as a Cloud Run service: an ID token of the service account behind it.
`requested_token_type` id_token makes it an ID token in any case. The ID token is in `access_token` as well,
because clients look for it there.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

from shared.address import Address
from shared.credentials.tokens.minting import Minted
from shared.errors import SubjectRefusedError, TargetRefusedError, TokenError
from shared.ops.http_server import HttpServer, Limits, Request, Response
from shared.ops.log import one_line
from shared.trust.token_claims import MAX_TOKEN_BYTES, claims_of, describe

log = logging.getLogger("hbone.sts")

PATH = "/token"
FORM = "application/x-www-form-urlencoded"

GRANT_TYPE = "urn:ietf:params:oauth:grant-type:token-exchange"

# RFC 8693 section 3.
ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"
ID_TOKEN = "urn:ietf:params:oauth:token-type:id_token"
JWT = "urn:ietf:params:oauth:token-type:jwt"

SUBJECT_TYPES = (JWT, ID_TOKEN)
REQUESTED_TYPES = ("", ACCESS_TOKEN, JWT, ID_TOKEN)

GOOGLE_APIS = "googleapis.com"

LIMITS = Limits(body_bytes=32 * 1024, request_s=20.0, connections=32)
"""A subject token has 16 KiB at most; two exchanges at Google's have 5 s each, the original's timeout. Envoy
asks for one token at a time for each of its clusters that needs one."""

MAX_FIELDS = 32
"""RFC 8693 has ten."""

MAX_AUDIENCE_CHARS = 2048

REPEATABLE = frozenset({"audience", "resource"})
"""RFC 8693 section 2.1; any other may come once only (RFC 6749 section 3.2)."""


class Exchange(Protocol):
    """What is behind the port."""

    async def access_token(self, subject: str) -> Minted:
        """A federated access token for the Kubernetes token `subject`.

        Raises:
            SubjectRefusedError: the subject is no good.
            TargetRefusedError: nothing can be had for any subject.
            TokenError: everything else.
        """
        ...

    async def id_token(self, subject: str, audience: str) -> Minted:
        """An ID token for `audience`. Raises as `access_token` does."""
        ...


class StsError(Exception):
    """A request that is refused: `code` is the error's name in the RFCs, the text is for people."""

    def __init__(self, code: str, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.code = code
        self.status = status


class StsServer:
    """Serves `exchange` on one port."""

    def __init__(
        self, exchange: Exchange, *, limits: Limits = LIMITS, now: Callable[[], float] = time.time
    ) -> None:
        """`now` is the wall clock in seconds since 1970."""
        self._exchange = exchange
        self._now = now
        self._server = HttpServer(
            {("POST", PATH): self._answer}, name="token exchange", limits=limits, local_only=True
        )

    async def start(self, address: Address) -> Address:
        """Listens; returns the address with the port in place of 0. Raises UnavailableError."""
        return await self._server.start(address)

    async def close(self, grace_s: float) -> None:
        """Lets exchanges that are under way end within `grace_s` seconds."""
        await self._server.close(grace_s)

    async def _answer(self, request: Request) -> Response:
        try:
            return _json(200, await self._exchanged(read_form(request)))
        except StsError as error:
            log.info("token exchange refused: %s: %s", error.code, error)
            return _json(error.status, {"error": error.code, "error_description": _description(str(error))})

    async def _exchanged(self, form: dict[str, str]) -> dict[str, Any]:
        subject, audience = form["subject_token"], form.get("audience", "")
        wants_id_token = form.get("requested_token_type") == ID_TOKEN
        if wants_id_token and not audience:
            raise StsError("invalid_target", "an ID token needs an audience")
        try:
            if wants_id_token or not is_google_api(audience):
                minted, kind = await self._exchange.id_token(subject, audience), ID_TOKEN
            else:
                minted, kind = await self._exchange.access_token(subject), ACCESS_TOKEN
        except SubjectRefusedError as error:
            raise StsError("invalid_request", str(error)) from error
        except TargetRefusedError as error:
            raise StsError("invalid_target", str(error)) from error
        except TokenError as error:
            log.warning("token exchange for %s failed: %s", describe(subject), error)
            # Of the codes that are registered for OAuth the one that says so (RFC 6749 section 4.1.2.1).
            raise StsError("temporarily_unavailable", str(error), 503) from error
        expires_in = int(minted.expires_at_s - self._now())
        log.info(
            "%s for %s: a token for %s, %d s",
            kind,
            describe(subject),
            audience or "Google's APIs",
            expires_in,
        )
        return {
            "access_token": minted.token,
            "issued_token_type": kind,
            "token_type": "Bearer",
            "expires_in": max(0, expires_in),
        }


def read_form(request: Request) -> dict[str, str]:
    """The parameters of a request, once they are what RFC 8693 section 2.1 asks for. Raises StsError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != FORM:
        raise StsError("invalid_request", f"the content-type has to be {FORM}")
    form = _parsed(request.body)
    if form.get("grant_type") != GRANT_TYPE:
        code = "unsupported_grant_type" if form.get("grant_type") else "invalid_request"
        raise StsError(code, f"grant_type has to be {GRANT_TYPE}")
    for name in ("subject_token", "subject_token_type"):
        if not form.get(name):
            raise StsError("invalid_request", f"{name} is missing")
    if form["subject_token_type"] not in SUBJECT_TYPES:
        raise StsError("invalid_request", f"subject_token_type has to be {JWT}")
    if len(form["subject_token"]) > MAX_TOKEN_BYTES:
        raise StsError("invalid_request", f"subject_token is longer than {MAX_TOKEN_BYTES} bytes")
    try:
        claims_of(form["subject_token"])
    except ValueError as error:
        raise StsError("invalid_request", f"subject_token is {error}") from error
    if form.get("requested_token_type", "") not in REQUESTED_TYPES:
        raise StsError("invalid_request", "requested_token_type is none that is issued here")
    if form.get("actor_token") or form.get("actor_token_type"):
        raise StsError("invalid_request", "actor_token: delegation is not supported")
    if form.get("resource"):
        raise StsError("invalid_target", "resource is not supported, only audience")
    if len(form.get("audience", "")) > MAX_AUDIENCE_CHARS or not form.get("audience", "").isprintable():
        raise StsError("invalid_target", "audience is too long, or not printable")
    return form


def is_google_api(audience: str) -> bool:
    """Whether Google's federated access token is what the audience accepts: it has none, or is one of
    Google's APIs, as a URL or a name."""
    try:
        host = urlsplit(audience if "//" in audience else f"//{audience}").hostname or ""
    except ValueError:  # such as a bracket that nobody closes
        return False
    return not audience or host == GOOGLE_APIS or host.endswith(f".{GOOGLE_APIS}")


def _parsed(body: bytes) -> dict[str, str]:
    form: dict[str, str] = {}
    try:
        # Strict, so that nothing of a garbled token is taken for another parameter.
        pairs = parse_qsl(
            body.decode("ascii"), keep_blank_values=True, strict_parsing=bool(body), max_num_fields=MAX_FIELDS
        )
    except ValueError:  # without the original: it quotes a parameter
        raise StsError("invalid_request", "the body is no form") from None
    for name, value in pairs:
        if name in form and value != form[name]:
            if name not in REPEATABLE:
                raise StsError("invalid_request", "a parameter comes more than once")
            raise StsError("invalid_target", f"more than one {name}: one token is for one")
        form[name] = value
    return form


def _description(text: str) -> str:
    """The characters that an error_description may have (RFC 6749 section 5.2)."""
    return "".join(c if " " <= c <= "~" and c not in '"\\' else "'" for c in one_line(text))


def _json(status: int, content: dict[str, Any]) -> Response:
    # RFC 6749 section 5.1: whatever has a token in it is kept by nobody on the way.
    headers = (("cache-control", "no-store"), ("pragma", "no-cache"))
    return Response(status, "application/json", json.dumps(content).encode(), headers)
