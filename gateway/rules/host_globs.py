"""Globs on host names compared with each other: which hosts they can match, and which others cover them.

What a glob is: `shared.name_globs`. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from shared.name_globs import ANY_LABEL, ANY_LABELS, check_glob, compile_glob, of_label

SERVICE_LABEL = "svc"
"""The third label of a Service's name: SERVICE.NAMESPACE.svc, with the cluster's domain behind it."""

_STAR = re.compile(r"\*+")
_FRESH = "\0"  # a character, and a label, that no glob has and every star matches


# What a glob can match. It is walked label by label, in all the ways in which its ** can be read; a place is
# the number of labels of the glob that have been passed.

_Places = frozenset[int]


_Matches = Callable[[re.Pattern[str]], bool]


class _Walk:
    """The labels of one glob; `**` is one label of any kind, then any number of them."""

    def __init__(self, glob: str) -> None:
        self.labels: list[str | None] = []
        """None: any number of labels, or none."""
        for label in check_glob(glob).split("."):
            self.labels += [ANY_LABEL, None] if label == ANY_LABELS else [label]
        self._patterns = [None if label is None else re.compile(of_label(label)) for label in self.labels]
        self.start = self._skipped({0})

    def is_end(self, places: _Places) -> bool:
        """Whether the glob may end here."""
        return len(self.labels) in places

    def step(self, places: _Places, matches: _Matches) -> _Places:
        """Where one more label leads to; `matches` says which label patterns match it, `**` does always."""
        found: set[int] = set()
        for place in places - {len(self.labels)}:
            pattern = self._patterns[place]
            if pattern is None:
                found.add(place)
            elif matches(pattern):
                found.add(place + 1)
        return self._skipped(found)

    def _skipped(self, places: set[int]) -> _Places:
        for place in sorted(places):
            while place < len(self.labels) and self.labels[place] is None:
                place += 1
                places.add(place)
        return frozenset(places)


def covers(glob: str, other: str) -> bool:
    """Whether `glob` matches every host that `other` matches."""
    ours, theirs = _Walk(glob), _Walk(other)
    seen: set[tuple[int, _Places]] = set()
    todo = [(0, ours.start)]
    while todo:
        index, places = state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        if index == len(theirs.labels):
            if not ours.is_end(places):
                return False
        elif (label := theirs.labels[index]) is None:
            todo.append((index + 1, places))
            todo.append((index, ours.step(places, _match(_FRESH))))
        else:
            # In place of each star a character that no glob has: only a star matches it, and a star that
            # does matches all else that may stand there.
            todo.append((index + 1, ours.step(places, _match(label.replace("*", _FRESH)))))
    return True


def _match(label: str) -> _Matches:
    return lambda pattern: pattern.fullmatch(label) is not None


def can_be_service(glob: str) -> bool:
    """Whether `glob` can match the name of a Kubernetes Service: SERVICE.NAMESPACE.svc, or that and a domain
    in which no label is `svc` again."""
    walk = _Walk(glob)
    places = walk.start
    for matches in (_match_some, _match_some, _match(SERVICE_LABEL)):
        places = walk.step(places, matches)
    seen: set[_Places] = set()
    while places not in seen:
        if walk.is_end(places):
            return True
        seen.add(places)
        places = walk.step(places, _match_others)
    return False


def _match_some(_: re.Pattern[str]) -> bool:
    return True


def _match_others(pattern: re.Pattern[str]) -> bool:
    return pattern.pattern != SERVICE_LABEL


def wider(glob: str) -> str:
    """`glob` with `**` in place of each `*` that is a whole label."""
    return ".".join(ANY_LABELS if label == ANY_LABEL else label for label in glob.split("."))


class EarlierGlobs:
    """Finds the glob that is compared with names earlier and leaves a later one nothing to match."""

    def __init__(self) -> None:
        self._globs: list[tuple[int, str, re.Pattern[str]]] = []  # with a star: others match one host each

    def add(self, index: int, glob: str) -> None:
        """`glob`, in lower case, comes before all that are asked about from here on; `index` is its place."""
        if ANY_LABEL in glob:
            self._globs.append((index, glob, compile_glob(glob)))

    def covering(self, glob: str) -> tuple[int, str] | None:
        """The first that matches every host that `glob` matches, and its place."""
        sample = _STAR.sub(_FRESH, glob)  # one of them: most globs are told apart by it
        for index, earlier, pattern in self._globs:
            if pattern.fullmatch(sample) and covers(earlier, glob):
                return index, earlier
        return None
