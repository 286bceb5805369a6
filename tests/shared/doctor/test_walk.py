"""A walk: what becomes of each hop, and how the report looks."""

from __future__ import annotations

import asyncio
import io
import os
import re

import pytest

from shared.doctor.failures import Failed, Failure
from shared.doctor.hops import GATEWAY, PATH, Hop
from shared.doctor.report import as_object, as_text, wants_colour
from shared.doctor.walk import Check, Report, Skipped, Verdict, walk
from shared.errors import UpstreamError

PASS, FAIL, SKIP = Verdict.PASS, Verdict.FAIL, Verdict.SKIP


def check(hop: Hop, outcome: str | Exception = "seen", timeout_s: float = 1.0) -> Check:
    async def run() -> str:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return Check(hop, run, timeout_s, Failure.DNS_SILENT)


async def verdicts(*checks: Check) -> dict[str, Verdict]:
    return {result.name: result.verdict for result in (await walk("x", checks)).results}


async def test_all_hops_pass() -> None:
    report = await walk("x", [check(Hop.DNS), check(Hop.PROXY, Skipped("none")), check(Hop.TCP)])
    assert [(one.name, one.verdict, one.detail) for one in report.results] == [
        ("dns", PASS, "seen"),
        ("proxy", SKIP, "none"),
        ("tcp", PASS, "seen"),
    ]
    assert (report.failed, report.exit_code) == (None, 0)


async def test_what_is_behind_a_failure_is_skipped() -> None:
    report = await walk(
        "x", [check(Hop.DNS), check(Hop.TCP, Failed(Failure.TCP_REFUSED, "no")), check(Hop.TLS)]
    )
    assert [one.verdict for one in report.results] == [PASS, FAIL, SKIP]
    assert [one.detail for one in report.results] == ["seen", "no", "not reached"]
    assert report.exit_code == Hop.TCP.exit_code == 85


async def test_a_check_may_find_the_failure_of_a_later_hop() -> None:
    later = Failed(Failure.NO_HTTP2, "alert")
    assert await verdicts(check(Hop.TLS, later), check(Hop.PROXY), check(Hop.ALPN), check(Hop.TOKEN)) == {
        "tls": PASS,
        "proxy": SKIP,
        "alpn": FAIL,
        "token": SKIP,
    }


@pytest.mark.parametrize("failure", [Failure.PEER_IDENTITY, Failure.OWN_CERTIFICATE])
async def test_a_failure_of_a_hop_that_is_not_to_come_is_told_at_once(failure: Failure) -> None:
    report = await walk("x", [check(Hop.DNS), check(Hop.TLS, Failed(failure, "no")), check(Hop.ALPN)])
    assert [one.verdict for one in report.results] == [PASS, FAIL, SKIP]
    assert report.failed is not None
    assert (report.failed.name, report.exit_code) == ("tls", failure.hop.exit_code)


async def test_a_check_that_does_not_end_has_failed_by_its_deadline() -> None:
    async def never() -> str:
        return await asyncio.get_running_loop().create_future()

    report = await walk("x", [Check(Hop.DNS, never, 0.01, Failure.DNS_SILENT), check(Hop.TCP)])
    assert report.failed is not None
    assert (report.failed.failure, report.failed.detail) == (Failure.DNS_SILENT, "nothing within 0.01 s")


async def test_an_error_that_no_check_has_foreseen_is_told_like_a_failure() -> None:
    report = await walk("x", [check(Hop.DNS, UpstreamError("ya29.token-of-ours went astray"))])
    assert report.failed is not None
    assert (report.failed.failure, report.failed.detail) == (Failure.DNS_SILENT, "[secret] went astray")


async def failing() -> Report:
    return await walk(
        "https://h.example", [check(Hop.DNS), check(Hop.TCP, Failed(Failure.TCP_REFUSED, "no"))]
    )


async def test_the_text() -> None:
    lines = as_text(await failing(), colour=False).splitlines()
    assert lines[:3] == ["https://h.example", "", "the way there"]
    assert re.fullmatch(r"  dns          PASS  +\d+ ms  seen", lines[3])
    assert re.fullmatch(r"  tcp          FAIL  +\d+ ms  no", lines[4])
    assert lines[5:] == [
        "",
        "FAIL: tcp: TCP_REFUSED",
        Failure.TCP_REFUSED.cause,
        Failure.TCP_REFUSED.action,
    ]
    assert "\x1b" not in "".join(lines)
    assert "\x1b[1;31mFAIL\x1b[0m" in as_text(await failing(), colour=True)


async def test_the_json_has_stable_keys() -> None:
    told = as_object(await failing())
    assert list(told) == ["target", "ok", "exit_code", "hops", "failure"]
    assert (told["ok"], told["exit_code"]) == (False, 85)
    assert list(told["hops"][0]) == ["section", "name", "verdict", "ms", "detail"]
    assert told["failure"] == {
        "name": "TCP_REFUSED",
        "hop": "tcp",
        "detail": "no",
        "cause": Failure.TCP_REFUSED.cause,
        "action": Failure.TCP_REFUSED.action,
    }
    assert as_object(await walk("x", [check(Hop.DNS)]))["failure"] is None


@pytest.mark.parametrize(
    ("environ", "colour"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({}, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_colour_on_a_terminal(environ: dict[str, str], colour: bool) -> None:
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as terminal:
        assert wants_colour(terminal, environ) is colour
    os.close(ours)


def test_no_colour_elsewhere() -> None:
    assert not wants_colour(io.StringIO(), {"TERM": "xterm"})
    assert not wants_colour(None, {"TERM": "xterm"})
    with open(os.devnull, "w") as nowhere:
        assert not wants_colour(nowhere, {"TERM": "xterm"})


def test_each_hop_has_an_exit_code_of_its_own_that_nobody_else_has() -> None:
    codes = [hop.exit_code for hop in Hop]
    assert sorted(set(codes)) == codes
    assert not set(codes) & {*range(64, 79), *range(124, 256), 0, 1, 2}


@pytest.mark.parametrize("hops", [PATH, GATEWAY])
def test_exit_codes_rise_along_a_path(hops: tuple[Hop, ...]) -> None:
    codes = [hop.exit_code for hop in hops]
    assert codes == sorted(codes)


@pytest.mark.parametrize("failure", Failure, ids=lambda failure: failure.name)
def test_cause_and_action_are_sentences(failure: Failure) -> None:
    for sentence in (failure.cause, failure.action):
        assert sentence[0].isupper() or sentence.startswith(("krun", "hgate"))
        assert sentence.endswith((".", "?"))
        assert "\n" not in sentence
