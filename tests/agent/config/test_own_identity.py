"""Who the workload is, by its certificate file."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.config.own_identity import own_identity, own_trust_domain
from shared.credentials.certificates.authority import Authority
from shared.errors import DeniedError, UnavailableError
from shared.net.tls.certificate_folder import CERTIFICATES_FILE
from shared.trust.spiffe import SpiffeId

HELLO = SpiffeId.of_workload("demo.local", "demo", "hello")


def test_the_first_certificate_of_the_chain_counts(tmp_path: Path) -> None:
    authority = Authority.create("demo.local")
    authority.write(tmp_path, authority.issue(HELLO))
    file = tmp_path / CERTIFICATES_FILE
    file.write_bytes(file.read_bytes() + authority.root_pem)
    assert own_identity(tmp_path) == HELLO
    assert own_trust_domain(tmp_path) == ("spiffe://demo.local/**",)


@pytest.mark.parametrize("content", [b"", b"\xff", b"no certificate"])
def test_what_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / CERTIFICATES_FILE).write_bytes(content)
    with pytest.raises(UnavailableError, match=f"certificate {tmp_path}/{CERTIFICATES_FILE}: cannot be read"):
        own_identity(tmp_path)


def test_a_certificate_that_names_no_workload(tmp_path: Path) -> None:
    authority = Authority.create("demo.local")
    authority.write(tmp_path, authority.issue(dns_names=["hello"]))
    with pytest.raises(DeniedError):
        own_identity(tmp_path)
