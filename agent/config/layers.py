"""Where the values of krun's variables come from: one layer over the other.

A flag goes over the environment, the environment over the mesh-env of the workload's namespace, that over the
mesh-env of istio-system, and that over what the platform tells. What no layer has keeps its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FLAG, PROCESS, DEFAULT = "flag", "environment", "default"
"""Origins: the two layers of the process itself, and where no layer has a value."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Values from one place."""

    name: str
    values: Mapping[str, str] = field(repr=False)
    """By variable. One that is empty counts as not set."""


@dataclass(frozen=True, slots=True)
class Layers:
    """All of them, the strongest first."""

    layers: tuple[Layer, ...]

    @classmethod
    def of(cls, environ: Mapping[str, str], flags: Mapping[str, str] | None = None) -> Layers:
        """Those that a process starts with. `flags` are by the variables that they stand for."""
        return cls((Layer(FLAG, flags or {}), Layer(PROCESS, environ)))

    def over(self, *others: Layer) -> Layers:
        """With weaker ones below."""
        return Layers((*self.layers, *others))

    def merged(self) -> dict[str, str]:
        """The value that counts of each variable."""
        values: dict[str, str] = {}
        for layer in reversed(self.layers):
            values.update((name, value) for name, value in layer.values.items() if value.strip())
        return values

    def origin(self, variable: str) -> str:
        """The layer whose value counts; `DEFAULT` if none has one."""
        for layer in self.layers:
            if layer.values.get(variable, "").strip():
                return layer.name
        return DEFAULT
