"""For tests of a mesh server's leg and of its handshake: who is there, and the rules for whom it lets in."""

from __future__ import annotations

import pytest

from shared.errors import DeniedError
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
