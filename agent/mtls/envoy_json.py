"""What the parts of Envoy's configuration have in common."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

TYPES = "type.googleapis.com/envoy.extensions"
"""What the types of Envoy's extensions begin with."""
