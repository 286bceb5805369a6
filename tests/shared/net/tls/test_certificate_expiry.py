"""The end of a peer's certificate: noticed in time, by a machine that slept, and with clocks that are set."""

from __future__ import annotations

import asyncio
import ssl

import pytest

from shared.errors import DeniedError, ExpiredError
from shared.net.tls.certificate_expiry import (
    GRACE_S,
    LOOK_S,
    CertificateExpiry,
    end_of,
)
from shared.trust.spiffe import SpiffeId
from tests.shared.net.hasty_loop import hasty
from tests.support.revocation import Hierarchy

WHO = "spiffe://demo.local/ns/demo/sa/client"
START = 1_790_000_000.0
DRAIN_S = 20.0


class Watched:
    """A certificate that ends `left_s` seconds from now, by a wall clock that runs with the loop's."""

    def __init__(self, left_s: float, *, grace_s: float = GRACE_S) -> None:
        self._loop = asyncio.get_running_loop()
        self._ahead = START - self._loop.time()
        self.ends = START + left_s
        self.story: list[tuple[str, object]] = []
        """What was called, and how long after the end."""
        self.drain_timeout_s = DRAIN_S
        self.expiry = CertificateExpiry(
            self.ends,
            WHO,
            ended=lambda error: self._called("ended", error),
            over=lambda error: self._called("over", error),
            drain_timeout_s=lambda: self.drain_timeout_s,
            grace_s=grace_s,
            wall_clock=self.now,
        )
        self.expiry.start()

    def now(self) -> float:
        return self._loop.time() + self._ahead

    def set_clock(self, seconds: float) -> None:
        """So much forward, or back; it is the same when the machine has slept for so long."""
        self._ahead += seconds

    def _called(self, what: str, error: ExpiredError) -> None:
        assert str(error) == f"peer certificate denied: that of {WHO} has expired"
        assert self.expiry.error is error
        self.story.append((what, pytest.approx(self.now() - self.ends, abs=0.5)))


@hasty
async def test_at_its_end_the_peer_is_told_and_after_the_drain_timeout_it_is_over() -> None:
    watched = Watched(10_000.0)
    await asyncio.sleep(9_999)
    assert watched.expiry.allows_stream()
    assert watched.story == []
    await asyncio.sleep(2)
    assert watched.story == [("ended", 0.0)]
    await asyncio.sleep(10_000)
    assert watched.story == [("ended", 0.0), ("over", DRAIN_S)]


@hasty
async def test_streams_that_are_on_their_way_are_served_for_a_moment() -> None:
    watched = Watched(10.0)
    await asyncio.sleep(10.1)
    assert watched.story == [("ended", 0.0)]
    assert watched.expiry.allows_stream()
    await asyncio.sleep(GRACE_S)
    assert not watched.expiry.allows_stream()
    assert watched.story == [("ended", 0.0)]
    watched.expiry.close()


@hasty
async def test_streams_of_our_own_are_not_on_their_way() -> None:
    watched = Watched(10.0, grace_s=0.0)
    await asyncio.sleep(9.9)
    assert watched.expiry.allows_stream()
    await asyncio.sleep(0.2)
    assert not watched.expiry.allows_stream()
    watched.expiry.close()


@hasty
async def test_a_machine_that_slept_notices_at_the_next_stream() -> None:
    """The loop's timers have stood still, and are still far away."""
    watched = Watched(40.0)
    watched.set_clock(8 * 3600)
    assert not watched.expiry.allows_stream()
    assert watched.story == [("ended", 8 * 3600 - 40.0)]
    await asyncio.sleep(DRAIN_S + 1)
    assert [what for what, _ in watched.story] == ["ended", "over"]


@hasty
async def test_a_machine_that_slept_notices_without_one() -> None:
    watched = Watched(30 * 86400.0)
    watched.set_clock(31 * 86400)
    await asyncio.sleep(LOOK_S + 1)
    assert [what for what, _ in watched.story] == ["ended"]
    watched.expiry.close()


@hasty
async def test_a_clock_that_is_set_back_gives_it_more_time() -> None:
    watched = Watched(30.0)
    watched.set_clock(-100)
    await asyncio.sleep(100)
    assert watched.expiry.allows_stream()
    assert watched.story == []
    await asyncio.sleep(31)
    assert watched.story == [("ended", 0.0)]
    watched.expiry.close()


@hasty
async def test_the_drain_timeout_is_the_one_that_counts_then() -> None:
    watched = Watched(30.0)
    watched.drain_timeout_s = 0.0
    await asyncio.sleep(31)
    assert watched.story == [("ended", 0.0), ("over", 0.0)]


@hasty
@pytest.mark.parametrize("seconds", [1, 35])
async def test_of_a_connection_that_is_gone_nothing_more_is_heard(seconds: int) -> None:
    watched = Watched(30.0)
    await asyncio.sleep(seconds)
    before = list(watched.story)
    watched.expiry.close()
    await asyncio.sleep(1000)
    assert watched.story == before


# Certificates.


def test_a_chain_ends_with_the_first_of_its_certificates() -> None:
    family = Hierarchy()
    leaves = [family.intermediate.issue(SpiffeId.parse(WHO), lifetime_s=days * 86400.0) for days in (1, 2)]
    short, long = (der(leaf.certificate_pem) for leaf in leaves)
    authorities = [der(family.intermediate.root_pem), der(family.root_pem)]
    ends = [one.root.not_valid_after_utc.timestamp() for one in (family.intermediate, family.root)]
    assert end_of([short, *authorities]) == end_of([short]) < end_of([long]) < min(ends)
    assert end_of([long, short]) == end_of([short]), "whichever it is"
    assert end_of(authorities) == min(ends)


def der(pem: bytes) -> bytes:
    """A certificate without its armour."""
    return ssl.PEM_cert_to_DER_cert(pem.decode())


def test_a_chain_that_cannot_be_read() -> None:
    with pytest.raises(DeniedError, match=r"^peer certificate denied: its chain cannot be read: "):
        end_of([b"no certificate"])
