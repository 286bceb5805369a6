"""What an access to a Kubernetes API server consists of: where it is, and what proves to it who we are.

An access always has a credential, and its server always speaks TLS with a certificate that is checked:
nothing is asked anonymously, and no token goes to whoever happens to answer.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shared import regular_files
from shared.credentials.kubernetes.kubernetes_names import (
    AUTHORITY_FILE,
    DEFAULT_NAMESPACE,
)
from shared.errors import UnavailableError
from shared.net.tls.contexts import ALPN_HTTP1, client_of, load_own_pem

MAX_FILE_BYTES = 1024 * 1024
"""Of a certificate file, a key or a kubeconfig: a Secret can hold no more."""


class Bearer(Protocol):
    """Where the token for the API server comes from; every `TokenSource` is one."""

    async def token(self) -> str | None:
        """A token, None if there is only the client certificate. Raises TokenError."""
        ...

    def invalidate(self, rejected: str | None = None) -> None:
        """The server has rejected the token: the next one has to be a new one, if there is any."""
        ...


@dataclass(frozen=True, slots=True)
class Pem:
    """Certificates or a key: in a file, which is read whenever it is needed, or given as they are."""

    place: str
    """The file, or the field that holds it, for error texts."""

    file: Path | None = None
    given: bytes = field(default=b"", repr=False)

    def read(self) -> bytes:
        """Raises UnavailableError if the file cannot be read."""
        if self.file is None:
            return self.given
        try:
            return regular_files.read(self.file, MAX_FILE_BYTES)
        except OSError as error:
            raise UnavailableError(f"cannot read {self.place}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Access:
    """An API server, and a way in."""

    server: str
    """Its URL, https, without a slash at the end."""

    bearer: Bearer = field(repr=False)

    namespace: str = DEFAULT_NAMESPACE
    """Where we are at home, or what the kubeconfig's context names."""

    authority: Pem | None = None
    """Whom the server's certificate has to be signed by; None: an authority that the system trusts."""

    certificate: tuple[Pem, Pem] | None = None
    """Our own certificate chain and its key."""

    context: str = ""
    """The kubeconfig's current context; empty in a pod."""

    def authority_pem(self) -> bytes:
        """Whom the server's certificate is signed by, as a pod has it in `ca.crt`.

        Raises UnavailableError when it cannot be read, or the access names none.
        """
        if self.authority is None:
            raise UnavailableError(
                f"no {AUTHORITY_FILE} for {self.server}: its kubeconfig names no authority"
            )
        return self.authority.read()

    def tls(self) -> ssl.SSLContext:
        """A context made of the files as they are now, which takes a millisecond: requests are rare.

        Raises UnavailableError when a file cannot be read, or is not what it should be.
        """
        trusted = None if self.authority is None else self.authority.read()
        try:
            context = client_of(trusted, alpn=ALPN_HTTP1)
        except ValueError as error:
            place = self.authority.place if self.authority else ""
            raise UnavailableError(f"trusted certificates of {self.server}: {place}: {error}") from error
        if self.certificate is not None:
            _load(context, *self.certificate)
        return context


def _load(context: ssl.SSLContext, chain: Pem, key: Pem) -> None:
    try:
        load_own_pem(context, chain.read().strip() + b"\n" + key.read())
    except OSError as error:  # ssl.SSLError is one
        raise _unusable(chain, key, "they are no PEM, or do not belong together") from error
    except ValueError as error:
        raise _unusable(chain, key, str(error)) from error


def _unusable(chain: Pem, key: Pem, reason: str) -> UnavailableError:
    return UnavailableError(f"cannot use client certificate {chain.place}, key {key.place}: {reason}")
