"""A YAML document read by type, so that every mistake is reported with its line, its field and the reason.

A document is UTF-8 and one only, without aliases, with known fields only and each field once. It is read from
PyYAML's nodes, not from the values that PyYAML makes of them, because nodes keep their lines, and because
`off` stays `off`: YAML 1.1 would make it a boolean. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import yaml

from shared.config.kinds import BoundError, FormError, Kind
from shared.errors import ConfigError, ConfigErrors

T = TypeVar("T")
D = TypeVar("D")

MAX_FILE_BYTES = 1 << 20
"""A file of this size holds some thousands of routes; a bigger one is another file taken by mistake."""

MAX_NODES = 50_000
"""1000 routes with every field set are 19 000 nodes. PyYAML takes 13 µs for each, so this many take 0.7 s,
which a reload must not spend on the event loop's thread."""

MAX_DEPTH = 16
"""Our files are four deep; PyYAML recurses, so this also guards the interpreter's stack."""

# What of a wrong name an error repeats: enough to find it, not enough to fill a log.
_SHOWN_CHARS = 60
_SHOWN_PROBLEM_CHARS = 200

_TAG = "tag:yaml.org,2002:"
_TAG_NAMES = {
    f"{_TAG}int": "a number",
    f"{_TAG}float": "a number",
    f"{_TAG}bool": "a boolean",
    f"{_TAG}timestamp": "a date",
    f"{_TAG}merge": "YAML's merge key",
    f"{_TAG}value": "YAML's value key",
}
# What a glob such as *.example.com without quotes runs into.
_QUOTES_HINT = "text that begins with * or & needs quotes"


class Report:
    """What is found while a document is read: all its mistakes, and what may be one."""

    def __init__(self) -> None:
        self.errors: list[ConfigError] = []
        self.warnings: list[ConfigError] = []

    def add(self, error: ConfigError) -> None:
        """A mistake."""
        if not isinstance(error, _FollowsError):
            self.errors.append(error)

    def finish(self) -> tuple[str, ...]:
        """The warnings, sorted by line. Raises ConfigError, or ConfigErrors, if there was a mistake."""
        errors = sorted(self.errors, key=_line)
        if len(errors) > 1:
            raise ConfigErrors(errors)
        if errors:
            raise errors[0]
        return tuple(dict.fromkeys(map(str, sorted(self.warnings, key=_line))))


class _FollowsError(ConfigError):
    """Follows from a mistake that is in the report already."""


def _line(error: ConfigError) -> int:
    return error.line or 0


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a document: its node and the path that leads to it."""

    node: yaml.Node
    file: str
    path: str
    """The dotted path, `routes[0].token`; empty for the document itself."""

    report: Report | None = None
    """Collects mistakes, so that all are reported; None: the first one is raised."""

    @property
    def line(self) -> int:
        """Where the value begins, counting from 1."""
        return int(self.node.start_mark.line) + 1

    @property
    def is_mapping(self) -> bool:
        """Whether the value is a mapping, for fields that may be a word as well."""
        return isinstance(self.node, yaml.MappingNode)

    def path_of(self, name: str) -> str:
        """The path of a field of this mapping."""
        return f"{self.path}.{_shown(name)}".removeprefix(".")

    def error(self, reason: str) -> ConfigError:
        """The error that says what is wrong with this value."""
        return ConfigError(self.file, self.line, self.path, reason)

    def warn(self, reason: str) -> None:
        """Notes what may be a mistake, if there is a report."""
        if self.report is not None:
            self.report.warnings.append(self.error(reason))

    def refuse(self, error: ConfigError) -> None:
        """Notes a mistake, to go on with what stands beside it; raises it if there is no report."""
        if self.report is None:
            raise error
        self.report.add(error)

    def tried(self, read: Callable[[Value], T], otherwise: D) -> T | D:
        """What `read` makes of this value, `otherwise` after a mistake, which is noted. Raises ConfigError if
        there is no report."""
        try:
            return read(self)
        except ConfigError as error:
            self.refuse(error)
            return otherwise

    def mapping(self, known: tuple[str, ...]) -> Fields:
        """The fields of a mapping. Raises ConfigError if it is none; a field that is there twice, or unknown,
        is a mistake to go on from."""
        return self._fields(known)

    def pairs(self, most: int) -> dict[str, Value]:
        """The values of a mapping whose fields may have any names. Raises ConfigError if it is none or has
        more than `most`; a field that is there twice is a mistake to go on from."""
        if isinstance(self.node, yaml.MappingNode) and len(self.node.value) > most:
            raise self.error(f"has {len(self.node.value)} entries, more than {most}")
        return self._fields(None).values

    def _fields(self, known: tuple[str, ...] | None) -> Fields:
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error(f"must be a mapping of fields, not {_kind(self.node)}")
        self._refuse_tags("map")
        found = Fields(self, {})
        lines: dict[str, int] = {}
        for key, node in self.node.value:
            if not isinstance(key, yaml.ScalarNode):
                error = Value(key, self.file, self.path).error(f"a field's name cannot be {_kind(key)}")
                self.refuse(error)
                continue
            name = str(key.value)
            at = Value(key, self.file, self.path_of(name))
            if known is not None and name not in known:
                close = _closest(name, known)
                found.failed.add(close)
                hint = f"did you mean {close}?" if close else f"known here: {', '.join(known)}"
                self.refuse(at.error(f"unknown field, {hint}"))
            elif name in lines:
                self.refuse(at.error(f"given twice, the first time in line {lines[name]}"))
            else:
                lines[name] = at.line
                found.values[name] = Value(node, self.file, at.path, self.report)
        return found

    def items(self, most: int) -> list[Value]:
        """The values of a list. Raises ConfigError if it is none, or longer than `most`."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.error(f"must be a list, not {_kind(self.node)}")
        self._refuse_tags("seq")
        if len(self.node.value) > most:
            raise self.error(f"has {len(self.node.value)} entries, more than {most}")
        return [
            Value(node, self.file, f"{self.path}[{index}]", self.report)
            for index, node in enumerate(self.node.value)
        ]

    def each(self, most: int, read: Callable[[Value], T], needed: str = "") -> list[T]:
        """What `read` makes of each value of a list, those with a mistake left out, which is noted. Raises
        ConfigError as `items`, and for an empty list if `needed` says what it should have one of."""
        items = self.items(most)
        if needed and not items:
            raise self.error(f"needs at least one {needed}")
        found: list[T] = []
        for item in items:
            item.tried(lambda item: found.append(read(item)), None)
        return found

    def scalars(self) -> Iterator[Value]:
        """Every single value in it, with the path of the field or list entry that it stands in."""
        todo = [self]
        while todo:
            value = todo.pop()
            if isinstance(value.node, yaml.ScalarNode):
                yield value
            elif isinstance(value.node, yaml.SequenceNode):
                todo += value.items(len(value.node.value))
            elif isinstance(value.node, yaml.MappingNode):
                for key, node in value.node.value:
                    name = str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
                    todo.append(Value(node, self.file, value.path_of(name), self.report))

    def text(self) -> str:
        """A text, not empty, all of it printable. Raises ConfigError for other types: what YAML takes for a
        number or a boolean has lost its meaning as text, unless it stands in quotes."""
        text = self.word()
        if self.node.tag != f"{_TAG}str":
            raise self.error(f"must be a text, not {_kind(self.node)}: put it in quotes")
        if not text:
            raise self.error("must not be empty")
        if not text.isprintable():
            raise self.error("must be one line of printable characters")
        return text

    def word(self) -> str:
        """A scalar as it stands in the file, whatever type YAML 1.1 sees in it. Raises ConfigError if this is
        none, or nothing."""
        if self.node.tag == f"{_TAG}null":
            raise self.error("has no value")
        if not isinstance(self.node, yaml.ScalarNode):
            raise self.error(f"must be a single value, not {_kind(self.node)}")
        if self.node.tag not in _TAG_NAMES:
            self._refuse_tags("str")
        return str(self.node.value)

    def parsed(self, parse: Callable[[str], T]) -> T:
        """A text, read by `parse`, whose ValueError becomes the ConfigError of this value."""
        text = self.text()
        try:
            return parse(text)
        except ValueError as error:
            raise self.error(str(error)) from error

    def of(self, kind: Kind[T]) -> T:
        """The value that the word, or for some kinds the text, says. Raises ConfigError if it is none."""
        word = self.text() if kind.quoted else self.word()
        try:
            return kind.parse(word)
        except FormError as error:
            raise self.error(f"{error}, not {_shown(word)!a}") from error
        except BoundError as error:
            raise self.error(f"{error}, not {_shown(word)}") from error
        except ValueError as error:
            raise self.error(str(error)) from error

    def _refuse_tags(self, usual: str) -> None:
        if self.node.tag != _TAG + usual:
            raise self.error("must not have a YAML tag (!name)")


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields that a mapping has, by name."""

    owner: Value
    values: dict[str, Value]

    failed: set[str] = field(default_factory=set)
    """Those whose value has a mistake, and those that somebody has misspelt: what depends on them is not
    judged."""

    def get(self, name: str) -> Value | None:
        """The field's value, None if the field is absent."""
        return self.values.get(name)

    def need(self, name: str, hint: str = "") -> Value:
        """The field's value. Raises ConfigError, with the hint, if the field is absent."""
        if name not in self.values:
            reason = f"missing, {hint}" if hint else "missing"
            kind = _FollowsError if name in self.failed else ConfigError
            raise kind(self.owner.file, self.owner.line, self.owner.path_of(name), reason)
        return self.values[name]

    def read(self, name: str, read: Callable[[Value], T], otherwise: D) -> T | D:
        """What `read` makes of the field's value; `otherwise` if the field is absent, or has a mistake, which
        is noted."""
        value = self.values.get(name)
        return otherwise if value is None else self._tried(name, value, read, otherwise)

    def read_needed(self, name: str, read: Callable[[Value], T], otherwise: D, hint: str = "") -> T | D:
        """As `read`, but a field that is absent is a mistake."""
        try:
            value = self.need(name, hint)
        except ConfigError as error:
            self.failed.add(name)
            self.owner.refuse(error)
            return otherwise
        return self._tried(name, value, read, otherwise)

    def _tried(self, name: str, value: Value, read: Callable[[Value], T], otherwise: D) -> T | D:
        def noted(value: Value) -> T:
            try:
                return read(value)
            except ConfigError:
                self.failed.add(name)
                raise

        return value.tried(noted, otherwise)

    def one_of(self, names: tuple[str, ...]) -> str:
        """Which of `names` is there. Raises ConfigError unless it is exactly one."""
        given = [name for name in self.values if name in names]
        if not given:
            kind = _FollowsError if self.failed.intersection(names) else ConfigError
            raise kind(self.owner.file, self.owner.line, self.owner.path, f"needs {' or '.join(names)}")
        if len(given) > 1:
            raise self.values[given[1]].error(f"cannot stand beside {given[0]}, take one of them")
        return given[0]


def document(content: str | bytes, file: str, report: Report | None = None) -> Value:
    """The one document of a file called `file`, whose mistakes `report` takes from here on.

    Raises ConfigError if it is over MAX_FILE_BYTES, no UTF-8, no YAML, empty, several documents, too deep, or
    has anchors or aliases.
    """
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(file, None, "", f"is over {MAX_FILE_BYTES} bytes, which no file of settings is")
    if isinstance(content, str):
        text = content
    else:
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise ConfigError(file, line, "", "is not UTF-8") from error
    try:
        node = _compose(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(file, line, "", "has a character that YAML does not allow") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(file, mark.line + 1 if mark else None, "", _yaml_reason(error)) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML lets out ValueError and OverflowError for "\UFFFFFFFF" and for overlong version numbers.
        raise ConfigError(file, None, "", "not valid YAML: an escape or number out of range") from error
    if node is None:
        raise ConfigError(file, None, "", "is empty")
    return Value(node, file, "", report)


class _RefusalError(yaml.MarkedYAMLError):
    """Valid YAML that we do not accept."""


class _Composer(yaml.SafeLoader):
    """PyYAML's composer with bounds, and without aliases: a few of them make a document of any size."""

    def __init__(self, content: str) -> None:
        super().__init__(content)
        self._depth = 0
        self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]  # so in PyYAML's stubs
        if getattr(event, "anchor", None) is not None:
            raise _RefusalError(
                problem=f"anchors (&name) and aliases (*name) are not taken here ({_QUOTES_HINT})",
                problem_mark=event.start_mark,
            )
        self._nodes += 1
        if self._nodes > MAX_NODES or self._depth >= MAX_DEPTH:
            bound = f"{MAX_NODES} values" if self._nodes > MAX_NODES else f"{MAX_DEPTH} levels"
            raise _RefusalError(problem=f"more than {bound}", problem_mark=event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _compose(content: str) -> yaml.Node | None:
    loader = _Composer(content)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _yaml_reason(error: yaml.MarkedYAMLError) -> str:
    if isinstance(error, _RefusalError):
        return str(error.problem)
    if isinstance(error, yaml.composer.ComposerError):
        return "more than one YAML document"
    problem = str(error.problem or error.context)
    hint = ""
    if r"'\t'" in problem:
        hint = " (YAML indents with spaces)"
    elif error.context in ("while scanning an alias", "while scanning an anchor"):
        hint = f" ({_QUOTES_HINT})"
    begin, end = error.context_mark, error.problem_mark
    if begin and end and begin.line != end.line:
        # An open bracket or quote is found only at the next bracket, or at the end of the file.
        hint += f" (in what begins in line {begin.line + 1})"
    return f"not valid YAML: {_shown(problem, _SHOWN_PROBLEM_CHARS)}{hint}"


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "nothing" if node.tag == f"{_TAG}null" else _TAG_NAMES.get(node.tag, "a text")


def _closest(name: str, known: tuple[str, ...]) -> str:
    """What a misspelt name may stand for, empty if nothing is near."""
    import difflib  # only for mistakes

    return next(iter(difflib.get_close_matches(name[:_SHOWN_CHARS], known, n=1)), "")


def _shown(text: str, most_chars: int = _SHOWN_CHARS) -> str:
    cut = text if len(text) <= most_chars else text[:most_chars] + "..."
    return cut if cut.isprintable() else ascii(cut)[1:-1]
