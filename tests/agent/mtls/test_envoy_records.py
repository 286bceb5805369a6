from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.mtls.envoy_json import Json
from agent.mtls.envoy_records import CONNECTION_KEY, REQUEST_KEY, read_record
from agent.proxy.request_record import RequestRecord
from shared.errors import DeniedError
from shared.trust.spiffe import SpiffeId
from shared.tunnel.tunnel_record import TunnelRecord

STRANGER = SpiffeId("demo.local", "/ns/other/sa/SAN_matcher")

# What Envoy 1.40 says of a handshake that failed; test_envoy.py has one that says so.
REASON = "TLS_error:|268435581:SSL_routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED:verify_cert_failed:_"


def bad_name(name: object) -> str:
    return f"{REASON}SAN_matcher,_certificate_SANs_are_[{name}]:TLS_error_end"


BAD_CHAIN = (
    f"{REASON}X509_verify_cert:_certificate_verification_error_at_depth_0:"
    "_unable_to_get_local_issuer_certificate:TLS_error_end"
)
NO_CERTIFICATE = (
    "TLS_error:|268435648:SSL_routines:OPENSSL_internal:PEER_DID_NOT_RETURN_A_CERTIFICATE:"
    "peer_did_not_provide_required_client_certificate:TLS_error_end"
)
BAD_NAME = bad_name(STRANGER)
NO_TLS = "TLS_error:|268435612:SSL_routines:OPENSSL_internal:HTTP_REQUEST:TLS_error_end"

LINE: Json = {
    "chain": "tcp",
    "client": "127.0.0.1:1",
    "app": "127.0.0.1:8080",
    "peer": "spiffe://demo.local/ns/demo/sa/client",
    "received": 5,
    "sent": 7,
    "duration_ms": 12,
    "flags": "-",
    "tls_error": None,
}


REQUEST: Json = {
    "client": "127.0.0.1:1",
    "app": "127.0.0.1:8080",
    "peer": "spiffe://demo.local/ns/demo/sa/client",
    "method": "GET",
    "authority": "hello",
    "path": "/a",
    "status": 200,
    "details": "via_upstream",
    "id": "1-2-3",
    "received": 0,
    "sent": 7,
    "duration_ms": 12,
    "flags": "-",
    "why": None,
}


def line(**changes: object) -> str:
    return json.dumps({CONNECTION_KEY: LINE | changes})


def connection(text: str) -> TunnelRecord | None:
    record = read_record(text)
    assert record is None or isinstance(record, TunnelRecord)
    return record


def request(**changes: object) -> RequestRecord:
    record = read_record(json.dumps({REQUEST_KEY: REQUEST | changes}))
    assert isinstance(record, RequestRecord)
    return record


def test_a_connection_s_record_is_read_from_its_line() -> None:
    record = connection(line())
    assert record is not None
    assert (record.peer, record.target) == ("127.0.0.1:1", "127.0.0.1:8080")
    assert record.identity == "spiffe://demo.local/ns/demo/sa/client"
    assert (record.sent_bytes, record.received_bytes, record.duration_s) == (5, 7, 0.012)
    assert record.error is None


def test_a_broken_connection_says_why() -> None:
    record = connection(line(flags="UF"))
    assert record is not None
    assert record.error is not None
    assert (str(record.error), record.error.flag) == ("envoy's response flags UF", "UPSTREAM_RESET")


def test_a_peer_that_was_let_in_keeps_its_name_when_it_breaks_off() -> None:
    record = connection(line(tls_error="Connection_reset_by_peer"))
    assert record is not None
    assert record.identity == LINE["peer"]
    assert str(record.error) == "connection of the peer lost: Connection_reset_by_peer"


def test_a_handshake_that_was_not_finished_is_no_orderly_end() -> None:
    record = connection(line(app=None, peer=None))
    assert record is not None
    assert (str(record.error), record.identity) == ("TLS handshake not finished", "")


@pytest.mark.parametrize(
    ("reason", "flag"),
    [
        (BAD_NAME, "DENY"),
        (BAD_CHAIN, "TLS_FAILURE"),
        (NO_CERTIFICATE, "TLS_FAILURE"),
        (NO_TLS, "TLS_FAILURE"),
        (f"as_if_by_a_peer:{BAD_NAME}", "TLS_FAILURE"),
    ],
    ids=["name", "chain", "no certificate", "no TLS", "forged"],
)
def test_a_name_that_is_not_allowed_is_told_from_a_handshake_that_failed(reason: str, flag: str) -> None:
    for peer in (str(LINE["peer"]), None):
        record = connection(line(tls_error=reason, peer=peer, app=None))
        assert record is not None
        assert record.error is not None
        who = f" of {peer}" if peer else ""
        assert (str(record.error), record.error.flag) == (f"TLS handshake{who} refused: {reason}", flag)
        assert record.identity == ""  # a name that was only claimed is nobody's


def test_where_http_is_served_connections_have_a_record_if_they_were_refused() -> None:
    assert connection(line(chain="http", app=None)) is None
    assert connection(line(chain="http", app=None, tls_error="Connection_reset_by_peer")) is None
    refused = connection(line(chain="http", app=None, tls_error=BAD_CHAIN))
    assert refused is not None and refused.error is not None
    assert refused.error.flag == "TLS_FAILURE"
    unfinished = connection(line(chain="http", app=None, peer=None))
    assert unfinished is not None
    assert str(unfinished.error) == "TLS handshake not finished"
    assert not isinstance(unfinished.error, DeniedError)


def test_a_request_s_record_is_read_from_its_line() -> None:
    record = request()
    assert (record.peer, record.identity, record.app) == ("127.0.0.1:1", REQUEST["peer"], "127.0.0.1:8080")
    assert (record.method, record.authority, record.path, record.status) == ("GET", "hello", "/a", 200)
    assert (record.sent_bytes, record.received_bytes, record.duration_s) == (0, 7, 0.012)
    assert (record.request_id, record.flag, record.error) == ("1-2-3", "-", None)


@pytest.mark.parametrize(
    ("changes", "flag", "error"),
    [
        (
            {"status": 403, "details": "rbac_access_denied_matched_policy[none]"},
            "DENY",
            f"peer {REQUEST['peer']} denied: HBONE_ALLOW and HBONE_DENY do not let it in",
        ),
        ({"status": 503}, "STATUS", "the app answered 503"),
        (
            {"status": 503, "flags": "UF", "details": "upstream_reset", "why": "refused"},
            "CONNECT",
            "the app cannot be connected: refused",
        ),
        (
            {"status": 502, "flags": "UPE", "details": "bad"},
            "UPSTREAM_RESET",
            "envoy's response flags UPE: bad",
        ),
        ({"status": 0, "flags": "DC", "details": "gone"}, "DOWNSTREAM_RESET", "the client broke off: gone"),
    ],
    ids=["denied", "5xx", "no app", "broken", "client"],
)
def test_a_request_that_failed_says_why(changes: Json, flag: str, error: str) -> None:
    record = request(**changes)
    assert (record.flag, record.error) == (flag, error)


def test_an_app_s_own_403_is_no_failure() -> None:
    text = json.dumps({REQUEST_KEY: REQUEST | {"status": 403}})
    assert read_record(text, "failed") is None
    assert read_record(text, "all") is not None


@pytest.mark.parametrize("text", ["", "info hello", CONNECTION_KEY, '{"krun_connection": 1}', line()[:-9]])
def test_any_other_line_is_no_record(text: str) -> None:
    assert connection(text) is None


@given(st.dictionaries(st.sampled_from(sorted(LINE)), st.none() | st.integers() | st.text()))
def test_a_strange_line_is_a_record_or_none(changes: Json) -> None:
    connection(line(**changes))


@given(st.dictionaries(st.sampled_from(sorted(REQUEST)), st.none() | st.integers() | st.text()))
def test_a_strange_request_is_a_record_or_none(changes: Json) -> None:
    read_record(json.dumps({REQUEST_KEY: REQUEST | changes}))
