"""What ambient clients are told of a service that is registered for them.

An istiod of several networks is asked for what it gives ztunnels. No ztunnel runs here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mesh.ambient import NAMED, TOLD, endpoints, multi_network, told
from tests.mesh.control_plane import ControlPlane


@pytest.fixture(scope="module")
def istiod(plane: ControlPlane) -> Iterator[str]:
    """Another istiod of the same cluster: where it tells what it gives ztunnels."""
    with multi_network(plane):
        yield TOLD


def test_clients_ask_the_network_s_gateway_for_a_tunnel(plane: ControlPlane, istiod: str) -> None:
    """It is their only endpoint: hgate's port for sidecars, which expects mTLS, is none of theirs. And they
    expect the workload's account behind it."""
    with told(plane, istiod, "--ambient-network", "cloud") as found:
        (endpoint,) = endpoints(found)
        assert (endpoint["network"], endpoint["tunnelProtocol"]) == ("cloud", "HBONE")
        assert endpoint["networkGateway"]["hboneMtlsPort"] == 15008
        assert [port["servicePort"] for port in endpoint["services"][NAMED]["ports"]] == [8080, 8083]
        (service,) = [each for each in found["services"] if each["name"] == "registered"]
        assert service["subjectAltNames"] == ["spiffe://cluster.local/ns/demo/sa/hello"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:8080/debug/ambientz", TOLD])
def test_without_a_network_they_have_no_endpoint(plane: ControlPlane, istiod: str, url: str) -> None:
    """Rather than one that they would send plain text to."""
    with told(plane, url) as found:
        assert endpoints(found) == []
