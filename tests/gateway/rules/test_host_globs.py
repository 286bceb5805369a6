"""Host globs: * is one label or a part of one, ** any number of labels; which globs cover which."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.rules.host_globs import can_be_service, covers
from shared.name_globs import compile_glob
from shared.tls.istio_sni import Destination


@pytest.mark.parametrize(
    ("glob", "host", "takes"),
    [
        ("*.demo.svc", "hello.demo.svc", True),
        ("*.demo.svc", ".demo.svc", False),
        ("*.demo.svc", "hello.demo.svc.evil.com", False),
        ("*.demo.svc", "hello.demo-svc", False),
        ("hello.**", "hello.", False),
        ("Hello.Demo", "hello.demo", True),
        ("hello.demo", "hello.demo\n", False),
        ("api-*.x", "api-1.x", True),
        ("api-*.x", "api-.x", False),
        ("a*b*c", "a1b2c", True),
        ("a*b*c", "abbbbc", True),
        ("a*b*c", "abc", False),
        ("a*b*c", "abbc", False),
        ("a*b*c", "a.b.c", False),
        ("a*a", "aa", False),
        ("**.a.**.b.*", "x.a.b.a.y.b.z", True),
        ("**.a.**.b.*", "x.a.b.z", False),
    ],
)
def test_globs(glob: str, host: str, takes: bool) -> None:
    assert (compile_glob(glob).fullmatch(host) is not None) == takes


@pytest.mark.parametrize(
    ("glob", "reason"),
    [
        ("", "a host has only"),
        ("a?", "a host has only"),
        ("[ab]", "a host has only"),
        ("a/b", "a host has only"),
        ("{service}.a", "a host has only"),
        ("\u212a", "a host has only"),
        ("a\n", "a host has only"),
        (".a", "has an empty label"),
        ("a.", "has an empty label"),
        ("Outbound_.80_._.a", "only HOST of"),
        ("***", "\\*\\* stands for whole labels: between dots, or at an end"),
        ("a**.b", "\\*\\* stands for whole labels: between dots, or at an end"),
        ("a.**b", "\\*\\* stands for whole labels: between dots, or at an end"),
        ("a.*b**.c", "\\*\\* stands for whole labels: between dots, or at an end"),
        (".".join("*" * 9), "has 9 stars, more than 8"),
        (".".join(["**"] * 9), "has 9 stars, more than 8"),
    ],
)
def test_globs_that_are_refused(glob: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        compile_glob(glob)


def is_glob(text: str) -> bool:
    try:
        compile_glob(text)
    except ValueError:
        return False
    return True


LABELS = st.text("ab*", min_size=1, max_size=4) | st.just("**") | st.just("svc")
GLOBS = st.lists(LABELS, min_size=1, max_size=6).map(".".join).filter(is_glob)
HOSTS = st.lists(st.text("ab", min_size=1, max_size=4) | st.just("svc"), min_size=1, max_size=8).map(".".join)


def takes(glob: str, host: str) -> bool:
    """The meaning, by trying all: a label's star is one or more characters, ** one or more labels."""

    def label(pattern: str, text: str) -> bool:
        return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), text) is not None

    def labels(patterns: list[str], texts: list[str]) -> bool:
        if not patterns:
            return not texts
        if patterns[0] == "**":
            return any(labels(patterns[1:], texts[count:]) for count in range(1, len(texts) + 1))
        return bool(texts) and label(patterns[0], texts[0]) and labels(patterns[1:], texts[1:])

    return labels(glob.split("."), host.split("."))


@given(GLOBS, HOSTS)
def test_a_glob_takes_what_it_means(glob: str, host: str) -> None:
    assert (compile_glob(glob).fullmatch(host) is not None) == takes(glob, host)


def small_globs(*labels: str) -> list[str]:
    """All of one to three of these labels."""
    return [".".join(some) for count in (1, 2, 3) for some in itertools.product(labels, repeat=count)]


def few_hosts(most: int, *labels: str) -> list[str]:
    """All of up to `most` of these labels."""
    return [
        ".".join(some) for count in range(1, most + 1) for some in itertools.product(labels, repeat=count)
    ]


def test_small_globs_take_what_they_mean() -> None:
    hosts = few_hosts(4, "a", "b", "ab", "ba")
    for glob in small_globs("a", "b", "*", "a*", "*b", "**"):
        pattern = compile_glob(glob)
        assert [host for host in hosts if pattern.fullmatch(host)] == [
            host for host in hosts if takes(glob, host)
        ], glob


def test_no_name_makes_a_glob_slow() -> None:
    globs = [
        compile_glob(text) for text in ("*a" * 8 + ".b", ".".join(["**", "a"] * 8) + ".b", "**.*a*a*a*a*a*.b")
    ]
    start = time.process_time()
    for host in ("a" * 253, "a." * 126 + "c", "ab" * 126, "a." * 100 + "b.c"):
        assert not any(glob.fullmatch(host) for glob in globs)
    # With backtracking over eight stars this takes years; 0.2 ms is what it does take.
    assert time.process_time() - start < 1.0


# Which covers which.


@pytest.mark.parametrize(
    ("glob", "other", "expected"),
    [
        ("*.demo.svc", "hello.demo.svc", True),
        ("*.demo.svc", "api-*.demo.svc", True),
        ("api-*.demo.svc", "*.demo.svc", False),
        ("**.demo.svc", "*.demo.svc", True),
        ("*.demo.svc", "**.demo.svc", False),
        ("**.svc", "*.demo.svc", True),
        ("**.svc", "demo.svc", True),
        ("**.svc", "svc", False),
        ("a*", "a*b", True),
        ("a*b", "a*", False),
        ("*a*", "*ab*", True),
        ("a*c.**", "abc.d.e", True),
        ("**.a.**", "**.a.b.a.**", True),
        ("**.a.**", "a.**.a.**", True),
    ],
)
def test_covers(glob: str, other: str, expected: bool) -> None:
    assert covers(glob, other) == expected


@given(GLOBS, GLOBS, HOSTS)
def test_what_is_covered_takes_nothing_more(glob: str, other: str, host: str) -> None:
    if covers(glob, other) and takes(other, host):
        assert takes(glob, host)


def test_small_globs_cover_what_they_take() -> None:
    """Each of them that takes a host takes one of five labels at most."""
    hosts = few_hosts(5, "a", "b", "ab", "ac", "cb")
    taken: dict[str, int] = {}
    """A bit for each of the hosts."""
    for glob in small_globs("a", "b", "*", "a*", "*b", "**"):
        pattern = compile_glob(glob)
        taken[glob] = sum(1 << number for number, host in enumerate(hosts) if pattern.fullmatch(host))
    for (glob, ours), (other, theirs) in itertools.product(taken.items(), repeat=2):
        assert covers(glob, other) == (not theirs & ~ours), (glob, other)


# Services of Kubernetes.


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("hello.demo.svc", True),
        ("hello.demo.svc.cluster.local", True),
        ("*.demo.svc.cluster.local", True),
        ("*.*.svc.cluster.local", True),
        ("**.svc.cluster.local", True),
        ("**", True),
        ("**.local", True),
        ("*.*.svc.**", True),
        ("*.*.s*", True),
        ("*", False),
        ("*.svc.cluster.local", False),
        ("*.cluster.local", False),
        ("hello.example.com", False),
        ("*.example.com", False),
        ("hello", False),
        ("*.*", False),
        ("*.a.demo.svc.cluster.local", False),
        ("*.demo.svc.svc", False),
    ],
)
def test_globs_that_take_a_service_of_kubernetes(glob: str, expected: bool) -> None:
    assert can_be_service(glob) == expected


@given(GLOBS, HOSTS)
def test_who_takes_a_service_can(glob: str, host: str) -> None:
    if Destination(host, None, "", "").service and takes(glob, host):
        assert can_be_service(glob)
