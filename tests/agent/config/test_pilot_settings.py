"""What pilot-agent is told of us, and what it cannot do without."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from agent.config.kubernetes_settings import ISTIO_FILE
from agent.config.pilot_settings import UID, PilotSettings
from agent.config.settings import from_env
from shared.address import Address
from shared.errors import UsageError


def read(**environ: str) -> PilotSettings:
    return from_env(environ).pilot


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "default"),
        ({"WORKLOAD_SERVICE_ACCOUNT": "hello"}, "hello"),
        ({"WORKLOAD_SERVICE_ACCOUNT": "hello", "K_SERVICE": "service"}, "service"),
        ({"K_SERVICE": "service", "WORKLOAD_NAME": "mine"}, "mine"),
    ],
)
def test_the_workload_s_name(environ: dict[str, str], name: str) -> None:
    assert read(**environ).workload == name


def test_a_revision_is_a_label_and_part_of_each_instance_s_name() -> None:
    first, second = read(K_SERVICE="shop", K_REVISION="shop-7"), read(K_SERVICE="shop", K_REVISION="shop-7")
    assert first.labels["service.istio.io/canonical-revision"] == "shop-7"
    assert re.fullmatch("shop-7-[0-9a-f]{8}", first.pod)
    assert first == second and first.pod != second.pod
    without = read(K_SERVICE="shop")
    assert (without.pod, "service.istio.io/canonical-revision" in without.labels) == ("shop", False)


@pytest.mark.parametrize(
    ("environ", "istiod"),
    [
        ({"XDS_ADDR": "xds:1", "CA_ADDR": "ca:2", "MCON_ADDR": "mcon"}, Address("xds", 1)),
        ({"CA_ADDR": "ca:2", "MCON_ADDR": "mcon"}, Address("ca", 2)),
        ({"MCON_ADDR": "mcon"}, Address("mcon", 15012)),
        ({}, None),
    ],
)
def test_where_istiod_is(environ: dict[str, str], istiod: Address | None) -> None:
    assert read(**environ).istiod == istiod


def test_without_istiod_it_is_not_started() -> None:
    with pytest.raises(UsageError, match="none of XDS_ADDR, CA_ADDR and MCON_ADDR is set: where is istiod"):
        read(HBONE_INBOUND="pilot-agent")
    assert read(HBONE_INBOUND="pilot-agent", PROXY_CONFIG="discoveryAddress: istiod:15012").istiod is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("concurrency: 2", {"concurrency": 2}),
        ('{"concurrency": 2}', {"concurrency": 2}),
        ("drainDuration: 5s\nproxyMetadata:\n  A: b", {"drainDuration": "5s", "proxyMetadata": {"A": "b"}}),
    ],
)
def test_proxy_config(text: str, told: dict[str, object]) -> None:
    assert read(PROXY_CONFIG=text).proxy_config == told


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("PROXY_CONFIG", "a: [", "no YAML in line 1"),
        ("PROXY_CONFIG", "just words", "no mapping of names to values"),
        ("PROXY_CONFIG", "1: 2", "no mapping of names to values"),
        ("K_REVISION", "a~b", "at most 63 letters"),
        ("ENVOY_LOG_LEVEL", "loud", "'loud' is no level of Envoy's"),
        ("ENVOY_LOG_LEVEL", "info,upstream:all", "'upstream:all' is no level of Envoy's"),
    ],
)
def test_what_is_wrong_is_named(name: str, text: str, fault: str) -> None:
    with pytest.raises(UsageError, match=f"invalid {name}=.*{fault}"):
        read(**{name: text})


def test_it_gets_istio_s_variables_and_not_the_app_s() -> None:
    told = read(ISTIO_META_NETWORK="n", PILOT_X="1", PEER_METADATA_DISCOVERY="false", DB_PASSWORD="secret")
    assert told.passed == {"ISTIO_META_NETWORK": "n", "PILOT_X": "1", "PEER_METADATA_DISCOVERY": "false"}


def test_its_token_is_one_that_krun_keeps_or_that_is_mounted() -> None:
    assert read().token_file == ISTIO_FILE
    assert read(HBONE_K8S_TOKENS="istio-ca=/tokens/istio").token_file == Path("/tokens/istio")


@pytest.mark.parametrize("inbound", ["auto", "pilot-agent"])
def test_its_user_may_read_the_token(inbound: str, tmp_path: Path) -> None:
    program = tmp_path / "pilot-agent"
    program.write_text("#!/bin/sh")
    program.chmod(0o755)
    told = {
        "HBONE_INBOUND": inbound,
        "XDS_ADDR": "i:1",
        "HBONE_K8S_TOKENS": "istio-ca",
        "PATH": str(tmp_path),
    }
    kept = from_env(told).kubernetes
    assert kept is not None
    assert kept.owner == ((UID, UID) if os.geteuid() == 0 else None)


def test_where_there_is_none_the_token_is_ours() -> None:
    kept = from_env({"XDS_ADDR": "i:1", "HBONE_K8S_TOKENS": "istio-ca", "PATH": "/nowhere"}).kubernetes
    assert kept is not None
    assert kept.owner is None
