"""Globs on host names: what a route's `host`, and the names in rules of several kinds, may be.

`*` is one or more characters within a label: a whole label, or a part of one as in `api-*.demo.svc`. `**` is
one or more whole labels. So `*.demo.svc` matches `hello.demo.svc`, not `admin.prod.demo.svc`, which names
another namespace. No I/O.
"""

from __future__ import annotations

import re

from shared import globs

MAX_STARS = 8
"""Stars in one host glob, `**` counted once; names have few more labels than that."""

ANY_LABEL = "*"
ANY_LABELS = "**"

# All checks come before lower(), which turns some other letters into ASCII ones.
_GLOB = re.compile(r"[A-Za-z0-9_.*-]+")
_STAR = re.compile(r"\*+")


def compile_glob(glob: str) -> re.Pattern[str]:
    """The pattern of a host glob, for lower-case hosts. Raises ValueError with the reason.

    Each `**` with the labels up to the next one is an atomic group, as in `globs.pattern` each star is with
    the text behind it.
    """
    first, *rest = (r"\.".join(map(of_label, part)) for part in _parts(check_glob(glob)))
    if not rest:
        return re.compile(first)
    middle = "".join(rf"(?>(?:[^.]+\.)+?{_dotted(part)})" for part in rest[:-1])
    last = rf"(?:[^.]+\.)+{rest[-1]}" if rest[-1] else r"(?:[^.]+\.)*[^.]+"
    return re.compile(_dotted(first) + middle + last)


def _dotted(pattern: str) -> str:
    """What comes before another label."""
    return rf"{pattern}\." if pattern else ""


def check_glob(glob: str) -> str:
    """The glob in lower case. Raises ValueError if it is none, with the reason."""
    text = glob.lower()
    if text.startswith(("outbound_.", "inbound_.", "outbound|", "inbound|")):
        raise ValueError("only HOST of outbound_.PORT_.SUBSET_.HOST is matched: leave the rest out")
    if not _GLOB.fullmatch(glob):
        raise ValueError("a host has only letters, digits, dots, hyphens, underscores and *")
    if ".." in text or text.startswith(".") or text.endswith("."):
        raise ValueError("has an empty label: two dots in a row, or one at an end")
    if any(ANY_LABELS in label and label != ANY_LABELS for label in text.split(".")):
        raise ValueError(
            "** stands for whole labels: between dots, or at an end; * is one label or a part of it"
        )
    stars = len(_STAR.findall(text))
    if stars > MAX_STARS:
        raise ValueError(f"has {stars} stars, more than {MAX_STARS}")
    return text


def _parts(glob: str) -> list[list[str]]:
    """The labels before the first `**`, between each two, and behind the last."""
    parts: list[list[str]] = [[]]
    for label in glob.split("."):
        if label == ANY_LABELS:
            parts.append([])
        else:
            parts[-1].append(label)
    return parts


def of_label(label: str) -> str:
    """The regular expression of one label of a glob that is no `**`."""
    return globs.pattern(label, "[^.]+")
