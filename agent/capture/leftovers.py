"""Removes the rules of a krun that was killed, before the next one connects to anything.

A pod's network namespace outlives its containers. With the rules in it, and nobody on their port, krun could
reach neither the API server nor istiod. Who captures holds a name in the network namespace, an abstract
socket's (unix(7)), which the kernel frees with the process: rules whose name is free are nobody's. Istio's
chains are left alone if krun has not made them (`rules.MARK`): a pod may have an istio-init.

Most starts find nothing, and ask the kernel itself, because each program takes 10 ms.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from pathlib import Path

from shared.errors import UnavailableError

log = logging.getLogger("hbone.capture")

NAME = b"\0krun-capture"

LEGACY_TABLES = (Path("/proc/net/ip_tables_names"), Path("/proc/net/ip6_tables_names"))
"""Tables of the older interface, a line each; no file, no table."""

OURS = b"KRUN_"

_NETLINK_NETFILTER = 12
_LIST_CHAINS = 10 << 8 | 4  # NFNL_SUBSYS_NFTABLES, NFT_MSG_GETCHAIN (linux/netfilter/nf_tables.h)
_REQUEST_ALL = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port

MAX_BYTES = 4 << 20
"""Of the kernel's answer."""

TIMEOUT_S = 1.0


def held() -> socket.socket | None:
    """The name of who captures, until the socket is closed; None: another process has it."""
    own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        own.bind(NAME)
    except OSError:
        own.close()
        return None
    return own


async def remove(search_path: str | None) -> None:
    """Removes them, where there are any and krun may. Raises UnavailableError if they cannot be removed."""
    if os.geteuid() != 0 or not may_be_there():
        return
    from agent.capture.iptables import Iptables

    iptables = Iptables(search_path)
    if iptables.lacking() or (name := held()) is None:
        return
    with name:
        try:
            count = await iptables.remove_left()
        except UnavailableError as error:
            raise UnavailableError(f"another krun was killed, and its {error}") from error
    if count:
        log.info("removed %d chains of iptables, which a krun that was killed has left", count)


def may_be_there() -> bool:
    """Whether there may be chains of krun's."""
    for tables in LEGACY_TABLES:
        with contextlib.suppress(OSError):
            if tables.read_bytes():
                return True
    with contextlib.suppress(OSError):  # a kernel without that interface has no such chains
        return _nft_has(OURS)
    return False


def _nft_has(word: bytes) -> bool:
    """Whether the kernel's list of chains has `word` in it. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as kernel:
        kernel.settimeout(TIMEOUT_S)
        family = struct.pack("=BBH", 0, 0, 0)  # nfgenmsg: all of them
        kernel.send(_HEADER.pack(_HEADER.size + len(family), _LIST_CHAINS, _REQUEST_ALL, 1, 0) + family)
        count = 0
        while count < MAX_BYTES and (part := kernel.recv(1 << 16)):
            if word in part:
                return True
            if _HEADER.unpack_from(part)[1] in (_ERROR, _DONE):
                return False
            count += len(part)
    return count >= MAX_BYTES
