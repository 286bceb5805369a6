"""When there is a token exchange, where, and whom it is for."""

from __future__ import annotations

import pytest

from agent.config.settings import from_env
from agent.config.sts_settings import StsSettings
from shared import ports
from shared.address import Address
from shared.errors import UsageError

GKE = {"PROJECT_ID": "proj", "CLUSTER_NAME": "clu", "CLUSTER_LOCATION": "loc"}
POOL = "//iam.googleapis.com/projects/42/locations/global/workloadIdentityPools/pool/providers/here"


def read(**environ: str) -> StsSettings | None:
    return from_env(environ).sts


def test_there_is_none_outside_gke() -> None:
    assert read() is None
    assert read(PROJECT_ID="proj", CLUSTER_NAME="clu") is None
    assert read(HBONE_STS_AUDIENCE=POOL) is None


def test_on_gke_it_is_where_the_original_has_it() -> None:
    settings = read(**GKE, PROJECT_NUMBER="42")
    assert settings is not None
    assert settings.listen == Address("127.0.0.1", ports.STS) == Address("127.0.0.1", 15463)
    assert settings.google.subject_audience == "proj.svc.id.goog"
    assert settings.google.exchange_account == "service-42@gcp-sa-meshdataplane.iam.gserviceaccount.com"


def test_it_can_be_switched_off_and_moved() -> None:
    assert read(**GKE, HBONE_STS_LISTEN="-") is None
    settings = read(**GKE, HBONE_STS_LISTEN="[::1]:1234", HBONE_TOKEN_STEP_TIMEOUT="2")
    assert settings is not None and settings.listen == Address("::1", 1234)
    assert settings.google.step_timeout_s == 2


def test_a_pool_has_to_be_asked_for() -> None:
    settings = read(HBONE_STS_AUDIENCE=POOL, HBONE_STS_LISTEN="127.0.0.1:0")
    assert settings is not None and settings.google.exchange_audience == POOL


@pytest.mark.parametrize("address", ["0.0.0.0:15463", "10.0.0.1:15463", "localhost:15463", "[::]:1"])
def test_only_loopback(address: str) -> None:
    with pytest.raises(UsageError, match=r"invalid HBONE_STS_LISTEN=.*tokens are answered in the clear"):
        read(**GKE, HBONE_STS_LISTEN=address)


def test_an_exchange_for_nobody() -> None:
    with pytest.raises(UsageError, match="set PROJECT_ID, CLUSTER_NAME and CLUSTER_LOCATION, or"):
        read(HBONE_STS_LISTEN="127.0.0.1:15463")


def test_a_google_setting_that_is_wrong() -> None:
    with pytest.raises(UsageError, match="invalid PROJECT_NUMBER"):
        read(**GKE, PROJECT_NUMBER="many")
