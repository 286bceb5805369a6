"""One tunnel from its first byte to its last, for each way in which it can end; what came is checked.

Each visit is a function that raises BrokenError if anything went otherwise than it should.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from shared.net.legs.tcp_end import reset
from tests.stress.clients import BrokenError, Tunnel, connect, opened, some_bytes
from tests.stress.echo import ECHO, FIN, PAYLOAD_BYTES, RST, TAIL
from tests.stress.mesh import DEAD_NAME, HELLO, NOBODY_NAME, UNKNOWN_NAME, hello_for
from tests.support.hellos import INTERNAL_ERROR, UNRECOGNIZED_NAME

Visit = Callable[[int], Awaitable[None]]
"""Called with the gateway's port."""


async def client_fin(port: int) -> None:
    """The client ends first, as most do."""
    tunnel = await opened(port, HELLO)
    await tunnel.say(some_bytes(PAYLOAD_BYTES))
    tunnel.end()
    await _over(tunnel)


async def early_fin(port: int) -> None:
    """The client has said everything, and ended, before the tunnel is open."""
    tunnel = await connect(port)
    first = HELLO + ECHO + some_bytes(PAYLOAD_BYTES)
    tunnel.send(first)
    tunnel.end()
    await tunnel.echoed(first)
    await _over(tunnel)


async def server_fin(port: int) -> None:
    """The server ends first; what the client still says arrives (the echo's log would tell)."""
    tunnel = await connect(port)
    first = HELLO + FIN + some_bytes(PAYLOAD_BYTES)
    tunnel.send(first)
    await tunnel.echoed(first)
    await tunnel.fin()
    tunnel.send(TAIL)
    tunnel.close()  # once all is sent


async def client_rst(port: int) -> None:
    """The client breaks an open tunnel."""
    tunnel = await opened(port, HELLO)
    await tunnel.say(some_bytes(PAYLOAD_BYTES))
    tunnel.reset()


async def early_rst(port: int) -> None:
    """The client breaks off before the tunnel is open."""
    tunnel = await connect(port)
    tunnel.send(HELLO + ECHO)
    reset(tunnel.transport)


async def server_rst(port: int) -> None:
    """The server breaks the tunnel, which may cost what was under way, but must not look like an end."""
    tunnel = await connect(port)
    tunnel.send(HELLO + RST + some_bytes(PAYLOAD_BYTES))
    await tunnel.until(lambda: tunnel.ended, "a reset")
    if not isinstance(tunnel.error, ConnectionResetError):
        tunnel.close()
        raise BrokenError(f"the server's RST came as {tunnel.error or 'FIN'}")


async def no_route(port: int) -> None:
    """No route matches the name."""
    await _refused(port, _NOBODY, UNRECOGNIZED_NAME)


async def no_target(port: int) -> None:
    """krun knows no such target: 404."""
    await _refused(port, _UNKNOWN, UNRECOGNIZED_NAME)


async def dead_target(port: int) -> None:
    """krun's target refuses the connection: 503."""
    await _refused(port, _DEAD, INTERNAL_ERROR)


VISITS: tuple[Visit, ...] = (
    client_fin,
    server_fin,
    client_rst,
    server_rst,
    early_fin,
    early_rst,
    no_route,
    client_fin,
    no_target,
    server_fin,
    dead_target,
    client_rst,
    server_rst,
)
"""One round; ten of thirteen reach the echo."""

_NOBODY, _UNKNOWN, _DEAD = map(hello_for, (NOBODY_NAME, UNKNOWN_NAME, DEAD_NAME))


async def _over(tunnel: Tunnel) -> None:
    """The other end's FIN comes, and then the connection is gone."""
    await tunnel.fin()
    tunnel.close()


async def _refused(port: int, hello: bytes, alert: bytes) -> None:
    """The client is told `alert`, and that it is the end."""
    tunnel = await connect(port)
    tunnel.send(hello)
    await tunnel.echoed(alert)
    await _over(tunnel)
