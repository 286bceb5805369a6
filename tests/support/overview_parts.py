"""What one process knows for the admin port's page, made up."""

from __future__ import annotations

from typing import Any

from gateway.ops.overview import TOTALS, Part, cut
from shared.ops.readiness import READY


def tunnel(client: str, sent: int = 0) -> dict[str, Any]:
    """The row of a tunnel, as far as its place in the list depends on it."""
    return {"id": client, "from": client, "bytes_sent": sent, "bytes_recv": 0}


def part(**lists: Any) -> Part:
    """With these lists, and `now`, `up_s`, `refusals`; `total` is each of the totals."""
    given = {
        name: cut(lists.get(name, [])) for name in ("routes", "origins", "tunnels", "tokens", "certificates")
    }
    totals = dict.fromkeys(TOTALS, lists.get("total", 0))
    return {
        "now": lists.get("now", 5.0),
        "up_s": lists.get("up_s", 60),
        "readiness": lists.get("readiness", READY),
        "connections": 1,
        "connections_limit": 100,
        "totals": totals,
        "refusals": lists.get("refusals", []),
        **given,
    }
