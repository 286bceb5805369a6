"""`hbone forward --sni` through a real hgate to both mTLS ends, with clients that speak plain TCP."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hbone.demo.mesh import SNI, TRUST_DOMAIN
from shared.errors import EXIT_DENIED, EXIT_UNAVAILABLE
from tests.support.forwards import Forward, carry, output_of, started
from tests.support.world import World

BODY = os.urandom(8 << 20)


def flags(world: World, *, sni: str = SNI) -> list[object]:
    """Without --ca: the roots are beside the certificate."""
    return [
        world.gateway,
        "--sni",
        sni,
        "--cert",
        world.caller.certificates,
        "--key",
        world.caller.key,
        "-L",
        "0",
    ]


@pytest.fixture(scope="module")
def forward(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forward]:
    with started(tmp_path_factory.mktemp("forward"), *flags(world)) as forward:
        yield forward


def test_it_says_where_it_leads(forward: Forward, world: World) -> None:
    forward.says(rf"^127\.0\.0\.1:\d+ -> {re.escape(SNI)} by way of {world.gateway}$")


def test_eight_transfers_at_once(forward: Forward) -> None:
    with ThreadPoolExecutor(8) as threads:
        digests = set(threads.map(lambda _: carry(forward.connect(), BODY), range(8)))
    assert digests == {hashlib.sha256(BODY).hexdigest()}


def test_a_name_that_has_no_route(world: World) -> None:
    done = output_of(*flags(world, sni="nobody.example"))
    assert done.returncode == EXIT_UNAVAILABLE
    text = "hbone: tls handshake: refused by the far side: "
    assert done.stderr.decode().startswith(text)
    assert "unrecognized name" in done.stderr.decode()


def test_a_service_with_another_name(world: World) -> None:
    done = output_of(*flags(world), "--peer", f"spiffe://{TRUST_DOMAIN}/ns/other/sa/*")
    assert done.returncode == EXIT_DENIED
    name = f"spiffe://{TRUST_DOMAIN}/ns/demo/sa/hello"
    assert done.stderr.decode() == f"hbone: peer {name} denied: no rule allows it\n"
