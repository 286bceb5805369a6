"""What the `:authority` of a CONNECT names: the target of a tunnel."""

from __future__ import annotations

from shared import ports
from shared.address import Address
from shared.errors import BadRequestError

FORBIDDEN_PORTS = frozenset({ports.HBONE, ports.ZTUNNEL_INBOUND, ports.ZTUNNEL_OUTBOUND, ports.ZTUNNEL_SOCKS})
"""Ports of proxies of the mesh, which would take our word for who the client is, or loop; ztunnel refuses the
same."""

MAX_AUTHORITY_BYTES = 300
"""A host name of 253 characters, a colon and a port have less."""


def read_authority(value: bytes) -> Address:
    """The target that a CONNECT's `:authority` names (RFC 9110 section 9.3.6): host, or address, and port.

    Raises BadRequestError if it is malformed or its port is forbidden.
    """
    try:
        if len(value) > MAX_AUTHORITY_BYTES:
            raise ValueError(f"over {MAX_AUTHORITY_BYTES} bytes")
        target = Address.parse(value.decode("ascii"))
        if not target.port:
            raise ValueError("port 0 cannot be dialled")
        if "%" in target.host:
            raise ValueError("an address with a zone means another machine's link")
    except UnicodeDecodeError as error:
        raise BadRequestError(":authority: not ASCII") from error
    except ValueError as error:
        raise BadRequestError(f":authority: {error}") from error
    if target.port in FORBIDDEN_PORTS:
        raise BadRequestError(
            f":authority: no tunnel leads to port {target.port}, which is a mesh proxy's own"
        )
    return target
