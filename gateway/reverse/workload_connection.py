"""A workload's connection, as the registry has it."""

from __future__ import annotations

import asyncio

from gateway.ports.member_connection import MemberConnection
from gateway.reverse.registry import Registration
from shared.errors import DeniedError


class WorkloadConnection(MemberConnection):
    """A workload's connection. `name` is its SNI, `expelled` why we have ended it."""

    name = ""
    registration: Registration | None = None
    expelled: DeniedError | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.name = getattr(transport.get_extra_info("ssl_object"), "asked_for", "")
        super().connection_made(transport)
