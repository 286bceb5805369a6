"""Requests to the real API server as kubectl sends them, and what deploy/k8s renders to."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import HTTPError

import yaml

from tests.kube import build
from tests.support.api_server import RealApiServer

DEPLOY = Path(__file__).parents[2] / "deploy"
K8S = DEPLOY / "k8s"

OVERLAYS = ("gke", "plain", "ambient")

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
"""Kinds of PATCH (Kubernetes, "Update API Objects in Place")."""

PATIENCE_S = 30.0

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the API server has answered."""

    status: int
    body: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.status} {self.body.get('message', '')}"


@dataclass(frozen=True)
class Client:
    """Somebody who asks the API server: whose token it is; None: nobody's."""

    server: RealApiServer
    token: str | None = field(repr=False)
    acts_as: str = ""
    """The user in whose place an administrator asks (Kubernetes, "User impersonation")."""

    def ask(self, method: str, path: str, body: Object | None = None, kind: str = "") -> Answer:
        """`kind` is the body's content type; default: JSON."""
        headers = {"Content-Type": kind or "application/json"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        if self.acts_as:
            headers["Impersonate-User"] = self.acts_as
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.server.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S, context=self._tls) as answer:
                return Answer(answer.status, _json(answer.read()))
        except HTTPError as error:
            return Answer(error.code, _json(error.read()))

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=self.server.ca_pem.decode())


def _json(content: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(content))
    except ValueError:
        return {"message": content.decode()}


@dataclass
class Cluster:
    """The objects of an API server, by an administrator's hand."""

    admin: Client
    _resources: dict[str, dict[str, Any]] = field(default_factory=dict)

    def path_of(self, found: Object) -> str:
        """Of an object, as the API server's discovery has it. Raises KeyError for an unknown kind."""
        version, kind = str(found["apiVersion"]), str(found["kind"])
        base = f"/apis/{version}" if "/" in version else f"/api/{version}"
        if version not in self._resources:
            told = self.admin.ask("GET", base).body.get("resources", [])
            self._resources[version] = {one["kind"]: one for one in told if "/" not in one["name"]}
        resource = self._resources[version][kind]
        name = found["metadata"]["name"]
        if not resource["namespaced"]:
            return f"{base}/{resource['name']}/{name}"
        return f"{base}/namespaces/{found['metadata']['namespace']}/{resource['name']}/{name}"

    def try_out(self, found: Object) -> Answer:
        """Applied by server-side dry run, with no unknown and no doubled field."""
        query = "dryRun=All&fieldValidation=Strict&fieldManager=test&force=true"
        return self.admin.ask("PATCH", f"{self.path_of(found)}?{query}", found, APPLY)

    def apply(self, found: Object) -> None:
        """Makes it, or makes it so."""
        query = "fieldValidation=Strict&fieldManager=test&force=true"
        answer = self.admin.ask("PATCH", f"{self.path_of(found)}?{query}", found, APPLY)
        assert answer.status in (200, 201), f"{found['kind']} {found['metadata']['name']}: {answer}"

    def define(self, definitions: Iterable[Object]) -> None:
        """Makes custom resources; returns when the API server serves them."""
        awaited = []
        for each in definitions:
            self.apply(each)
            versions = [one["name"] for one in each["spec"]["versions"] if one["served"]]
            awaited += [
                (each["spec"]["group"], version, each["spec"]["names"]["kind"]) for version in versions
            ]
        deadline = time.monotonic() + PATIENCE_S
        while missing := [one for one in awaited if not self._serves(*one)]:
            assert time.monotonic() < deadline, missing
            time.sleep(0.1)

    def _serves(self, group: str, version: str, kind: str) -> bool:
        told = self.admin.ask("GET", f"/apis/{group}/{version}").body
        return kind in [one["kind"] for one in told.get("resources", [])]

    def client(self, namespace: str, account: str, audience: str | None = None) -> Client:
        """Somebody with a token of a service account, for an audience of its own or the API server's."""
        spec: dict[str, Any] = {"expirationSeconds": 3600, **({"audiences": [audience]} if audience else {})}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        told = self.admin.ask("POST", path, {"spec": spec})
        return Client(self.admin.server, told.body["status"]["token"])


# What deploy/k8s renders to.


@cache
def rendered(folder: str, *, with_options: bool = False) -> list[dict[str, Any]]:
    """The objects of a folder of deploy/k8s, by kustomize; `with_options`: with all that its kustomization
    and the base have commented out."""
    with TemporaryDirectory() as name:
        copy = Path(name, "k8s")
        shutil.copytree(K8S, copy)
        if with_options:
            for file in (copy / folder / "kustomization.yaml", *(copy / "base").iterdir()):
                file.write_text(uncommented(file.read_text()))
        command = [str(build.kustomize()), "build", str(copy / folder)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
    return [each for each in yaml.safe_load_all(ran.stdout) if each]


def uncommented(text: str) -> str:
    """The text with its commented items of lists as items: from `# - ` on what is indented below it."""
    lines, inside = [], False
    for line in text.splitlines():
        begins = re.match(r" *# - ", line) is not None
        inside = begins or (inside and re.match(r" *#   ", line) is not None)
        lines.append(line.replace("# ", "", 1) if inside else line)
    return "\n".join(lines) + "\n"


def of_kind(objects: Iterable[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    """Those of some kinds."""
    return [each for each in objects if each["kind"] in kinds]
