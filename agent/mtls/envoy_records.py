"""Envoy's access logs: how it is told to write them, and the records that are read from its lines.

It has two. A line of a connection tells of one whose bytes Envoy has passed on unread, and of any whose
handshake has failed. A line of a request tells of one that Envoy has answered, or passed to the app.

Pure functions.
"""

from __future__ import annotations

import json
import re
from http import HTTPStatus

from agent.config.settings import RequestLog
from agent.mtls.envoy_json import TYPES, Json
from agent.proxy.request_record import FAILED_STATUS, Record, RequestRecord, outcome
from shared.errors import (
    DeniedError,
    Flag,
    HboneError,
    RefusedError,
    StreamResetError,
    TlsFailureError,
)
from shared.http2.frames import CANCEL
from shared.tunnel.tunnel_record import TunnelRecord

CONNECTION_KEY = "krun_connection"
"""Marks the lines of Envoy's standard error that are connections' records."""

REQUEST_KEY = "krun_request"
"""Marks those that are requests'."""

RECORD_BEGINNING = '{"krun_'
"""How both begin; what Envoy says otherwise never does."""

HTTP_CHAIN = "http"
"""Name of the filter chain whose connections Envoy serves HTTP on."""

TCP_CHAIN = "tcp"
"""Of the one whose connections it passes on unread."""

_NAME_DENIED = re.compile(
    r"TLS_error:\|\d+:SSL_routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED:verify_cert_failed:_SAN_matcher\b"
)
"""How Envoy 1.40 says that the chain is good and no name in the certificate is allowed; of a bad chain it has
`_X509_verify_cert` there. Matched from the start, because the peer's own names come later in the text."""

_RBAC_DENIED = "rbac_access_denied"
"""What its reason for an answer begins with if the policy lets nobody of that name in."""

_BROKEN_BY_CLIENT = frozenset({"DC", "DPE", "DR"})
"""Response flags: the client broke off, spoke no HTTP, or reset its stream (Envoy, "Access logging")."""

_NO_CONNECTION = frozenset({"UF", "UH", "UO"})
"""The app could not be connected."""


# What Envoy is told.


def connection_log() -> list[Json]:
    """A listener's `access_log`."""
    return _stderr(
        CONNECTION_KEY,
        {
            "chain": "%FILTER_CHAIN_NAME%",
            "client": "%DOWNSTREAM_REMOTE_ADDRESS%",
            "app": "%UPSTREAM_REMOTE_ADDRESS%",
            "peer": "%DOWNSTREAM_PEER_URI_SAN%",
            "received": "%BYTES_RECEIVED%",
            "sent": "%BYTES_SENT%",
            "duration_ms": "%DURATION%",
            "flags": "%RESPONSE_FLAGS%",
            "tls_error": "%DOWNSTREAM_TRANSPORT_FAILURE_REASON%",
        },
    )


def request_log(wanted: RequestLog) -> list[Json]:
    """A connection manager's `access_log`."""
    if wanted == "none":
        return []
    log = _stderr(
        REQUEST_KEY,
        {
            "client": "%DOWNSTREAM_REMOTE_ADDRESS%",
            "app": "%UPSTREAM_REMOTE_ADDRESS%",
            "peer": "%DOWNSTREAM_PEER_URI_SAN%",
            "method": "%REQ(:METHOD)%",
            "authority": "%REQ(:AUTHORITY)%",
            "path": "%PATH(NQ:PATH)%",
            "status": "%RESPONSE_CODE%",
            "details": "%RESPONSE_CODE_DETAILS%",
            "id": "%REQ(X-REQUEST-ID)%",
            "received": "%BYTES_RECEIVED%",
            "sent": "%BYTES_SENT%",
            "duration_ms": "%DURATION%",
            "flags": "%RESPONSE_FLAGS%",
            "why": "%UPSTREAM_TRANSPORT_FAILURE_REASON%",
        },
    )
    if wanted == "failed":
        # Which 403s are the policy's, and not the app's own, the record's reader sees.
        filters = [
            _status("GE", FAILED_STATUS),
            _status("EQ", HTTPStatus.FORBIDDEN),
            {"response_flag_filter": {}},
        ]
        log[0]["filter"] = {"or_filter": {"filters": filters}}
    return log


def _status(compared: str, status: int) -> Json:
    value = {"default_value": status, "runtime_key": f"krun.logged_status_{compared}"}
    return {"status_code_filter": {"comparison": {"op": compared, "value": value}}}


def _stderr(key: str, record: Json) -> list[Json]:
    stderr = {
        "@type": f"{TYPES}.access_loggers.stream.v3.StderrAccessLog",
        "log_format": {"json_format": {key: record}},
    }
    return [{"name": "envoy.access_loggers.stderr", "typed_config": stderr}]


# What is read.


def read_record(line: str, wanted: RequestLog = "all") -> Record | None:
    """The record in a line that Envoy wrote; None if it has none, or one that nobody wants."""
    try:
        fields = json.loads(line)
        if CONNECTION_KEY in fields:
            return _connection(fields[CONNECTION_KEY])
        record = _request(fields[REQUEST_KEY])
    except (ValueError, KeyError, TypeError):
        return None
    return None if wanted == "failed" and record.error is None else record


def _connection(fields: Json) -> TunnelRecord | None:
    peer, app = str(fields["peer"] or ""), str(fields["app"] or "")
    flags, tls_error = str(fields["flags"] or "-"), str(fields["tls_error"] or "")
    error: HboneError | None
    if fields["chain"] == HTTP_CHAIN:
        if peer and not tls_error.startswith("TLS_error"):
            return None  # its requests have records
        error = _refused(tls_error, peer)
    elif app or (flags != "-" and not tls_error):
        # The app is dialled after the handshake only, so this peer was let in.
        error = _broken(flags, tls_error)
    else:
        error = _refused(tls_error, peer)
    identity = "" if isinstance(error, RefusedError) else peer
    return TunnelRecord(
        peer=str(fields["client"]),
        target=app,
        identity=identity,
        sent_bytes=int(fields["received"]),
        received_bytes=int(fields["sent"]),
        duration_s=int(fields["duration_ms"]) / 1000,
        flag=Flag.NONE if error is None else error.flag,
        error=error,
        opened=bool(identity),
    )


def _broken(flags: str, tls_error: str) -> HboneError | None:
    """How an admitted peer's connection ended, None for in order (Envoy, "Access logging")."""
    if tls_error:
        return StreamResetError(f"connection of the peer lost: {tls_error}", CANCEL)
    if flags != "-":
        return StreamResetError(f"envoy's response flags {flags}", CANCEL)
    return None


def _refused(tls_error: str, peer: str) -> HboneError:
    who = f" of {peer}" if peer else ""
    if not tls_error:
        return TlsFailureError(f"TLS handshake{who} not finished")
    kind = DeniedError if _NAME_DENIED.match(tls_error) else TlsFailureError
    return kind(f"TLS handshake{who} refused: {tls_error}")


def _request(fields: Json) -> RequestRecord:
    flag, error = _outcome(str(fields["flags"] or "-"), str(fields["details"] or ""), fields)
    return RequestRecord(
        peer=str(fields["client"]),
        identity=str(fields["peer"] or ""),
        app=fields["app"],
        method=str(fields["method"] or ""),
        authority=str(fields["authority"] or ""),
        path=str(fields["path"] or ""),
        status=int(fields["status"] or 0),
        request_id=fields["id"],
        sent_bytes=int(fields["received"]),
        received_bytes=int(fields["sent"]),
        duration_s=int(fields["duration_ms"]) / 1000,
        flag=flag,
        error=error,
    )


def _outcome(flags: str, details: str, fields: Json) -> tuple[Flag, str | None]:
    """How a request ended, and why it failed; None for an answer of the app's, unless that is a 5xx."""
    seen = frozenset(flags.split(","))
    if details.startswith(_RBAC_DENIED):
        return Flag.DENY, f"peer {fields['peer']} denied: HBONE_ALLOW and HBONE_DENY do not let it in"
    if seen & _BROKEN_BY_CLIENT:
        return Flag.DOWNSTREAM_RESET, f"the client broke off: {details}"
    if seen & _NO_CONNECTION:
        return Flag.CONNECT, f"the app cannot be connected: {fields['why'] or details}"
    if flags != "-":
        return Flag.UPSTREAM_RESET, f"envoy's response flags {flags}: {details}"
    return outcome(int(fields["status"] or 0))
