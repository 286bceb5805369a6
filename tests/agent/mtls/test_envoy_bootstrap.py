from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from agent.config.settings import APP_PROTOCOLS, AppProtocol
from agent.mtls.envoy import BOOTSTRAP_FILE
from agent.mtls.envoy_bootstrap import bootstrap, secrets
from agent.mtls.envoy_http import HttpSettings
from agent.mtls.envoy_json import Json
from shared.address import Address
from shared.trust.peer_policy import PeerPolicy
from tests.support.world import find_envoy

VALIDATE_TIMEOUT_S = 20
ANY_PORT = Address("127.0.0.1", 0)
ALLOWED = PeerPolicy(["spiffe://demo.local/ns/demo/sa/*"], ["spiffe://demo.local/ns/demo/sa/guest"])


def configuration(folder: Path, app: str, protocol: AppProtocol) -> Json:
    return bootstrap(
        listen=ANY_PORT,
        app=Address.parse(app),
        policy=ALLOWED,
        secrets_folder=folder,
        connect_timeout_s=1,
        http=HttpSettings(protocol, 0, "failed"),
    )


def valid(folder: Path, told: Json) -> None:
    for name, content in {BOOTSTRAP_FILE: told, **secrets(folder)}.items():
        (folder / name).write_text(json.dumps(content))
    command = [find_envoy(), "--mode", "validate", "-l", "error", "-c", str(folder / BOOTSTRAP_FILE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=VALIDATE_TIMEOUT_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("app", "kind"),
    [("127.0.0.1:8080", "STATIC"), ("[::1]:8080", "STATIC"), ("localhost:8080", "STRICT_DNS")],
)
def test_envoy_accepts_the_configuration(tmp_path: Path, app: str, kind: str) -> None:
    told = configuration(tmp_path, app, "auto")
    assert told["static_resources"]["clusters"][0]["type"] == kind
    valid(tmp_path, told)


@pytest.mark.parametrize("protocol", APP_PROTOCOLS)
def test_envoy_accepts_it_for_each_kind_of_app(tmp_path: Path, protocol: AppProtocol) -> None:
    valid(tmp_path, configuration(tmp_path, "127.0.0.1:8080", protocol))


@pytest.mark.parametrize(
    ("protocol", "chains"),
    [("auto", ["http", "tcp"]), ("http1", ["http"]), ("h2c", ["http"]), ("tcp", ["tcp"])],
)
def test_an_app_has_the_filter_chains_of_what_it_speaks(
    tmp_path: Path, protocol: AppProtocol, chains: list[str]
) -> None:
    (listener,) = configuration(tmp_path, "127.0.0.1:8080", protocol)["static_resources"]["listeners"]
    default = listener.get("default_filter_chain")
    found = [*listener["filter_chains"], *([default] if default else [])]
    assert [chain["name"] for chain in found] == chains
