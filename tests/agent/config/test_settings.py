"""krun's environment: the defaults, each name, and what a wrong value says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from agent.config.settings import ENVIRONMENT, Settings, from_env
from shared.address import Address
from shared.credentials.certificates import authority
from shared.errors import EXIT_USAGE, UnavailableError, UsageError
from shared.net.tls.certificate_folder import ROOTS_FILE
from shared.trust.peer_patterns import TrustDomain
from shared.trust.spiffe import SpiffeId


def test_an_empty_environment_gives_the_defaults() -> None:
    assert from_env({}) == Settings()


def test_defaults_are_the_ports_of_the_original() -> None:
    default = Settings()
    assert str(default.listen) == "0.0.0.0:15009"
    assert str(default.app) == "127.0.0.1:8080"
    assert str(default.target("15003")) == "127.0.0.1:15003"
    assert str(default.target("22")) == "127.0.0.1:15022"
    assert str(default.envoy_admin) == "127.0.0.1:15000"


def test_every_name_has_a_meaning_on_one_line() -> None:
    for name, meaning in ENVIRONMENT.items():
        assert meaning and "\n" not in meaning, name


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("HBONE_LISTEN", "[::]:15009", "listen", Address("::", 15009)),
        ("HBONE_INBOUND", "builtin", "inbound", "builtin"),
        ("HBONE_INBOUND", "None", "inbound", "none"),
        ("HBONE_INBOUND_LISTEN", "127.0.0.2:15003", "inbound_listen", Address("127.0.0.2", 15003)),
        ("HBONE_SSHD", "localhost:2222", "sshd", Address("localhost", 2222)),
        ("HBONE_APP", "localhost:3000", "app", Address("localhost", 3000)),
        ("HBONE_APP_PROTOCOL", "h2c", "app_protocol", "h2c"),
        ("HBONE_APP_PROTOCOL", "HTTP1", "app_protocol", "http1"),
        ("HBONE_CERTS", "/certs", "certificates", Path("/certs")),
        ("HBONE_ALLOW", "spiffe://a/**, spiffe://b/ns/x/sa/*", "allow", ("spiffe://a/**", "spiffe://b/ns/x/sa/*")),
        ("TRUST_DOMAIN", "demo.local", "trust_domain", "demo.local"),
        ("TRUST_DOMAIN", "demo.local", "allow", ()),
        ("MESH", "gke://", "mesh", "gke://"),
        ("XDS_ADDR", "istiod.istio-system.svc:15012", "xds", Address("istiod.istio-system.svc", 15012)),
        ("XDS_ADDR", "-", "xds", None),
        ("ENVOY_BIN", "/opt/envoy", "envoy_bin", "/opt/envoy"),
        ("HBONE_ENVOY_ADMIN", "[::1]:15000", "envoy_admin", Address("::1", 15000)),
        ("HBONE_ENVOY_ADMIN", "-", "envoy_admin", None),
        ("HBONE_APP_START_TIMEOUT", "30", "app_start_timeout_s", 30.0),
        ("HBONE_DIAL_TIMEOUT", "500ms", "dial_timeout_s", 0.5),
        ("HBONE_CONNECTION_IDLE_TIMEOUT", "0", "connection_idle_timeout_s", 0.0),
        ("HBONE_DRAIN_TIMEOUT", "0", "drain_timeout_s", 0.0),
        ("HBONE_HANDSHAKE_TIMEOUT", "2.5", "handshake_timeout_s", 2.5),
        ("HBONE_IDLE_TIMEOUT", "0", "idle_timeout_s", 0.0),
        ("HBONE_MAX_CONNECTIONS", "7", "max_connections", 7),
        ("HBONE_MAX_TUNNELS", "80", "max_tunnels", 80),
        ("HBONE_MAX_REQUESTS", "80", "max_requests", 80),
        ("HBONE_MAX_BUFFERED", "64MiB", "max_buffered_bytes", 64 << 20),
        ("HBONE_MAX_BUFFERED", "0", "max_buffered_bytes", 0),
        ("HBONE_HALF_CLOSED_TIMEOUT", "900", "half_closed_timeout_s", 900.0),
        ("HBONE_HIDE_FROM_APP", "*_PASSWORD, API_KEY", "hidden_from_app", ("*_PASSWORD", "API_KEY")),
        ("HBONE_PASS_TO_APP", "HBONE_TOKENS", "passed_to_app", ("HBONE_TOKENS",)),
        ("HBONE_CORE_DUMPS", "1", "debuggable", True),
        ("HBONE_CORE_DUMPS", "0", "debuggable", False),
        ("HBONE_LOG_LEVEL", "DEBUG", "log_level", "debug"),
        ("HBONE_LOG_FORMAT", "json", "log_format", "json"),
    ],
)  # fmt: skip
def test_each_variable_sets_its_field(name: str, text: str, field: str, value: object) -> None:
    assert getattr(from_env({name: text}), field) == value


@pytest.mark.parametrize("name", [name for name in ENVIRONMENT if name != "PORT_*"])
def test_set_but_empty_counts_as_not_set(name: str) -> None:
    assert from_env({name: " "}) == Settings()


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("HBONE_LISTEN", "15009", "no port: write HOST:PORT"),
        ("HBONE_INBOUND", "istio", "must be auto, envoy, builtin, pilot-agent or none"),
        ("HBONE_INBOUND_LISTEN", "localhost:15003", "the host has to be an IP address"),
        ("HBONE_SSHD", "127.0.0.1:0", "port 0 cannot be dialled"),
        ("HBONE_APP", "127.0.0.1:99999", "port '99999' is not in 0..65535"),
        ("HBONE_APP_PROTOCOL", "h2", "must be auto, http1, h2c or tcp"),
        ("HBONE_ALLOW", "spiffe://*/ns/demo/sa/hello", "the trust domain has to be written out"),
        ("HBONE_ALLOW", ",", "no SPIFFE ID pattern"),
        ("TRUST_DOMAIN", "Demo.Local", "the trust domain may have only a-z"),
        ("TRUST_DOMAIN", "*", "the trust domain may have only a-z"),
        ("TRUST_DOMAIN", "demo.local/ns/x", "the trust domain may have only a-z"),
        ("XDS_ADDR", "istiod", "no port: write HOST:PORT"),
        ("HBONE_ENVOY_ADMIN", "0.0.0.0:15000", "it has to be a loopback address"),
        ("HBONE_APP_START_TIMEOUT", "0", "must be 0.001s at least"),
        ("HBONE_DIAL_TIMEOUT", "inf", "must be a duration"),
        ("HBONE_DRAIN_TIMEOUT", "-1", "must be a duration"),
        ("HBONE_HANDSHAKE_TIMEOUT", "0", "must be 0.001s at least"),
        ("HBONE_IDLE_TIMEOUT", "1d", "must be a duration"),
        ("HBONE_MAX_CONNECTIONS", "0", "must be in 1..9999999"),
        ("HBONE_MAX_TUNNELS", "1e3", "must be a whole number"),
        ("HBONE_HIDE_FROM_APP", ",", "nothing but commas"),
        ("HBONE_CORE_DUMPS", "yes", "must be 0 or 1"),
        ("HBONE_MAX_REQUESTS", "0", "must be in 1..9999999"),
        ("HBONE_MAX_BUFFERED", "1000", "must be 0 or in 1048576..1125899906842624 bytes"),
        ("HBONE_LOG_LEVEL", "loud", "must be debug, info, warning or error"),
        ("HBONE_LOG_FORMAT", "xml", "must be json or text"),
        ("PORT_DB", "db.internal", "no port: write HOST:PORT"),
    ],
)
def test_a_wrong_value_is_named_with_the_reason(name: str, text: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_env({name: text})
    assert str(caught.value).startswith(f"invalid {name}={text} (")
    assert reason in str(caught.value)
    assert caught.value.exit_code == EXIT_USAGE


# Targets.


def test_targets_are_found_as_written_or_in_capitals() -> None:
    told = from_env({"PORT_DB": "10.0.0.7:5432", "PORT_web": "web.internal:80", "PORT": "8080"})
    assert told.target("DB") == told.target("db") == Address("10.0.0.7", 5432)
    assert told.target("web") == Address("web.internal", 80)
    assert told.target("WEB") is None
    assert told.target("") is None
    assert told.target("15001") is None


def test_the_exact_name_counts_before_the_one_in_capitals() -> None:
    told = from_env({"PORT_DB": "10.0.0.1:1", "PORT_db": "10.0.0.2:2"})
    assert told.target("db") == Address("10.0.0.2", 2)
    assert told.target("Db") == Address("10.0.0.1", 1)


def test_the_moved_ends_keep_their_names() -> None:
    told = from_env({"HBONE_INBOUND_LISTEN": "127.0.0.1:25003", "HBONE_SSHD": "127.0.0.1:2022"})
    assert told.target("15003") == Address("127.0.0.1", 25003)
    assert told.target("22") == Address("127.0.0.1", 2022)


def test_no_variable_replaces_the_two_ends_of_the_original() -> None:
    told = from_env({"PORT_22": "10.0.0.1:22", "PORT_15003": "10.0.0.1:15003"})
    assert told.target("22") == Settings().sshd
    assert told.target("15003") == Settings().inbound_listen


def test_a_bare_number_is_the_apps_own_variable_and_opens_nothing() -> None:
    assert from_env({"PORT_METRICS": "9090", "PORT_EMPTY": ""}).targets == {}


# The mTLS end.


@pytest.mark.parametrize(
    ("wanted", "envoy", "certificates", "chosen"),
    [
        ("auto", True, True, "envoy"),
        ("auto", False, True, "builtin"),
        ("auto", True, False, "none"),
        ("auto", False, False, "none"),
        ("envoy", True, True, "envoy"),
        ("builtin", True, True, "builtin"),
        ("none", True, True, "none"),
        ("none", False, False, "none"),
        ("pilot-agent", True, True, "pilot-agent"),
        ("pilot-agent", False, False, "pilot-agent"),
    ],
)
def test_choice_of_the_mtls_end(wanted: str, envoy: bool, certificates: bool, chosen: str) -> None:
    told = from_env({"HBONE_INBOUND": wanted, "MCON_ADDR": "10.0.0.1"})
    pilot = wanted == "pilot-agent"
    found = told.choose_inbound(envoy_found=envoy, certificates_found=certificates, pilot_found=pilot)
    assert found == chosen


@pytest.mark.parametrize(
    ("xds", "pilot", "chosen"),
    [
        ("istiod:15012", True, "pilot-agent"),
        ("istiod:15012", False, "envoy"),
        ("-", True, "envoy"),
        ("", True, "envoy"),
    ],
)
def test_pilot_agent_is_chosen_where_there_is_a_mesh(xds: str, pilot: bool, chosen: str) -> None:
    told = from_env({"XDS_ADDR": xds})
    assert told.choose_inbound(envoy_found=True, certificates_found=True, pilot_found=pilot) == chosen


@pytest.mark.parametrize(
    ("wanted", "envoy", "certificates", "missing"),
    [
        ("envoy", False, True, "no Envoy binary found: set ENVOY_BIN"),
        ("envoy", True, False, "no certificates in /certs: set HBONE_CERTS"),
        ("builtin", True, False, "no certificates in /certs: set HBONE_CERTS"),
        ("pilot-agent", True, True, "it is not on PATH, nor in /usr/local/bin: set HBONE_PILOT_AGENT"),
    ],
)
def test_what_was_asked_for_and_lacks_something(
    wanted: str, envoy: bool, certificates: bool, missing: str
) -> None:
    told = from_env({"HBONE_INBOUND": wanted, "HBONE_CERTS": "/certs", "XDS_ADDR": "istiod:15012"})
    with pytest.raises(UnavailableError, match=f"HBONE_INBOUND={wanted}: {missing}"):
        told.choose_inbound(envoy_found=envoy, certificates_found=certificates)


def test_certificates_are_there_when_all_three_files_are(tmp_path: Path) -> None:
    told = from_env({"HBONE_CERTS": str(tmp_path)})
    ours = authority.Authority.create("demo.local")
    ours.write(tmp_path, ours.issue(dns_names=["hello"]))
    assert told.certificates_found()
    (tmp_path / ROOTS_FILE).unlink()
    assert not told.certificates_found()


def test_settings_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().log_level = "debug"  # type: ignore[misc]  # what the test is about


def test_who_may_not_come_in() -> None:
    found = from_env(
        {
            "TRUST_DOMAIN": "new.local",
            "TRUST_DOMAIN_ALIASES": "old.local, older.local",
            "HBONE_ALLOW": "ns/demo-*/sa/*",
            "HBONE_DENY": "ns/demo-1/sa/*, spiffe://x/**",
            "HBONE_CRL": "/etc/crl.pem",
        }
    )
    assert (found.allow, found.deny) == (("ns/demo-*/sa/*",), ("ns/demo-1/sa/*", "spiffe://x/**"))
    assert found.crl == Path("/etc/crl.pem")
    assert found.trust(found.allow) == TrustDomain("new.local", ("old.local", "older.local"))


def test_our_trust_domain_is_the_certificate_s_where_it_is_needed(tmp_path: Path) -> None:
    found = dataclasses.replace(Settings(), certificates=tmp_path)
    assert found.trust(("spiffe://a/**",)) == TrustDomain()
    for wanting in (found, dataclasses.replace(found, trust_domain_aliases=("old.local",))):
        with pytest.raises(UnavailableError):
            wanting.trust(("ns/a/sa/b",))
    issued = authority.Authority.create("demo.local")
    issued.write(tmp_path, issued.issue(SpiffeId("demo.local", "/x")))
    assert found.trust(("ns/a/sa/b",)) == TrustDomain("demo.local")


@pytest.mark.parametrize("value", [",", "Old.Local", "a/b", ",".join("abcdefghijklmnopq")])
def test_aliases_that_are_none(value: str) -> None:
    with pytest.raises(UsageError, match="invalid TRUST_DOMAIN_ALIASES"):
        from_env({"TRUST_DOMAIN_ALIASES": value})
