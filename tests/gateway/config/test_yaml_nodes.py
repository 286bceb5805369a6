from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.yaml_nodes import (
    MAX_DEPTH,
    MAX_FILE_BYTES,
    MAX_NODES,
    Report,
    Value,
    document,
)
from shared.config.kinds import Choice, Count, Duration, Kind, Size
from shared.errors import EXIT_CONFIG, ConfigError, ConfigErrors

FIELDS = ("name", "count", "time", "where", "list", "inner")


def read(text: str) -> Value:
    """The value of the field `name` in a document of one field."""
    return document(f"name: {text}", "f.yaml").mapping(FIELDS).need("name")


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.exit_code == EXIT_CONFIG
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "f.yaml: is empty"),
        ("# only a comment\n\n", "f.yaml: is empty"),
        (b"a: 1\nb: \xff\n", "f.yaml:2: is not UTF-8"),
        ("a: 1\n".encode("utf-16"), "f.yaml:1: is not UTF-8"),
        (b"#" * (MAX_FILE_BYTES + 1), "f.yaml: is over 1048576 bytes, which no file of settings is"),
        ("#" * (MAX_FILE_BYTES + 1), "f.yaml: is over 1048576 bytes, which no file of settings is"),
        ("a: 1\nb: \0\n", "f.yaml:2: has a character that YAML does not allow"),
        ("a: 1\n---\nb: 1\n", "f.yaml:2: more than one YAML document"),
        ("a: 1\n---\n", "f.yaml:2: more than one YAML document"),
        ("a: 1\nb: c: d\n", "f.yaml:2: not valid YAML: mapping values are not allowed here"),
        (
            "a: [1,\nb: 2\n",
            "f.yaml:3: not valid YAML: expected ',' or ']', but got '<stream end>'"
            " (in what begins in line 1)",
        ),
        (
            'a: "b\n',
            "f.yaml:2: not valid YAML: found unexpected end of stream (in what begins in line 1)",
        ),
        (
            "a:\n\tb: 1\n",
            r"f.yaml:2: not valid YAML: found character '\t' that cannot start any token"
            " (YAML indents with spaces)",
        ),
        (
            "host: *.example.com\n",
            "f.yaml:1: not valid YAML: expected alphabetic or numeric character, but found '.'"
            " (text that begins with * or & needs quotes)",
        ),
        (
            "a: 1\nb: *a\n",
            "f.yaml:2: anchors (&name) and aliases (*name) are not taken here"
            " (text that begins with * or & needs quotes)",
        ),
        (
            "a: &x [1]\n",
            "f.yaml:1: anchors (&name) and aliases (*name) are not taken here"
            " (text that begins with * or & needs quotes)",
        ),
        ('a: "\\UFFFFFFFF"\n', "f.yaml: not valid YAML: an escape or number out of range"),
        (f"%YAML {'1' * 5000}.1\n---\na: 1\n", "f.yaml: not valid YAML: an escape or number out of range"),
        ("a: 1\nb: " + "[" * MAX_DEPTH, "f.yaml:2: more than 16 levels"),
        ("[" * 100_000, "f.yaml:1: more than 16 levels"),
        ("[" + "a," * MAX_NODES + "]", "f.yaml:1: more than 50000 values"),
        # What PyYAML repeats of the file must not fill the log.
        (
            "a: !" + "b" * 1000 + "!c d",
            f"f.yaml:1: not valid YAML: found undefined tag handle '!{'b' * 171}...",
        ),
    ],
    ids=lambda content: repr(content[:20]),
)
def test_a_document_is_refused(content: str | bytes, message: str) -> None:
    assert refusal(lambda: document(content, "f.yaml")) == message


def test_lines_and_paths() -> None:
    top = document("# first\n\nname: a\nlist:\n- b\n- inner: {name: c}\n", "f.yaml").mapping(FIELDS)
    first, second = top.need("list").items(2)
    inner = second.mapping(FIELDS).need("inner").mapping(FIELDS).need("name")
    assert (top.need("name").path, top.need("name").line) == ("name", 3)
    assert (first.path, first.line) == ("list[0]", 5)
    assert (inner.path, inner.line) == ("list[1].inner.name", 6)
    assert str(inner.error("is wrong")) == "f.yaml:6: list[1].inner.name: is wrong"


@pytest.mark.parametrize("content", ["\ufeffname: a\n", b"\xef\xbb\xbfname: a\r\n", "---\nname: a\n...\n"])
def test_spellings_of_a_document(content: str | bytes) -> None:
    assert document(content, "f.yaml").mapping(FIELDS).need("name").text() == "a"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("just text", "f.yaml:1: must be a mapping of fields, not a text"),
        ("\n- a", "f.yaml:2: must be a mapping of fields, not a list"),
        ("12", "f.yaml:1: must be a mapping of fields, not a number"),
        ("---", "f.yaml:1: must be a mapping of fields, not nothing"),
        ("!!set {a, b}", "f.yaml:1: must not have a YAML tag (!name)"),
        ("name: a\nnmae: b", "f.yaml:2: nmae: unknown field, did you mean name?"),
        ("zzz: a", "f.yaml:1: zzz: unknown field, known here: name, count, time, where, list, inner"),
        ("<<: {name: a}", "f.yaml:1: <<: unknown field, known here: name, count, time, where, list, inner"),
        ("off: a", "f.yaml:1: off: unknown field, known here: name, count, time, where, list, inner"),
        ("name: a\ncount:\n  1\nname: c", "f.yaml:4: name: given twice, the first time in line 1"),
        ("? [a]\n: b", "f.yaml:1: a field's name cannot be a list"),
        ("? {a: b}\n: c", "f.yaml:1: a field's name cannot be a mapping"),
        ('"a\\nb": c', "f.yaml:1: a\\nb: unknown field, known here"),
        (f"? {'a' * 1000}\n: b", f"f.yaml:1: {'a' * 60}...: unknown field, known here"),
    ],
)
def test_a_mapping_is_refused(content: str, message: str) -> None:
    assert refusal(lambda: document(content, "f.yaml").mapping(FIELDS)).startswith(message)


def test_fields_that_are_missing_or_too_many() -> None:
    fields = (
        document("inner:\n  name: a\n  list: []\n", "f.yaml").mapping(FIELDS).need("inner").mapping(FIELDS)
    )
    assert fields.get("count") is None
    assert fields.one_of(("name", "count")) == "name"
    assert refusal(lambda: fields.need("count")) == "f.yaml:2: inner.count: missing"
    assert refusal(lambda: fields.need("count", "say how many")) == (
        "f.yaml:2: inner.count: missing, say how many"
    )
    assert refusal(lambda: fields.one_of(("count", "time"))) == "f.yaml:2: inner: needs count or time"
    assert refusal(lambda: fields.one_of(("list", "name"))) == (
        "f.yaml:3: inner.list: cannot stand beside name, take one of them"
    )


def test_lists() -> None:
    assert [item.text() for item in read("[a, b]").items(2)] == ["a", "b"]
    assert read("[]").items(2) == []
    assert refusal(lambda: read("[a, b, c]").items(2)) == "f.yaml:1: name: has 3 entries, more than 2"
    assert refusal(lambda: read("a").items(2)) == "f.yaml:1: name: must be a list, not a text"
    assert refusal(lambda: read("").items(2)) == "f.yaml:1: name: must be a list, not nothing"
    assert refusal(lambda: read("!x [a]").items(2)) == "f.yaml:1: name: must not have a YAML tag (!name)"


@pytest.mark.parametrize(
    ("written", "text"),
    [("a b", "a b"), ('"12"', "12"), ("'yes'", "yes"), ("none", "none"), ("é", "é"), ("!!str 12", "12")],
)
def test_texts(written: str, text: str) -> None:
    assert read(written).text() == text


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("", "has no value"),
        ("~", "has no value"),
        ("''", "must not be empty"),
        ("12", "must be a text, not a number: put it in quotes"),
        ("1.5", "must be a text, not a number: put it in quotes"),
        ("off", "must be a text, not a boolean: put it in quotes"),
        ("2026-01-01", "must be a text, not a date: put it in quotes"),
        ("<<", "must be a text, not YAML's merge key: put it in quotes"),
        ("=", "must be a text, not YAML's value key: put it in quotes"),
        ("[a]", "must be a single value, not a list"),
        ("{a: b}", "must be a single value, not a mapping"),
        ("!secret a", "must not have a YAML tag (!name)"),
        ("!!python/name:os.system a", "must not have a YAML tag (!name)"),
        ('"a\\nb"', "must be one line of printable characters"),
        ('"\\ud800"', "must be one line of printable characters"),
        ("|\n  a\n", "must be one line of printable characters"),
    ],
)
def test_texts_that_are_refused(written: str, reason: str) -> None:
    assert refusal(read(written).text) == f"f.yaml:1: name: {reason}"


def test_a_parser_s_reason_becomes_the_field_s() -> None:
    assert read("12:30h").parsed(str.upper) == "12:30H"
    assert refusal(lambda: read("a").parsed(int)) == (
        "f.yaml:1: name: invalid literal for int() with base 10: 'a'"
    )


def test_words() -> None:
    assert read("off").word() == "off"
    assert read("'off'").word() == "off"
    method = Choice(("POST", "CONNECT"))
    assert read("CONNECT").of(method) == "CONNECT"
    assert refusal(lambda: read("GET").of(method)) == ("f.yaml:1: name: must be POST or CONNECT, not 'GET'")
    assert refusal(lambda: read('"\\ud800\\n"').of(method)) == (
        r"f.yaml:1: name: must be POST or CONNECT, not '\\ud800\\n'"
    )


WHOLE, DURATION, SIZE = (
    "must be a whole number, not",
    "must be a duration such as 10s, 500ms or 5m, not",
    "must be a size such as 64KiB, 256MiB or 1GiB, not",
)


@pytest.mark.parametrize(
    ("kind", "written", "reason"),
    [
        (Count(1, 10), "11", "must be in 1..10, not 11"),
        (Count(1, 10), "1.0", f"{WHOLE} '1.0'"),
        # Other numbers of YAML 1.1.
        (Count(1, 10), "1_0", f"{WHOLE} '1_0'"),
        (Count(1, 10), "0x1", f"{WHOLE} '0x1'"),
        (Count(1, 10), "1:30", f"{WHOLE} '1:30'"),
        (Count(1, 10), "true", f"{WHOLE} 'true'"),
        (Count(1, 10), "٣", rf"{WHOLE} '\u0663'"),
        (Count(1, 10), "9" * 5000, f"{WHOLE} '{'9' * 60}...'"),
        (Count(1, 10), "", "has no value"),
        (Duration(0.001, 3600), "999999999h", "must be between 0.001s and 3600s, not 999999999h"),
        (Duration(0.001, 3600), "1e9", f"{DURATION} '1e9'"),
        (Duration(0.001, 3600), ".inf", f"{DURATION} '.inf'"),
        (Duration(0.001, 3600), ".nan", f"{DURATION} '.nan'"),
        (Duration(0.001, 3600), "1:30", f"{DURATION} '1:30'"),
        (Duration(0.001, 3600), "[1]", "must be a single value, not a list"),
        (Size(0, 1 << 60), "0x10", f"{SIZE} '0x10'"),
        (Size(0, 1 << 60), "1" * 16, f"{SIZE} '{'1' * 16}'"),
        (Size(10, 1024), "2KiB", "must be in 10..1024 bytes, not 2KiB"),
    ],
)
def test_values_of_a_kind_that_are_refused(kind: Kind[object], written: str, reason: str) -> None:
    """More of them, without YAML, has test_kinds.py."""
    assert refusal(lambda: read(written).of(kind)) == f"f.yaml:1: name: {reason}"


def test_mappings_of_any_names() -> None:
    pairs = read("{email: [a], 'a b': c, 1: d}").pairs(3)
    assert list(pairs) == ["email", "a b", "1"]
    assert (pairs["a b"].text(), pairs["a b"].path) == ("c", "name.a b")
    assert read("{}").pairs(0) == {}
    for written, reason in (
        ("[a]", "name: must be a mapping of fields, not a list"),
        ("{a: b, a: c}", "name.a: given twice, the first time in line 1"),
        ("{[a]: b}", "name: a field's name cannot be a list"),
        ("{a: b, c: d}", "name: has 2 entries, more than 1"),
    ):
        most = 1 if "entries" in reason else 9
        assert refusal(lambda: read(written).pairs(most)) == f"f.yaml:1: {reason}"  # noqa: B023


@given(st.text(max_size=200) | st.text(alphabet="a:- \n[]{}&*!|>'\"%#?,\t\\0x1u", max_size=60) | st.binary())
def test_any_content_is_read_or_refused(content: str | bytes) -> None:
    try:
        document(content, "f.yaml").mapping(FIELDS)
    except ConfigError as error:
        assert str(error).isprintable()
        assert len(str(error)) < 400


# Reports: one mistake is no end.

SEVERAL = "name: 1\nnmae: a\nlist: [a, 1, b, 2]\ninner:\n  count: x\n"


def test_a_report_takes_all_mistakes() -> None:
    report = Report()
    top = document(SEVERAL, "f.yaml", report).mapping(FIELDS)
    assert top.read("name", Value.text, "none") == "none"
    assert top.read("where", Value.text, "none") == "none"
    assert top.read_needed("time", Value.text, "none", "say when") == "none"
    assert top.need("list").each(4, Value.text) == ["a", "b"]
    inner = top.need("inner").mapping(FIELDS)
    assert inner.read_needed("count", lambda value: value.of(Count(0, 1)), 7) == 7
    assert inner.need("count").tried(lambda value: value.of(Count(0, 1)), None) is None
    assert (top.failed, inner.failed) == ({"name", "time"}, {"count"})
    with pytest.raises(ConfigErrors) as caught:
        report.finish()
    assert [str(error) for error in caught.value.all] == [
        "f.yaml:1: name: must be a text, not a number: put it in quotes",
        "f.yaml:1: time: missing, say when",
        "f.yaml:2: nmae: unknown field, did you mean name?",
        "f.yaml:3: list[1]: must be a text, not a number: put it in quotes",
        "f.yaml:3: list[3]: must be a text, not a number: put it in quotes",
        "f.yaml:5: inner.count: must be a whole number, not 'x'",
        "f.yaml:5: inner.count: must be a whole number, not 'x'",
    ]


def test_what_follows_from_a_misspelt_field_is_not_told() -> None:
    report = Report()
    top = document("nmae: a\n", "f.yaml", report).mapping(FIELDS)
    assert top.read_needed("name", Value.text, "") == ""
    with pytest.raises(ConfigError) as caught:
        top.one_of(("name", "count"))
    report.add(caught.value)
    with pytest.raises(ConfigError) as caught:
        report.finish()
    assert str(caught.value) == "f.yaml:1: nmae: unknown field, did you mean name?"


def test_without_a_report_the_first_mistake_is_raised() -> None:
    top = document("name: 1\nlist: [1]\n", "f.yaml").mapping(FIELDS)
    for read in (
        lambda: top.read("name", Value.text, ""),
        lambda: top.read_needed("count", Value.text, ""),
        lambda: top.need("list").each(1, Value.text),
    ):
        with pytest.raises(ConfigError):
            read()
    top.need("name").warn("is nothing to anybody")


def test_warnings() -> None:
    report = Report()
    top = document("name: a\ncount: 1\n", "f.yaml", report).mapping(FIELDS)
    for name in ("count", "name", "count"):
        top.need(name).warn("is odd")
    assert report.finish() == ("f.yaml:1: name: is odd", "f.yaml:2: count: is odd")


def test_every_single_value() -> None:
    text = "a: 1\nb: [x, {c: y, d: [z]}]\n? [k]\n: v\n"
    found = {(value.path, str(value.node.value)) for value in document(text, "f.yaml").scalars()}
    assert found == {("a", "1"), ("b[0]", "x"), ("b[1].c", "y"), ("b[1].d[0]", "z"), ("?", "v")}
