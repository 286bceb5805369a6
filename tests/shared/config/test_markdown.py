"""Tables of settings as Markdown."""

from __future__ import annotations

from shared.config.fields import Setting
from shared.config.kinds import Count, Text
from shared.config.markdown import code, default, meaning, page, table


def test_a_setting_in_sentences() -> None:
    assert meaning(Setting(Count(1, 9), 3, "how many", "More are refused.")) == "How many. More are refused."
    assert meaning(Setting(Text(), "", "e-mail of an account")) == "e-mail of an account."
    assert meaning(Setting(Text(), "", "IP address")) == "IP address."


def test_a_default_as_it_is_typed_or_in_words() -> None:
    assert default(Setting(Count(1, 9), 3, "how many")) == "`3`"
    assert (
        default(Setting(Count(1, 9), None, "how many", unset="as many as there are"))
        == "as many as there are"
    )
    assert default(Setting(Text(), "", "a text")) == ""


def test_what_markdown_would_take_for_its_own_is_escaped() -> None:
    assert table(("a", "b"), [(code("x_*|y"), "outbound_.PORT_ | **")]) == (
        "| a | b |\n|---|---|\n| `x_*\\|y` | outbound\\_.PORT\\_ \\| \\*\\* |"
    )


def test_a_page() -> None:
    assert page("Title", " one\n", "two").startswith("# Title\n\n<!-- Written by `make reference`")
    assert page("Title", " one\n", "two").endswith(" -->\n\none\n\ntwo\n")
