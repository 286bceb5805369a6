"""What a dial asks for: endpoints of addresses at once, those of names from the event loop's resolver."""

from __future__ import annotations

import socket
import subprocess
import sys

from shared.address import Address
from shared.net.names.names import resolve


async def test_an_ip_address_is_taken_as_it_is() -> None:
    assert await resolve(Address("127.0.0.1", 80)) == [(socket.AF_INET, ("127.0.0.1", 80))]
    assert await resolve(Address("::1", 80)) == [(socket.AF_INET6, ("::1", 80, 0, 0))]


async def test_localhost_needs_no_name_server() -> None:
    endpoints = await resolve(Address("localhost", 80))
    assert (socket.AF_INET, ("127.0.0.1", 80)) in endpoints
    assert len(endpoints) == len(set(endpoints))


def test_addresses_need_no_resolver() -> None:
    program = """
import asyncio, sys
from shared.address import Address
from shared.net.names.names import resolve
asyncio.run(resolve(Address("127.0.0.1", 80)))
assert not {"shared.net.names.resolver", "pycares"} & set(sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
