"""For tests of a mesh server's leg and of its handshake: who is there, and the rules for whom it lets in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from OpenSSL import SSL

from shared.errors import DeniedError
from shared.net.legs.tls_handshake import server_context
from shared.net.tls.certificate_folder import CERTIFICATES_FILE, PRIVATE_KEY_FILE, ROOTS_FILE
from shared.trust.spiffe import SpiffeId
from tests.support.tls_client import VERSIONS

TRUST_DOMAIN = "demo.local"
SERVER = SpiffeId(TRUST_DOMAIN, "/ns/demo/sa/hello")
CLIENT = SpiffeId(TRUST_DOMAIN, "/ns/demo/sa/client")

each_version = pytest.mark.parametrize("version", VERSIONS.values(), ids=VERSIONS)


def anybody(chain: list[bytes]) -> None:
    """A rule that lets every verified certificate in."""


def nobody(chain: list[bytes]) -> None:
    raise DeniedError("peer denied: no rule allows it")


def context_of(files: Path, verify: Callable[[list[bytes]], None] = anybody) -> SSL.Context:
    """What such a server has: its folder, and the rule."""
    certificates, key, roots = (files / name for name in (CERTIFICATES_FILE, PRIVATE_KEY_FILE, ROOTS_FILE))
    return server_context(
        certificates, key, roots, verify, alpn=("istio", "istio-http/1.1", "http/1.1", "h2")
    )
