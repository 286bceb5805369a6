"""A Kubernetes API server for tests of `TokenRequest`: one that answers as the real one does, or the real
one.

The local server speaks HTTPS, knows users by their token or client certificate, has RBAC's rule about who may
create tokens in which namespace, and signs what it gives with a key of its own, whose public half it serves.
Its answers are compared with a real kube-apiserver's by `make test-kube`, which runs the tests that take
`ApiServer` against that one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, Self

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

from shared.credentials.certificates.authority import Authority
from shared.credentials.kubernetes.kubernetes_access import Access, Pem
from shared.credentials.kubernetes.kubernetes_api import KubernetesApi
from shared.credentials.kubernetes.kubernetes_config import GivenToken
from shared.errors import StatusError
from shared.net.http1 import get
from shared.trust.spiffe import SpiffeId
from tests.support.http1_server import PATIENCE_S, NotingServer, received, server_tls

NAMESPACE = "demo"
SERVICE_ACCOUNT = "hello"
POD = "hello-1"
"""A pod of that service account."""

REAL = "HBONE_TEST_KUBERNETES"
"""A file that tells of a running kube-apiserver (tests/kube/run.py)."""

MESH_ENV = {
    NAMESPACE: {"TRUST_DOMAIN": "demo.example", "PORT_DB": "10.1.2.3:5432"},
    "istio-system": {"TRUST_DOMAIN": "mesh.example", "HBONE_DRAIN_TIMEOUT": "3", "OTHERS": "1"},
}
"""The ConfigMaps mesh-env by namespace, which krun may read."""

API_AUDIENCE = "https://kubernetes.default.svc.cluster.local"
MIN_SECONDS = 600
MAX_SECONDS = 2**32

OBJECTS = ("db-credentials", "app-config", "absent", "sshdebug")
"""Names of the Secrets and ConfigMaps of NAMESPACE that the user krun may read."""

_OBJECT_PATH = re.compile(r"/api/v1/namespaces/([^/]+)/(secrets|configmaps)/([^/]+)")
_MESH_ENV_PATH = re.compile(r"/api/v1/namespaces/([^/]+)/configmaps/mesh-env")
_POLICIES_PATH = re.compile(r"/apis/security\.istio\.io/([^/]+)/namespaces/([^/]+)/([^/?]+)\?limit=\d+(.*)")
_PATH = re.compile(r"/api/v1/namespaces/([^/]+)/serviceaccounts/([^/]+)/token")


class ApiServer(Protocol):
    """What tests need of either."""

    url: str
    allowed: str
    """The token of a user who may create tokens in NAMESPACE."""

    forbidden: str
    """The token of a user who may do nothing."""

    pod_uid: str

    @property
    def ca_pem(self) -> bytes: ...

    async def put(self, resource: str, name: str, **content: Any) -> None:
        """Makes or replaces a Secret or ConfigMap of NAMESPACE."""
        ...

    async def delete(self, resource: str, name: str) -> None:
        """Removes it."""
        ...

    async def verify(self, token: str, audience: str) -> dict[str, Any]:
        """The claims of a token that the server's own keys have signed. Raises jwt.PyJWTError."""
        ...


def access(server: ApiServer, token: str | None = None) -> Access:
    """An access to `server`, with `token`, by default that of the user who may."""
    bearer = GivenToken(server.allowed if token is None else token)
    return Access(server.url, bearer, NAMESPACE, Pem("the test's authority", given=server.ca_pem))


def kubeconfig(server: ApiServer, token: str | None = None, namespace: str = NAMESPACE) -> str:
    """A kubeconfig that says the same."""
    return json.dumps(  # which is YAML
        {
            "current-context": "test",
            "contexts": [
                {"name": "test", "context": {"cluster": "c", "user": "u", "namespace": namespace}},
            ],
            "clusters": [
                {
                    "name": "c",
                    "cluster": {
                        "server": server.url,
                        "certificate-authority-data": base64.b64encode(server.ca_pem).decode(),
                    },
                }
            ],
            "users": [{"name": "u", "user": {"token": server.allowed if token is None else token}}],
        }
    )


@asynccontextmanager
async def api_server() -> AsyncIterator[ApiServer]:
    """The real one if there is one, else a local one."""
    if os.environ.get(REAL):
        yield RealApiServer.running()
    else:
        async with LocalApiServer() as server:
            yield server


@contextmanager
def threaded_api_server() -> Iterator[LocalApiServer]:
    """A local one in a thread of its own, for tests that wait without an event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="API server")
    thread.start()
    server = LocalApiServer()
    try:
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(PATIENCE_S)
        try:
            yield server
        finally:
            asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(PATIENCE_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class RealApiServer:
    """A kube-apiserver that somebody else has started."""

    @classmethod
    def running(cls) -> RealApiServer:
        """The one that the environment tells of."""
        return cls(**json.loads(Path(os.environ[REAL]).read_text()))

    def __init__(self, url: str, ca: str, allowed: str, forbidden: str, admin: str, pod_uid: str) -> None:
        self.url, self.ca_pem, self.pod_uid = url, ca.encode(), pod_uid
        self.allowed, self.forbidden, self.admin = allowed, forbidden, admin

    async def put(self, resource: str, name: str, **content: Any) -> None:
        path, body = f"/api/v1/namespaces/{NAMESPACE}/{resource}", {"metadata": {"name": name}, **content}
        api = KubernetesApi(access(self, self.admin), max_bytes=8 << 20)
        try:
            await api.ask("PUT", f"{path}/{name}", body)
        except StatusError as error:
            if error.status != 404:
                raise
            await api.ask("POST", path, body)

    async def delete(self, resource: str, name: str) -> None:
        path = f"/api/v1/namespaces/{NAMESPACE}/{resource}/{name}"
        with contextlib.suppress(StatusError):
            await KubernetesApi(access(self, self.admin)).ask("DELETE", path)

    async def verify(self, token: str, audience: str) -> dict[str, Any]:
        response = await get(
            f"{self.url}/openid/v1/jwks",
            headers={"authorization": f"Bearer {self.admin}", "accept": "application/jwk-set+json"},
            timeout_s=PATIENCE_S,
            max_bytes=65536,
            tls=access(self).tls(),
        )
        return _decoded(token, jwt.PyJWK(json.loads(response.body)["keys"][0]).key, audience)


def _decoded(token: str, key: Any, audience: str) -> dict[str, Any]:
    claims: dict[str, Any] = jwt.decode(token, key, algorithms=["RS256", "ES256"], audience=audience)
    return claims


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def spec(self) -> dict[str, Any]:
        return dict(json.loads(self.body)["spec"])


Answer = tuple[int, bytes]


@dataclass(slots=True)
class LocalApiServer(NotingServer[Asked]):
    """`async with LocalApiServer() as server:` listens on `server.url` until the block ends."""

    now: Callable[[], float] = time.time
    max_seconds: int = MAX_SECONDS
    """The longest life that it gives (`--service-account-max-token-expiration`)."""

    answer: Callable[[Asked], Answer | None] = lambda _: None
    """What it answers instead of what it should; None: what it should."""

    users: dict[str, str] = field(
        default_factory=lambda: {"Tok3n.Of-krun": "krun", "Tok3n.Of-guest": "guest"}
    )
    """Name by token."""

    may_create: set[tuple[str, str]] = field(
        default_factory=lambda: {("krun", NAMESPACE), ("certificate", NAMESPACE)}
    )
    """User and namespace, as RoleBindings say."""

    mesh_env: dict[str, dict[str, Any]] = field(default_factory=lambda: {**MESH_ENV})
    """Data by namespace; the user krun may read those in `may_read`."""

    may_read: set[str] = field(default_factory=lambda: {NAMESPACE, "istio-system"})

    objects: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    """Secrets and ConfigMaps by namespace, resource and name."""

    policies: list[dict[str, Any]] = field(default_factory=list)
    """Istio's objects; the user krun may list those of the namespaces in `may_list`, in pages of one."""

    may_list: set[str] = field(default_factory=lambda: {NAMESPACE, "istio-system"})

    istio_versions: set[str] = field(default_factory=lambda: {"v1", "v1beta1"})
    """Of their resources; none: the cluster has no Istio."""

    service_accounts: set[tuple[str, str]] = field(default_factory=lambda: {(NAMESPACE, SERVICE_ACCOUNT)})
    authority: Authority = field(default_factory=lambda: Authority.create("cluster.local"))
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    url: str = ""
    allowed: str = "Tok3n.Of-krun"
    forbidden: str = "Tok3n.Of-guest"
    pod_uid: str = "5f1c0d2e-0000-4000-8000-000000000001"

    async def __aenter__(self) -> Self:
        tls = server_tls(self.authority.issue(ip_addresses=["127.0.0.1"]))
        tls.verify_mode = ssl.CERT_OPTIONAL  # certificates of clients are asked for, and done without
        tls.load_verify_locations(cadata=self.ca_pem.decode())
        self.url = f"https://127.0.0.1:{await self._listen(self._serve, tls=tls)}"
        return self

    @property
    def asked(self) -> list[Asked]:
        return self.requests

    @property
    def ca_pem(self) -> bytes:
        return self.authority.root_pem

    async def put(self, resource: str, name: str, **content: Any) -> None:
        self.objects[NAMESPACE, resource, name] = {"metadata": {"name": name}, **content}

    async def delete(self, resource: str, name: str) -> None:
        self.objects.pop((NAMESPACE, resource, name), None)

    async def verify(self, token: str, audience: str) -> dict[str, Any]:
        return _decoded(token, self.key.public_key(), audience)

    def reviewed(self, token: str, trust_domain: str, audience: str = "istio-ca") -> SpiffeId:
        """Whose token it is, as istiod finds out by the issuer's keys. Raises ValueError."""
        try:
            claims = jwt.decode(
                token, self.key.public_key(), algorithms=["ES256"], audience=audience, issuer=API_AUDIENCE
            )
        except jwt.PyJWTError as error:
            raise ValueError(str(error)) from error
        about = claims["kubernetes.io"]
        return SpiffeId.of_workload(trust_domain, about["namespace"], about["serviceaccount"]["name"])

    # Serving.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await received(reader)
        asked = Asked(request.method, request.target, request.headers, request.body)
        await self._note(asked)
        await self.gate.wait()
        status, body = self.answer(asked) or self._answer(asked, writer.get_extra_info("peercert"))
        writer.write(request.answer(status, body, ("content-type", "application/json")))
        await writer.drain()

    def _answer(self, asked: Asked, certificate: object) -> Answer:
        scheme, _, token = asked.headers.get("authorization", "").partition(" ")
        user = self.users.get(token) if scheme == "Bearer" else None
        if user is None and certificate and not scheme:
            user = "certificate"
        if user is None:
            return status(401, "Unauthorized", "Unauthorized")
        if (found := _MESH_ENV_PATH.fullmatch(asked.path)) and asked.method == "GET":
            return self._mesh_env(user, found[1])
        if (found := _OBJECT_PATH.fullmatch(asked.path)) and asked.method == "GET":
            return self._object(user, found[1], found[2], found[3])
        if (found := _POLICIES_PATH.fullmatch(asked.path)) and asked.method == "GET":
            return self._policies(user, *found.groups())
        if (asked.method, asked.path) == ("GET", "/apis"):
            groups = [{"name": "security.istio.io"}] if self.istio_versions else []
            return 200, json.dumps({"kind": "APIGroupList", "groups": groups}).encode()
        match = _PATH.fullmatch(asked.path)
        if match is None or asked.method != "POST":
            return status(404, "NotFound", "the server could not find the requested resource")
        namespace, account = match[1], match[2]
        if (user, namespace) not in self.may_create:
            text = (
                f'serviceaccounts "{account}" is forbidden: User "{user}" cannot create resource '
                f'"serviceaccounts/token" in API group "" in the namespace "{namespace}"'
            )
            return status(403, "Forbidden", text)
        if (namespace, account) not in self.service_accounts:
            return status(404, "NotFound", f'serviceaccounts "{account}" not found')
        return self._token(asked.spec, namespace, account)

    def _mesh_env(self, user: str, namespace: str) -> Answer:
        if user != "krun" or namespace not in self.may_read:
            text = (
                f'configmaps "mesh-env" is forbidden: User "{user}" cannot get resource "configmaps" in API '
                f'group "" in the namespace "{namespace}"'
            )
            return status(403, "Forbidden", text)
        if namespace not in self.mesh_env:
            return status(404, "NotFound", 'configmaps "mesh-env" not found')
        content = {"kind": "ConfigMap", "metadata": {"name": "mesh-env"}, "data": self.mesh_env[namespace]}
        return 200, json.dumps(content).encode()

    def _object(self, user: str, namespace: str, resource: str, name: str) -> Answer:
        if user != "krun" or namespace != NAMESPACE or name not in OBJECTS:
            text = (
                f'{resource} "{name}" is forbidden: User "{user}" cannot get resource "{resource}" in API '
                f'group "" in the namespace "{namespace}"'
            )
            return status(403, "Forbidden", text)
        found = self.objects.get((namespace, resource, name))
        if found is None:
            return status(404, "NotFound", f'{resource} "{name}" not found')
        return 200, json.dumps(found).encode()

    def _policies(self, user: str, version: str, namespace: str, resource: str, rest: str) -> Answer:
        if user != "krun" or namespace not in self.may_list:
            text = (
                f'{resource}.security.istio.io is forbidden: User "{user}" cannot list resource "{resource}" '
                f'in API group "security.istio.io" in the namespace "{namespace}"'
            )
            return status(403, "Forbidden", text)
        if version not in self.istio_versions:
            return 404, b"404 page not found\n"
        kind = {
            "authorizationpolicies": "AuthorizationPolicy",
            "peerauthentications": "PeerAuthentication",
            "requestauthentications": "RequestAuthentication",
        }[resource]
        items = [
            one for one in self.policies if (one["kind"], one["metadata"]["namespace"]) == (kind, namespace)
        ]
        at = int(rest.removeprefix("&continue=") or 0)
        about = {"continue": str(at + 1)} if at + 1 < len(items) else {}
        return 200, json.dumps(
            {"kind": f"{kind}List", "metadata": about, "items": items[at : at + 1]}
        ).encode()

    def _token(self, spec: dict[str, Any], namespace: str, account: str) -> Answer:
        seconds = spec.get("expirationSeconds", 3600)
        wrong = "may not specify a duration less than 10 minutes" if seconds < MIN_SECONDS else ""
        if seconds > MAX_SECONDS:
            wrong = "may not specify a duration larger than 2^32 seconds"
        if wrong:
            text = (
                f'TokenRequest.authentication.k8s.io "" is invalid: spec.expirationSeconds: '
                f"Invalid value: {seconds}: {wrong}"
            )
            return status(422, "Invalid", text)
        about: dict[str, Any] = {"namespace": namespace, "serviceaccount": {"name": account, "uid": "u"}}
        bound = spec.get("boundObjectRef")
        if bound is not None:
            if bound["name"] != POD:
                return status(404, "NotFound", f'pods "{bound["name"]}" not found')
            about["pod"] = {"name": bound["name"], "uid": self.pod_uid}
        issued = int(self.now())
        expires = issued + min(seconds, self.max_seconds)
        spec = {"audiences": [API_AUDIENCE], **spec, "expirationSeconds": expires - issued}
        claims = {
            "aud": spec["audiences"],
            "exp": expires,
            "iat": issued,
            "nbf": issued,
            "iss": API_AUDIENCE,
            "jti": base64.b32encode(os.urandom(10)).decode(),
            "kubernetes.io": about,
            "sub": f"system:serviceaccount:{namespace}:{account}",
        }
        end = datetime.fromtimestamp(expires, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        token = jwt.encode(claims, self.key, algorithm="ES256", headers={"kid": "test"})
        return 201, json.dumps(
            {
                "kind": "TokenRequest",
                "apiVersion": "authentication.k8s.io/v1",
                "metadata": {"name": account, "namespace": namespace},
                "spec": spec,
                "status": {"token": token, "expirationTimestamp": end},
            }
        ).encode()


def status(code: int, reason: str, message: str) -> Answer:
    """A `Status` object as the API server answers it."""
    content = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
    return code, json.dumps(content).encode()
