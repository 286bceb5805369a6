"""Settings as dataclass fields, and their values in environment variables."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from shared.config.fields import Environment, Setting, file_name, setting, table_of
from shared.config.kinds import Count, Duration, FilePath, Text
from shared.errors import EXIT_USAGE, UsageError


@dataclass(frozen=True, slots=True)
class Example:
    """A section."""

    wait_timeout_s: float = setting(Duration(), 90.0, "how long to wait", variable="WAIT")
    most: int = setting(Count(1, 9), 3, "how many", variable="MOST")
    key: str = setting(Text(), "", "a text", unset="none", variable="KEY")
    internal: int = 0


TABLE = table_of(Example)


def test_the_settings_of_a_class_are_those_of_its_fields_that_are_made_so() -> None:
    assert list(TABLE) == ["wait_timeout_s", "most", "key"]
    assert table_of(Example(most=5)) == TABLE
    assert Example() == Example(90.0, 3, "", 0)


def test_a_setting_is_told_with_its_default() -> None:
    assert TABLE["wait_timeout_s"].line == "how long to wait (90s)"
    assert TABLE["key"].line == "a text (none)"
    assert Setting(Text(), "", "a text").line == "a text"


def test_a_name_in_the_file_has_no_unit() -> None:
    assert [file_name(field, one) for field, one in TABLE.items()] == ["wait_timeout", "most", "key"]


def test_what_is_set_goes_over_the_defaults() -> None:
    read = Environment({"WAIT": " 2m ", "MOST": " "})
    assert read.given(Example) == {"wait_timeout_s": 120.0}
    assert (read(TABLE["wait_timeout_s"]), read(TABLE["most"])) == (120.0, 3)


def test_a_wrong_value_is_shown_in_one_short_line() -> None:
    for text, shown in [("x", "=x"), ("a\nb", "='a\\nb'"), ("x" * 70, f"={'x' * 60}...")]:
        with pytest.raises(UsageError) as caught:
            Environment({"MOST": text}).given(Example)
        assert str(caught.value) == f"invalid MOST{shown} (must be a whole number)"
        assert caught.value.exit_code == EXIT_USAGE


def test_what_may_be_a_secret_is_shown_nowhere() -> None:
    secret = Setting(FilePath(), None, "token", variable="TOKEN_FILE", secret=True)
    with pytest.raises(UsageError) as caught:
        Environment({"TOKEN_FILE": '{"k": "s3cret"}'})(secret)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None
