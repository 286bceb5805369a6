"""The address that this machine has towards the mesh, by which the mesh knows it."""

from __future__ import annotations

import socket

from shared.address import Address

ANYWHERE = ("192.0.2.1", 9)
"""Nobody's address (RFC 5737), for the default route."""


def own_address(control_plane: Address | None) -> str:
    """This machine's address on its way to `control_plane`, by the kernel's routes: nothing is sent."""
    target = (
        (control_plane.host, control_plane.port)
        if control_plane is not None and control_plane.is_ip
        else ANYWHERE
    )
    with socket.socket(socket.AF_INET6 if ":" in target[0] else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(target)
            return str(sock.getsockname()[0])
        except OSError:  # no route
            return "127.0.0.1"
