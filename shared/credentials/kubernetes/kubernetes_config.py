"""Kubeconfig files: what the current context says of an API server and of ourselves.

What we do not support is refused by its name; we never connect as somebody else instead. Several files
count as one, in which the first that sets a value wins; paths are relative to the file that has them
(Kubernetes, "Organizing Cluster Access Using kubeconfig Files"). No content of a file is in any error text,
for it may be a token or a key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.credentials.kubernetes.kubeconfig_entry import Entry
from shared.credentials.kubernetes.kubernetes_access import Access, Bearer, Pem
from shared.credentials.kubernetes.kubernetes_names import DEFAULT_NAMESPACE
from shared.credentials.tokens.tokens import FileToken, NoToken, fits_header
from shared.errors import ConfigError, UnavailableError

NOT_SUPPORTED: dict[str, tuple[str, ...]] = {
    "cluster": ("insecure-skip-tls-verify", "proxy-url", "tls-server-name"),
    "user": ("username", "password", "auth-provider", "as", "as-uid", "as-groups", "as-user-extra"),
}
"""Fields that change whom we talk to or as whom, and that we do not follow: leaving them out silently would
send a token to the wrong place, or act as the wrong user."""


def read_config(files: Sequence[Path]) -> Access:
    """The access of the current context; a file that is missing is left out if there is another.

    Raises:
        UnavailableError: none of the files is there, or one cannot be read.
        ConfigError: they are wrong, or ask for something that we do not do.
    """
    found = [(file, parsed) for file in files if (parsed := _parsed(file)) is not None]
    if not found:
        raise UnavailableError(f"no kubeconfig: {', '.join(map(str, files)) or 'none named'}: no such file")
    current = next(
        ((file, name) for file, parsed in found if (name := parsed.get("current-context"))),
        (found[0][0], None),
    )
    if not isinstance(current[1], str):
        raise ConfigError(str(current[0]), None, "current-context", "not set: which context is meant?")
    context = _named(found, "context", current[1])
    cluster = _named(found, "cluster", context.need("cluster"))
    user = _named(found, "user", context.need("user"))
    server = cluster.need("server").rstrip("/")
    if not server.startswith("https://"):
        raise cluster.wrong("server", "has to begin with https://, or all on the way could read our token")
    authority = cluster.pem("certificate-authority")
    certificate = _certificate(user)
    bearer = _bearer(user, cluster, server, authority)
    if bearer is None:
        if certificate is None:
            raise user.wrong("", "no token, tokenFile, exec or client-certificate: we would be anonymous")
        bearer = NoToken()
    namespace = context.text("namespace") or DEFAULT_NAMESPACE
    return Access(server, bearer, namespace, authority, certificate, current[1])


class GivenToken:
    """A token that stands in the file itself."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def token(self) -> str:
        return self._token

    def invalidate(self, rejected: str | None = None) -> None:
        """There is no other one."""


def _certificate(user: Entry) -> tuple[Pem, Pem] | None:
    chain, key = user.pem("client-certificate"), user.pem("client-key")
    if (chain is None) != (key is None):
        raise user.wrong("client-certificate", "a client certificate and its key have to be set together")
    return None if chain is None or key is None else (chain, key)


def _bearer(user: Entry, cluster: Entry, server: str, authority: Pem | None) -> Bearer | None:
    token, file = user.text("token"), user.path("tokenFile")
    if file is not None:  # it has precedence, as for Kubernetes' own clients
        return FileToken(file)
    if token:
        if not fits_header(token):
            raise user.wrong("token", "has characters that no header can carry")
        return GivenToken(token)
    if user.values.get("exec") is None:
        return None
    from shared.credentials.kubernetes.kubernetes_exec import read_exec

    return read_exec(user, server, authority)


def _named(found: Sequence[tuple[Path, Mapping[str, Any]]], kind: str, name: str) -> Entry:
    """The first cluster, user or context of this name."""
    for file, parsed in found:
        listed = parsed.get(f"{kind}s")
        for item in listed if isinstance(listed, list) else ():
            if isinstance(item, dict) and item.get("name") == name:
                entry = Entry(file, f"{kind}s[{_shown(name)}]", _mapping(item.get(kind)))
                for key in NOT_SUPPORTED.get(kind, ()):
                    if entry.values.get(key):
                        raise entry.wrong(key, "not supported")
                return entry
    raise ConfigError(str(found[0][0]), None, f"{kind}s", f"no {kind} {_shown(name)!r}")


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _shown(name: str) -> str:
    return name[:100] if name.isprintable() else ascii(name)[:100]


def _parsed(file: Path) -> Mapping[str, Any] | None:
    """The file's content; None: it is not there."""
    import yaml

    try:
        text = Pem(str(file), file=file).read()
    except UnavailableError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    try:
        content = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        # Without the original: its text quotes the lines around the mistake.
        mark = error.problem_mark
        raise ConfigError(str(file), mark.line + 1 if mark else None, "", "no valid YAML") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(str(file), None, "", "no valid YAML") from None
    if not isinstance(content, dict):
        raise ConfigError(str(file), None, "", "no kubeconfig: it is no mapping")
    return content
