"""The keeper: the first certificate, renewals, an authority that is away or wrong, roots that change."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shared.credentials.certificates.authority import Authority
from shared.credentials.certificates.certificate_keeper import CertificateKeeper, KeeperSettings, SystemClock
from shared.errors import ConfigError, SigningError, UnavailableError
from shared.net.tls import certificate_check, certificate_folder
from shared.net.tls.certificate_check import Findings
from shared.net.tls.certificate_folder import CertificatePaths
from shared.net.tls.root_files import RootSources
from shared.tasks import spawn
from tests.support.bundles import bundles
from tests.support.faulty_authority import FaultyAuthority, identity
from tests.support.turned_clock import TurnedClock

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
HELLO = identity()
LOG = "hbone.certificates"


class Story:
    """A keeper, its authority and its clock."""

    def __init__(self, folder: Path, chance: float = 0.0) -> None:
        self.clock = TurnedClock()
        self.authority = FaultyAuthority("demo.local", self.clock.now)
        self.settings = KeeperSettings(folder, HELLO, roots=RootSources(optional_files=()), look_s=HOUR_S / 4)
        self.chance: Callable[[], float] = lambda: chance
        self.keeper = self.another()

    def another(self) -> CertificateKeeper:
        return CertificateKeeper(self.settings, self.authority, clock=self.clock, chance=self.chance)

    @property
    def found(self) -> Findings:
        now = datetime.fromtimestamp(self.clock.now(), UTC)
        return certificate_check.read(certificate_folder.find(self.settings.folder), now)

    @property
    def found_at(self) -> CertificatePaths:
        return certificate_folder.find(self.settings.folder)

    @property
    def leaf(self) -> x509.Certificate:
        return self.found.chain[0]

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        await self.keeper.start()
        try:
            yield
        finally:
            await self.keeper.close()


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path / "certs")


# The first certificate.


async def test_the_first_certificate_is_there_when_start_returns(story: Story) -> None:
    async with story.kept():
        found = story.found
        assert (found.faults, found.chain_fault, found.key_matches) == ((), "", True)
        assert found.identity == HELLO
        assert story.keeper.valid_until_s == story.clock.now() + DAY_S
        assert not story.keeper.expired


async def test_an_authority_that_comes_up_late_is_waited_for(
    story: Story, caplog: pytest.LogCaptureFixture
) -> None:
    story.authority.fault = "away"
    starting = spawn(story.keeper.start(), name="start")
    await story.clock.settle()
    await story.clock.turn(3)
    story.authority.fault = ""
    await story.clock.turn(3)
    await starting
    assert story.found.faults == ()
    assert "no certificate yet, next attempt in" in caplog.text
    await story.keeper.close()


async def test_start_has_a_deadline(story: Story) -> None:
    story.authority.fault = "away"
    starting = spawn(story.keeper.start(), name="start")
    began = story.clock.now()
    while not starting.done():
        turning = spawn(story.clock.turn(1), name="turn")
        await asyncio.wait({starting, turning}, return_when=asyncio.FIRST_COMPLETED)
        turning.cancel()
    with pytest.raises(SigningError, match="no certificate in 30 s: the test's CA: connection refused"):
        await starting
    assert story.clock.now() - began <= 31
    assert 4 <= len(story.authority.asked) <= 8
    assert not story.settings.folder.exists()


async def test_an_authority_that_never_answers_is_given_up(story: Story) -> None:
    story.settings = replace(story.settings, attempt_timeout_s=0.01)
    story.authority.fault = "hangs"
    with pytest.raises(SigningError, match=r"the test's CA: no answer in 0\.01 s"):
        await story.another().renew()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("garbage", "the test's CA: no certificates in PEM, or broken ones"),
        ("empty", "the test's CA: no certificates in PEM"),
        ("key", "the test's CA: the certificate is not for the key that was sent"),
        ("identity", "is for spiffe://demo.local/ns/other/sa/stranger, not for spiffe://demo.local/ns/demo"),
        ("identity", "the token, and WORKLOAD_NAMESPACE is demo and WORKLOAD_SERVICE_ACCOUNT is "),
        ("two names", "it has 2 URI names instead of one"),
        ("expired", "the test's CA: the certificate expired at 20"),
        ("future", "the test's CA: the certificate is not valid before 20"),
        ("root", "the chain leads to none of the roots: certificate signature failure"),
        ("roots", "the roots that it named: no certificates in PEM"),
    ],
)
async def test_an_answer_that_is_wrong_replaces_nothing(story: Story, fault: str, told: str) -> None:
    async with story.kept():
        before = story.leaf
        story.authority.fault = fault
        with pytest.raises(SigningError, match=told) as refused:
            await story.keeper.renew()
        assert story.leaf == before
        assert story.found.faults == ()
        assert "PRIVATE KEY" not in str(refused.value)
        assert "\n" not in str(refused.value)


async def test_an_authority_whose_clock_is_ahead_by_seconds_is_right(story: Story) -> None:
    story.authority.now = lambda: story.clock.now() + 20
    async with story.kept():
        assert story.keeper.renewals == 1


async def test_without_any_roots_there_is_no_certificate(story: Story) -> None:
    story.authority.names_roots = False
    with pytest.raises(SigningError, match="it names no roots, and none are set"):
        await story.keeper.renew()


async def test_a_folder_that_cannot_be_written_is_named(story: Story) -> None:
    story.settings.folder.write_text("a file in its place")
    with pytest.raises(UnavailableError, match=f"{story.settings.folder} cannot be written: File exists"):
        await story.keeper.start()


async def test_roots_that_cannot_be_read_are_named_before_anybody_is_asked(story: Story) -> None:
    story.settings = replace(story.settings, roots=RootSources(texts={"CAROOT_ISTIOD": "nonsense"}))
    with pytest.raises(ConfigError, match="CAROOT_ISTIOD: no usable root certificates"):
        await story.another().start()
    assert story.authority.asked == []


async def test_an_authority_that_hangs_has_no_longer_than_the_start(story: Story) -> None:
    story.settings = replace(story.settings, start_timeout_s=0.01)
    story.authority.fault = "hangs"
    with pytest.raises(SigningError, match=r"no certificate in 0\.01 s: the test's CA: no answer in 1 s"):
        await story.another().start()


# A folder that has one already.


async def test_a_good_one_that_is_there_is_used(story: Story, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOG)
    async with story.kept():
        first = story.leaf
    story.keeper = story.another()
    async with story.kept():
        assert story.leaf == first
        assert len(story.authority.asked) == 1
        assert f"certificate {HELLO} found in {story.settings.folder}: valid until" in caplog.text
        await story.clock.turn(DAY_S / 2)
        assert len(story.authority.asked) == 2, "renewed when its time had come"


async def test_a_good_one_under_others_names_goes_on_under_ours(story: Story) -> None:
    async with story.kept():
        first = story.leaf
    folder, paths = story.settings.folder, story.found_at
    for file, name in zip(paths.all, certificate_folder.NAMES[2], strict=True):
        (folder / name).write_bytes(file.read_bytes())
    for file in paths.all:
        file.unlink()
    story.keeper = story.another()
    async with story.kept():
        assert story.leaf == first
        assert story.found_at == certificate_folder.written(folder), "what a listener that starts now follows"
        await story.clock.turn(DAY_S / 2)
        assert story.leaf != first


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away takes root")
async def test_a_good_one_of_an_earlier_owner_is_given_to_the_one_of_now(story: Story) -> None:
    async with story.kept():
        first = story.leaf
    story.settings = replace(story.settings, owner=(12345, 12346))
    story.keeper = story.another()
    async with story.kept():
        told = story.found_at.private_key.stat()
        assert (story.leaf, told.st_uid, told.st_gid) == (first, 12345, 12346)


@pytest.mark.parametrize("change", ["expired", "identity", "key", "roots"])
async def test_one_that_is_no_good_is_replaced(
    story: Story, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOG)
    async with story.kept():
        first = story.leaf
    if change == "expired":
        story.clock.jump(2 * DAY_S)
    elif change == "identity":
        story.settings = replace(story.settings, identity=identity("another"))
    elif change == "key":
        other = story.authority.authority.issue(HELLO)
        (story.settings.folder / "private_key.pem").write_bytes(other.key_pem)
    else:
        (story.settings.folder / "ca_certificates.pem").write_bytes(Authority.create("demo.local").root_pem)
    story.keeper = story.another()
    async with story.kept():
        assert story.leaf != first
        assert story.found.faults == ()
        assert f"certificate in {story.settings.folder} is not used: " in caplog.text


# Renewals.


async def test_it_is_renewed_at_half_of_its_life(story: Story) -> None:
    async with story.kept():
        first = story.leaf
        await story.clock.turn(DAY_S / 2 - 1)
        assert story.leaf == first
        await story.clock.turn(1)
        second = story.leaf
        assert second != first
        assert second.public_key() != first.public_key(), "each has a new key"
        await story.clock.turn(DAY_S / 2)
        assert story.leaf != second


async def test_chance_makes_it_earlier(tmp_path: Path) -> None:
    story = Story(tmp_path / "certs", chance=1.0)
    async with story.kept():
        await story.clock.turn(DAY_S * 0.4 - 1)
        assert len(story.authority.asked) == 1
        await story.clock.turn(1)
        assert len(story.authority.asked) == 2


async def test_what_the_authority_gives_decides_about_the_next_time(story: Story) -> None:
    story.authority.lifetime_s = HOUR_S
    async with story.kept():
        await story.clock.turn(HOUR_S / 2)
        assert len(story.authority.asked) == 2


async def test_certificates_without_a_life_do_not_make_it_ask_all_the_time(story: Story) -> None:
    story.authority.lifetime_s = 1.0
    async with story.kept():
        await story.clock.turn(60)
        assert 30 <= len(story.authority.asked) <= 61


async def test_a_frozen_container_renews_when_it_wakes(story: Story) -> None:
    async with story.kept():
        await story.clock.settle()
        story.clock.jump(3 * DAY_S)
        assert story.keeper.expired
        await story.clock.turn(story.settings.look_s)
        assert not story.keeper.expired
        assert story.found.faults == ()


async def test_the_old_one_stays_while_the_authority_is_away(
    story: Story, caplog: pytest.LogCaptureFixture
) -> None:
    async with story.kept():
        first = story.leaf
        until = certificate_check.shown(first.not_valid_after_utc)
        story.authority.fault = "away"
        await story.clock.turn(DAY_S / 2 + HOUR_S)
        assert story.leaf == first
        assert story.keeper.failures > 3
        assert f"the one there is stays in use, valid until {until}; next attempt in " in caplog.text
        assert "the test's CA: connection refused" in caplog.text
        assert "ERROR" not in {record.levelname for record in caplog.records}
        story.authority.fault = ""
        await story.clock.turn(story.settings.rules.most_pause_s)
        assert story.leaf != first
        assert story.keeper.failures == 0


async def test_after_its_end_the_state_is_clear(story: Story, caplog: pytest.LogCaptureFixture) -> None:
    async with story.kept():
        story.authority.fault = "away"
        await story.clock.turn(DAY_S + HOUR_S)
        assert story.keeper.expired
        expiries = [text for text in caplog.messages if "has expired, peers refuse us" in text]
        assert expiries == [f"certificate {HELLO} has expired, peers refuse us"], "once"
        assert "the one there is expired at" in caplog.text
        story.authority.fault = ""
        await story.clock.turn(story.settings.rules.most_pause_s)
        assert not story.keeper.expired
        assert story.found.faults == ()


async def test_a_folder_that_is_full_is_tried_again(story: Story, caplog: pytest.LogCaptureFixture) -> None:
    async with story.kept():
        first = story.leaf
        folder, aside = story.settings.folder, story.settings.folder.with_name("aside")
        folder.rename(aside)
        folder.write_text("in the way")
        await story.clock.turn(DAY_S / 2)
        assert f"{folder} cannot be written" in caplog.text
        folder.unlink()
        aside.rename(folder)
        await story.clock.turn(HOUR_S)
        assert story.leaf != first


# Roots.


async def test_all_roots_are_written_each_once(story: Story, tmp_path: Path) -> None:
    other = Authority.create("other.example")
    ours = story.authority.authority.root_pem
    file = tmp_path / "root-cert.pem"
    file.write_bytes(ours)
    story.settings = replace(
        story.settings,
        roots=RootSources(texts={"CAROOT_ISTIOD": (ours + other.root_pem).decode()}, files=(file,)),
    )
    story.keeper = story.another()
    async with story.kept():
        assert list(story.found.roots) == [story.authority.authority.root, other.root]


async def test_what_is_told_of_the_roots_is_written_and_followed(story: Story, tmp_path: Path) -> None:
    ours, other = story.authority.authority, Authority.create("other.example", lifetime_s=DAY_S * 3650)
    file = tmp_path / "federated.json"
    file.write_bytes(bundles({"other.example": [other]}))
    story.settings = replace(story.settings, roots=RootSources(files=(file,), optional_files=()))
    story.keeper = story.another()
    async with story.kept():
        assert list(story.found.roots) == [other.root, ours.root]
        assert story.found.bundles.domains_of(other.root) == {"other.example"}
        file.write_bytes(bundles({"other.example": [other], "third.example": [other]}))
        await story.clock.turn(HOUR_S)
        assert story.found.bundles.domains_of(other.root) == {"other.example", "third.example"}
        assert story.keeper.renewals == 1, "the certificate stays"


async def test_new_roots_are_followed_without_a_new_certificate(
    story: Story, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOG)
    ours, other = story.authority.authority, Authority.create("other.example")
    file = tmp_path / "root-cert.pem"
    file.write_bytes(ours.root_pem)
    story.settings = replace(story.settings, roots=RootSources(optional_files=(file,)))
    story.authority.names_roots = False
    story.keeper = story.another()
    async with story.kept():
        leaf = story.leaf
        file.write_bytes(ours.root_pem + other.root_pem)
        await story.clock.turn(story.settings.look_s)
        assert list(story.found.roots) == [ours.root, other.root]
        assert (story.leaf, story.found.faults) == (leaf, ())
        assert f"roots in {story.settings.folder} renewed" in caplog.text

        caplog.clear()
        file.write_bytes(other.root_pem)
        await story.clock.turn(3 * story.settings.look_s)
        assert list(story.found.roots) == [ours.root, other.root], "ours would lead to none"
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        file.write_bytes(b"")
        await story.clock.turn(story.settings.look_s)
        assert list(story.found.roots) == [ours.root, other.root]
        assert "the roots in use stay: " in caplog.text


async def test_the_system_clock_is_the_wall_clock() -> None:
    clock = SystemClock()
    before = clock.now()
    await clock.wait(0)
    assert before <= clock.now() < before + 60
    assert before > 1.7e9


# Any order of events.


class Schedule(RuleBasedStateMachine):
    """Days pass, the authority comes and goes and changes its mind; what has to hold all the time."""

    @initialize(chance=st.floats(0, 1), lifetime_s=st.sampled_from([600.0, HOUR_S, DAY_S]))
    def begin(self, chance: float, lifetime_s: float) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.ill_since_s: float | None = None

        async def first() -> Story:
            story = Story(self.folder / "certs", chance)
            story.settings = replace(story.settings, lifetime_s=lifetime_s, look_s=DAY_S)
            story.keeper = story.another()
            await story.keeper.start()
            return story

        self.story = self.runner.run(first())
        self.well_since_s = self.story.clock.now()

    @rule(part=st.floats(0.01, 1.5))
    def time_passes(self, part: float) -> None:
        self.runner.run(self.story.clock.turn(part * self.story.settings.lifetime_s))

    @rule(fault=st.sampled_from(["away", "garbage", "key", "identity", "expired", "root"]))
    def the_authority_falls_ill(self, fault: str) -> None:
        self.story.authority.fault = fault

    @rule()
    def it_recovers(self) -> None:
        if self.story.authority.fault:
            self.story.authority.fault = ""
            self.well_since_s = self.story.clock.now()

    @invariant()
    def key_and_certificate_match(self) -> None:
        found = self.story.found
        assert found.key_matches
        assert found.identity == HELLO
        assert not [fault for fault in found.faults if "expired" not in fault]

    @invariant()
    def a_well_authority_means_a_certificate_in_the_first_part_of_its_life(self) -> None:
        rules, clock = self.story.settings.rules, self.story.clock
        if not self.story.authority.fault and clock.now() > self.well_since_s + rules.most_pause_s:
            assert not self.story.keeper.expired
            assert self.story.keeper.failures == 0
            left_s = (self.story.keeper.valid_until_s or 0) - clock.now()
            assert left_s >= (1 - rules.share) * self.story.settings.lifetime_s - 1

    @invariant()
    def it_is_not_asked_too_often(self) -> None:
        asked, rules = self.story.authority.asked, self.story.settings.rules
        gaps = [after - before for before, after in itertools.pairwise(asked)]
        assert all(gap >= rules.first_pause_s / 2 for gap in gaps)

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self.story.keeper.close())
            self.runner.close()
            shutil.rmtree(self.folder)


TestSchedule = Schedule.TestCase
TestSchedule.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
