"""The end of what serves in this process: its closed connections have sent their last bytes."""

from __future__ import annotations

import asyncio
import socket

from shared.net.legs import tcp_end
from shared.net.legs.tcp_end import LastBytes, last_bytes_left
from shared.tasks import spawn
from tests.support.tcp_peer import PATIENCE_S


async def last_bytes_are_gone() -> None:
    """Returns when every closed leg's peer has taken what was written to it; fails with the state of those
    that have not."""
    left = last_bytes_left()
    waiting = spawn(left.wait(), name="last bytes")
    await asyncio.wait({waiting}, timeout=PATIENCE_S)
    waiting.cancel()
    assert left.is_set(), f"last bytes are left: {[_state(one) for one in tcp_end._leaving]}"


def _state(one: LastBytes) -> str:
    transport = one._transport
    sock: socket.socket | None = transport.get_extra_info("socket")
    tcp = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] if sock and sock.fileno() >= 0 else None
    return (
        f"closing {transport.is_closing()}, peer ended {one._peer_ended}, unsent {one._unsent} at the last "
        f"look and {tcp_end.unsent_bytes(transport)} now, next look in {one._next_s:g} s, state of TCP {tcp}"
    )
