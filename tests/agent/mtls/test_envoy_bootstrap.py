from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.mtls.envoy import BOOTSTRAP_FILE
from agent.mtls.envoy_bootstrap import (
    ACCESS_LOG_KEY,
    Json,
    access_record,
    bootstrap,
    secrets,
)
from shared.address import Address
from shared.trust.peer_policy import PeerPolicy
from shared.trust.spiffe import SpiffeId
from tests.support.world import find_envoy

VALIDATE_TIMEOUT_S = 20
ANY_PORT = Address("127.0.0.1", 0)
STRANGER = SpiffeId("demo.local", "/ns/other/sa/SAN_matcher")
ALLOWED = PeerPolicy(["spiffe://demo.local/ns/demo/sa/*"])

# What Envoy 1.40 says of a handshake that failed; test_envoy.py has one that says so.
REASON = "TLS_error:|268435581:SSL_routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED:verify_cert_failed:_"


def bad_name(name: object) -> str:
    return f"{REASON}SAN_matcher,_certificate_SANs_are_[{name}]:TLS_error_end"


BAD_CHAIN = (
    f"{REASON}X509_verify_cert:_certificate_verification_error_at_depth_0:"
    "_unable_to_get_local_issuer_certificate:TLS_error_end"
)
CHECKED = (
    f"{REASON}X509_verify_cert:_certificate_verification_error_at_depth_1:"
    "_certificate_revocation_check_against_provided_CRLs_failed:"
)
REVOKED = f"{CHECKED}_certificate_revoked:TLS_error_end"
NO_CERTIFICATE = (
    "TLS_error:|268435648:SSL_routines:OPENSSL_internal:PEER_DID_NOT_RETURN_A_CERTIFICATE:"
    "peer_did_not_provide_required_client_certificate:TLS_error_end"
)
BAD_NAME = bad_name(STRANGER)
NO_TLS = "TLS_error:|268435612:SSL_routines:OPENSSL_internal:HTTP_REQUEST:TLS_error_end"

LINE: Json = {
    "client": "127.0.0.1:1",
    "app": "127.0.0.1:8080",
    "peer": "spiffe://demo.local/ns/demo/sa/client",
    "received": 5,
    "sent": 7,
    "duration_ms": 12,
    "flags": "-",
    "tls_error": None,
}


def configuration(folder: Path, app: Address, policy: PeerPolicy = ALLOWED) -> Json:
    return bootstrap(
        listen=ANY_PORT,
        app=app,
        policy=policy,
        secrets_folder=folder,
        connect_timeout_s=1,
        alpn=["istio"],
    )


def line(**changes: object) -> str:
    return json.dumps({ACCESS_LOG_KEY: LINE | changes})


@pytest.mark.parametrize(
    ("app", "kind"),
    [("127.0.0.1:8080", "STATIC"), ("[::1]:8080", "STATIC"), ("localhost:8080", "STRICT_DNS")],
)
def test_envoy_accepts_the_configuration(tmp_path: Path, app: str, kind: str) -> None:
    told = configuration(tmp_path, Address.parse(app))
    assert told["static_resources"]["clusters"][0]["type"] == kind
    for name, content in {BOOTSTRAP_FILE: told, **secrets(tmp_path)}.items():
        (tmp_path / name).write_text(json.dumps(content))
    command = [find_envoy(), "--mode", "validate", "-l", "error", "-c", str(tmp_path / BOOTSTRAP_FILE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=VALIDATE_TIMEOUT_S)
    assert done.returncode == 0, done.stderr


def test_a_connection_s_record_is_read_from_its_line() -> None:
    record = access_record(line())
    assert record is not None
    assert (record.peer, record.target) == ("127.0.0.1:1", "127.0.0.1:8080")
    assert record.identity == "spiffe://demo.local/ns/demo/sa/client"
    assert (record.sent_bytes, record.received_bytes, record.duration_s) == (5, 7, 0.012)
    assert record.error is None


def test_a_broken_connection_says_why() -> None:
    record = access_record(line(flags="UF"))
    assert record is not None
    assert record.error is not None
    assert (str(record.error), record.error.flag) == ("envoy's response flags UF", "UPSTREAM_RESET")


def test_a_peer_that_was_let_in_keeps_its_name_when_it_breaks_off() -> None:
    record = access_record(line(tls_error="Connection_reset_by_peer"))
    assert record is not None
    assert record.identity == LINE["peer"]
    assert str(record.error) == "connection of the peer lost: Connection_reset_by_peer"


def test_a_handshake_that_was_not_finished_is_no_orderly_end() -> None:
    record = access_record(line(app=None, peer=None))
    assert record is not None
    assert (str(record.error), record.identity) == ("TLS handshake not finished", "")


@pytest.mark.parametrize(
    ("reason", "flag"),
    [
        (BAD_NAME, "DENY"),
        (BAD_CHAIN, "TLS_FAILURE"),
        (NO_CERTIFICATE, "TLS_FAILURE"),
        (NO_TLS, "TLS_FAILURE"),
        (REVOKED, "DENY"),
        (f"{CHECKED}_CRL_has_expired:TLS_error_end", "TLS_FAILURE"),
        (f"as_if_by_a_peer:{BAD_NAME}", "TLS_FAILURE"),
    ],
    ids=["name", "chain", "no certificate", "no TLS", "revoked", "overdue", "forged"],
)
def test_a_name_that_is_not_allowed_is_told_from_a_handshake_that_failed(reason: str, flag: str) -> None:
    for peer in (str(LINE["peer"]), None):
        record = access_record(line(tls_error=reason, peer=peer, app=None))
        assert record is not None
        assert record.error is not None
        who = f" of {peer}" if peer else ""
        assert (str(record.error), record.error.flag) == (f"TLS handshake{who} refused: {reason}", flag)
        assert record.identity == ""  # a name that was only claimed is nobody's


@pytest.mark.parametrize("text", ["", "info hello", ACCESS_LOG_KEY, '{"krun_connection": 1}', line()[:-9]])
def test_any_other_line_is_no_record(text: str) -> None:
    assert access_record(text) is None


@given(st.dictionaries(st.sampled_from(sorted(LINE)), st.none() | st.integers() | st.text()))
def test_a_strange_line_is_a_record_or_none(changes: Json) -> None:
    access_record(line(**changes))
