"""What Google's token services do, without sockets: metadata, OAuth token endpoint, STS, IAM credentials.

They check what Google's check (signatures, audiences, expiry, who may speak for whom) and answer errors with
Google's statuses and shapes; like theirs, some texts repeat what was sent. Tests can have any of them answer
something else (`faults`), and find every secret that was seen or given in `secrets`. `google` serves them.
"""

from __future__ import annotations

import base64
import functools
import json
import secrets as chance
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.support.metadata_server import IDENTITY_PATH, Answer

ISSUER = "https://accounts.google.com"
CLUSTER_ISSUER = "https://container.googleapis.com/v1/projects/proj/locations/loc/clusters/clu"
TOKEN_ENDPOINT = "https://oauth2.googleapis.com/token"
"""The audience of a key's assertions, wherever the endpoint really is."""

TRUST_DOMAIN = "proj.svc.id.goog"
CLUSTER = f"identitynamespace:{TRUST_DOMAIN}:{CLUSTER_ISSUER}"
POOL = "//iam.googleapis.com/projects/42/locations/global/workloadIdentityPools/pool/providers/here"
WORKLOAD = "system:serviceaccount:demo:hgate"
"""The subject of Kubernetes tokens."""

DATA_PLANE = "service-42@gcp-sa-meshdataplane.iam.gserviceaccount.com"
MACHINE = "machine@proj.iam.gserviceaccount.com"
"""Whom the metadata server's tokens are for."""

JWT_BEARER = "urn:ietf:params:oauth:grant-type:jwt-bearer"
TOKEN_EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
ACCESS_TOKEN_TYPE = "urn:ietf:params:oauth:token-type:access_token"
JWT_TYPE = "urn:ietf:params:oauth:token-type:jwt"

AWS_TYPE = "urn:ietf:params:aws:token-type:aws4_request"
AWS_ROLE = "arn:aws:sts::1:assumed-role/hgate"

LIFETIME_S = 3600


@functools.cache
def key(name: str) -> rsa.RSAPrivateKey:
    """A key that stays the same for the test run: making one takes a tenth of a second."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def pem(private: rsa.RSAPrivateKey) -> str:
    """As credential files have it."""
    return private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as it came."""

    service: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    query: Mapping[str, list[str]]

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)

    @property
    def form(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(self.body.decode()).items()}


class Refusal(Exception):
    """Ends a request with an error of Google's."""

    def __init__(self, status: int, error: object) -> None:
        super().__init__(status)
        self.answer = Answer(json.dumps(error).encode(), status, (("content-type", "application/json"),))


def oauth_error(status: int, code: str, description: str) -> Refusal:
    """As OAuth's and STS' endpoints put it (RFC 6749 section 5.2)."""
    return Refusal(status, {"error": code, "error_description": description})


def api_error(status: int, code: str, message: str) -> Refusal:
    """As Google's other services put it (google.rpc.Status)."""
    return Refusal(status, {"error": {"code": status, "message": message, "status": code}})


@dataclass(slots=True)
class GoogleServices:
    """All of them, with what they know."""

    faults: dict[str, Answer | Callable[[], Answer]] = field(default_factory=dict)
    """What a service (`metadata`, `oauth`, `sts`, `iam`, `subject`) answers instead of the truth."""

    grants: set[tuple[str, str]] = field(default_factory=set)
    """Who may speak for which account."""

    lifetime_s: float = LIFETIME_S
    """Of ID tokens; less than 0: they have expired already."""

    access_lifetime_s: float = LIFETIME_S
    """The same of access tokens."""

    audience: str | None = None
    """Whom ID tokens are for instead of those who are asked for."""

    secrets: set[str] = field(default_factory=set)
    url: str = ""
    """Where they are served."""

    _owners: dict[str, str] = field(default_factory=dict)
    """Access tokens and whose they are."""
    _refresh_tokens: dict[str, tuple[str, str]] = field(default_factory=dict)

    def secret(self, text: str) -> str:
        """Keeps `text` among the secrets."""
        self.secrets.add(text)
        return text

    def found_in(self, text: str) -> list[str]:
        """The secrets, or telling parts of them, that are in `text`."""
        parts = {part for secret in self.secrets for part in secret.replace("\n", ".").split(".")}
        return [part for part in parts if len(part) >= 12 and part in text]

    def kubernetes_token(self, audience: str = TRUST_DOMAIN, *, lifetime_s: float = 600) -> str:
        """A service account's token of the cluster."""
        now_s = time.time()
        claims = {"iss": CLUSTER_ISSUER, "sub": WORKLOAD, "aud": [audience], "exp": int(now_s + lifetime_s)}
        return self.secret(jwt.encode(claims, key("cluster"), "RS256", {"kid": "cluster"}))

    def service_account_file(self, email: str) -> dict[str, Any]:
        """What the console gives as a key."""
        self.secret(pem(key(email)))
        return {
            "type": "service_account",
            "project_id": "proj",
            "private_key_id": email,
            "private_key": pem(key(email)),
            "client_email": email,
            "token_uri": f"{self.url}/token",
        }

    def user_file(self, email: str = "user@example.com") -> dict[str, Any]:
        """What gcloud writes after a login."""
        refresh_token, client_secret = (self.secret(chance.token_urlsafe(24)) for _ in range(2))
        self._refresh_tokens[refresh_token] = (email, client_secret)
        return {
            "type": "authorized_user",
            "client_id": "764086051850.apps.googleusercontent.com",
            "client_secret": client_secret,
            "refresh_token": refresh_token,
        }

    def workforce_file(self, email: str) -> dict[str, Any]:
        """What gcloud writes after the login of somebody whom another identity provider knows."""
        return self.user_file(email) | {
            "type": "external_account_authorized_user",
            "audience": "//iam.googleapis.com/locations/global/workforcePools/pool/providers/here",
            "token_url": f"{self.url}/v1/oauthtoken",
        }

    def federation_file(self, source: dict[str, Any], account: str = "") -> dict[str, Any]:
        """What `gcloud iam workload-identity-pools create-cred-config` writes."""
        file = {
            "type": "external_account",
            "audience": POOL,
            "subject_token_type": JWT_TYPE,
            "token_url": f"{self.url}/v1/token",
            "credential_source": source,
        }
        if account:
            file["service_account_impersonation_url"] = self.impersonation_url(account)
        return file

    def impersonation_url(self, account: str) -> str:
        """As credential files have it."""
        return f"{self.url}/v1/projects/-/serviceAccounts/{account}:generateAccessToken"

    def impersonation_file(self, account: str, source: object = None, *delegates: str) -> dict[str, Any]:
        """Who has `source`, credentials themselves, speaks for `account`, with `delegates` in between."""
        return {
            "type": "impersonated_service_account",
            "service_account_impersonation_url": self.impersonation_url(account),
            "delegates": [f"projects/-/serviceAccounts/{name}" for name in delegates],
            "source_credentials": source,
        }

    def claims(self, token: str, audience: str) -> dict[str, Any]:
        """Those of an ID token of ours, verified."""
        claims: dict[str, Any] = jwt.decode(
            token, key("google").public_key(), ["RS256"], audience=audience, issuer=ISSUER
        )
        return claims

    def owner(self, token: str) -> str:
        """Whose access token it is, empty for one that is none."""
        return self._owners.get(token, "")

    def revoke_all(self) -> None:
        """No access token is taken any more."""
        self._owners.clear()

    # The services.

    def answer(self, request: Asked) -> Answer:
        fault = self.faults.get(request.service)
        if fault is not None:
            return fault if isinstance(fault, Answer) else fault()
        services = {
            "metadata": self._metadata,
            "oauth": self._oauth,
            "sts": self._sts,
            "iam": self._iam,
            "subject": self._subject,
        }
        try:
            answer = services[request.service](request)
        except Refusal as refusal:
            return refusal.answer
        if isinstance(answer, Answer):
            return answer
        return Answer(json.dumps(answer).encode(), 200, (("content-type", "application/json"),))

    def _metadata(self, request: Asked) -> Answer | dict[str, Any]:
        flavor = (("metadata-flavor", "Google"),)
        if request.headers.get("metadata-flavor") != "Google":
            return Answer(b"Missing Metadata-Flavor:Google header.", 403)
        if request.path == IDENTITY_PATH:
            return Answer(self._id_token(MACHINE, request.query["audience"][0]).encode(), 200, flavor)
        if request.path.endswith("/token"):
            return self._access_token(MACHINE)
        return Answer(b"computeMetadata/\n", 200, flavor)

    def _oauth(self, request: Asked) -> dict[str, Any]:
        form = request.form
        if form.get("grant_type") == "refresh_token":
            return self._refreshed(form, request.headers.get("authorization", ""))
        if form.get("grant_type") != JWT_BEARER:
            raise oauth_error(400, "unsupported_grant_type", f"Invalid grant_type: {form.get('grant_type')}")
        assertion = self.secret(form["assertion"])
        email = jwt.get_unverified_header(assertion)["kid"]
        try:
            claims = jwt.decode(assertion, key(email).public_key(), ["RS256"], audience=TOKEN_ENDPOINT)
        except jwt.InvalidTokenError as error:
            raise oauth_error(400, "invalid_grant", f"Invalid JWT: {error} {assertion}") from error
        if claims["iss"] != email:
            raise oauth_error(400, "invalid_grant", "Invalid grant: account not found")
        if "target_audience" in claims:
            return {"id_token": self._id_token(email, claims["target_audience"])}
        return self._access_token(email)

    def _refreshed(self, form: dict[str, str], authorization: str) -> dict[str, Any]:
        if authorization.startswith("Basic "):
            client = base64.b64decode(authorization.removeprefix("Basic ")).decode()
            form["client_id"], _, form["client_secret"] = client.partition(":")
        email, client_secret = self._refresh_tokens.get(form["refresh_token"], ("", ""))
        if not email:
            raise oauth_error(
                400, "invalid_grant", f"Token has been expired or revoked: {form['refresh_token']}"
            )
        if form["client_secret"] != client_secret:
            raise oauth_error(401, "invalid_client", "Unauthorized")
        return self._access_token(email) | {"id_token": self._id_token(email, form["client_id"])}

    def _sts(self, request: Asked) -> dict[str, Any]:
        if request.headers.get("content-type") == "application/json":
            given = request.json
        else:
            words = [(name, name.split("_")) for name in request.form]
            given = {first + "".join(map(str.title, more)): request.form[n] for n, (first, *more) in words}
        if given.get("grantType") != TOKEN_EXCHANGE or given.get("requestedTokenType") != ACCESS_TOKEN_TYPE:
            raise oauth_error(400, "invalid_request", "Invalid grant or requested token type")
        audience = given.get("audience")
        if audience not in (CLUSTER, POOL):
            raise oauth_error(400, "invalid_target", f"Invalid value for audience: {audience}")
        subject = self.secret(given["subjectToken"])
        if given["subjectTokenType"] == AWS_TYPE:
            signed = json.loads(unquote(subject))
            names = [header["key"].lower() for header in signed["headers"]]
            if (
                not signed["url"].startswith("https://sts.eu-west-1.amazonaws.com")
                or "authorization" not in names
            ):
                raise oauth_error(400, "invalid_grant", f"no signed request: {subject}")
            return self._access_token(AWS_ROLE) | {"issued_token_type": ACCESS_TOKEN_TYPE}
        expected = TRUST_DOMAIN if audience == CLUSTER else f"https:{POOL}"
        try:
            claims = jwt.decode(subject, key("cluster").public_key(), ["RS256"], audience=expected)
        except jwt.InvalidTokenError as error:
            raise oauth_error(400, "invalid_grant", f"ID Token {subject}: {error}") from error
        return self._access_token(claims["sub"]) | {"issued_token_type": ACCESS_TOKEN_TYPE}

    def _iam(self, request: Asked) -> dict[str, Any]:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        speaker = self._owners.get(token)
        if scheme != "Bearer" or speaker is None:
            raise api_error(
                401, "UNAUTHENTICATED", f"Request had invalid authentication credentials: {token}"
            )
        account = request.path.rpartition("/")[2].partition(":")[0]
        given = request.json
        names = [name.rpartition("/")[2] for name in given.get("delegates", [])]
        for target in (*names, account):
            if (speaker, target) not in self.grants:
                raise api_error(
                    403,
                    "PERMISSION_DENIED",
                    "Permission 'iam.serviceAccounts.getOpenIdToken' denied on resource",
                )
            speaker = target
        if not given.get("audience"):
            raise api_error(400, "INVALID_ARGUMENT", "audience is required")
        email = {"email": account} if given.get("includeEmail") else {}
        return {"token": self._id_token(account, given["audience"], **email)}

    def _subject(self, request: Asked) -> dict[str, Any]:
        """What has subject tokens for a federation, as CI systems do."""
        if request.headers.get("authorization") != "Bearer of-the-job-itself":
            raise oauth_error(401, "access_denied", "no")
        return {"value": self.kubernetes_token(f"https:{POOL}")}

    def _id_token(self, owner: str, audience: str, **more: str) -> str:
        now_s = int(time.time())
        claims = {"iss": ISSUER, "aud": self.audience or audience, "sub": owner, "iat": now_s, **more}
        claims["exp"] = now_s + int(self.lifetime_s)
        return self.secret(jwt.encode(claims, key("google"), "RS256", {"kid": "google"}))

    def _access_token(self, owner: str) -> dict[str, Any]:
        token = self.secret(f"ya29.{chance.token_urlsafe(48)}")
        self._owners[token] = owner
        return {"access_token": token, "expires_in": int(self.access_lifetime_s), "token_type": "Bearer"}


def service_of(path: str) -> str:
    """Which service a path belongs to."""
    if path in ("/token", "/v1/oauthtoken"):
        return "oauth"
    if path == "/v1/token":
        return "sts"
    if path.startswith("/v1/projects/"):
        return "iam"
    return "subject" if path == "/subject" else "metadata"
