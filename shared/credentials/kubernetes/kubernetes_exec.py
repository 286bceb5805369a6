"""Exec plugins of a kubeconfig: a program that prints the token for the API server.

Kubernetes, "client-go credential plugins", ExecCredential of client.authentication.k8s.io. Plugins that ask a
person, or that give a client certificate in place of a token, are refused by name.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from shared.credentials.kubernetes.kubernetes_access import Pem
from shared.credentials.tokens.programs import TIMEOUT_S, output_of
from shared.credentials.tokens.tokens import fits_header
from shared.errors import TokenError

if TYPE_CHECKING:
    from shared.credentials.kubernetes.kubeconfig_entry import Entry

API_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")

AHEAD_S = 60.0
"""A token this close to its end is replaced before it is sent."""


class ExecToken:
    """The token that a program prints, kept until shortly before its end, or until the server rejects it."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        timeout_s: float = TIMEOUT_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`environ` is added to our own environment; `timeout_s` bounds one run, in seconds."""
        self._command = tuple(command)
        self._environ = dict(environ)
        self._timeout_s = timeout_s
        self._now = now
        self._token = ""
        self._until = 0.0
        self._running = asyncio.Lock()

    async def token(self) -> str:
        """The token; TokenError when the program cannot be run, is late, fails, or prints something else."""
        async with self._running:  # who comes meanwhile takes what the first one gets
            if not self._token or self._now() >= self._until - AHEAD_S:
                self._token, self._until = self._judge(await self._run())
            return self._token

    def invalidate(self, rejected: str | None = None) -> None:
        if rejected is None or rejected == self._token:
            self._token = ""

    async def _run(self) -> bytes:
        what = f"exec plugin {self._command[0]}"
        return await output_of(self._command, self._environ, what, timeout_s=self._timeout_s)

    def _judge(self, output: bytes) -> tuple[str, float]:
        """The token, and until when it is to be used, in seconds since 1970."""
        name = self._command[0]
        try:
            credential = json.loads(output)
            status = credential["status"]
            token, expires = status.get("token"), status.get("expirationTimestamp")
            until = float("inf") if expires is None else datetime.fromisoformat(expires).timestamp()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            text = f"exec plugin {name} printed no ExecCredential with a status"
            raise TokenError(text, "garbled") from None
        if not token and status.get("clientCertificateData"):
            raise TokenError(f"exec plugin {name} gives a client certificate, which is not supported")
        if not isinstance(token, str) or not fits_header(token):
            raise TokenError(f"exec plugin {name} gave no token that a header can carry", "garbled")
        if until <= self._now():
            text = f"exec plugin {name} gave a token that has expired; is the clock right?"
            raise TokenError(text, "expired")
        return token, until


def read_exec(user: Entry, server: str, authority: Pem | None) -> ExecToken:
    """The plugin that a kubeconfig's user names. Raises ConfigError when it is not one that we can run."""
    values = user.values["exec"]
    if not isinstance(values, dict):
        raise user.wrong("exec", "has to be a mapping")
    command, version = values.get("command"), values.get("apiVersion")
    if not isinstance(command, str) or not command:
        raise user.wrong("exec.command", "not set")
    if version not in API_VERSIONS:
        raise user.wrong("exec.apiVersion", f"not supported: it has to be {' or '.join(API_VERSIONS)}")
    if values.get("interactiveMode") == "Always":
        raise user.wrong("exec.interactiveMode", "not supported: nobody is there to be asked")
    if "/" in command:
        command = str(user.file.parent / command)
    arguments = _texts(user, values.get("args"))
    environ: dict[str, str] = {}
    try:
        for pair in values.get("env") or ():
            environ[str(pair["name"])] = str(pair["value"])
    except (TypeError, KeyError):
        raise user.wrong("exec.env", "has to be a list of name and value") from None
    spec: dict[str, Any] = {"interactive": False}
    if values.get("provideClusterInfo"):
        spec["cluster"] = {"server": server}
        if authority is not None:
            spec["cluster"]["certificate-authority-data"] = base64.b64encode(authority.read()).decode("ascii")
    environ["KUBERNETES_EXEC_INFO"] = json.dumps(
        {"apiVersion": version, "kind": "ExecCredential", "spec": spec}
    )
    return ExecToken([command, *arguments], environ)


def _texts(user: Entry, values: object) -> list[str]:
    if values is None:
        return []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise user.wrong("exec.args", "has to be a list of texts")
    return list(values)
