from __future__ import annotations

from agent.ops.merged_metrics import joined
from tests.agent.ops.scrapes import samples


def test_parts_are_joined_in_whole_lines_and_have_no_end() -> None:
    text = joined(b"a 1\n", b"", b"# HELP b x\nb 2", b"c 3\n# EOF\n")
    assert text == b"a 1\n# HELP b x\nb 2\nc 3\n"
    assert samples(text) == {"a": 1, "b": 2, "c": 3}
