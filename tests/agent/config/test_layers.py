from __future__ import annotations

from agent.config.layers import Layer, Layers


def test_the_stronger_layer_counts() -> None:
    layers = Layers.of({"A": "environment", "B": "environment", "C": " "}, {"A": "flag"}).over(
        Layer("mesh-env of demo", {"B": "namespace", "C": "namespace", "D": "namespace"}),
        Layer("mesh-env of istio-system", {"C": "mesh", "D": "mesh", "E": "mesh", "F": ""}),
    )
    assert layers.merged() == {
        "A": "flag",
        "B": "environment",
        "C": "namespace",
        "D": "namespace",
        "E": "mesh",
    }
    assert [layers.origin(name) for name in "ABCEF"] == [
        "flag",
        "environment",
        "mesh-env of demo",
        "mesh-env of istio-system",
        "default",
    ]
