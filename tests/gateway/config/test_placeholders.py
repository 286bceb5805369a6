"""What examples have in place of a user's own names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.config.config import parse
from tests.deploy.test_manifests import DEPLOY

PAGE = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text()


def noted(value: str) -> list[str]:
    text = f"routes: []\nhbone: {{certificates: '{value}', rules: []}}"
    return [warning.removeprefix("F:2: hbone.certificates: ") for warning in parse(text, "F").warnings]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("https://hello-PROJECT_NUMBER.REGION.run.app", "PROJECT_NUMBER"),
        ("https://SERVICE-123456789.europe-west1.run.app", "SERVICE"),
        ("https://hello-123456789.europe-west1.run.app", "123456789"),
        ("hgate@PROJECT.iam.gserviceaccount.com", "PROJECT"),
        ("//iam.googleapis.com/projects/NUMBER/locations/global", "NUMBER"),
        ("https://hello.example.com", "example.com"),
        ("*@example.com", "example.com"),
        ("example.org", "example.org"),
    ],
)
def test_a_placeholder_is_noted(value: str, found: str) -> None:
    assert noted(value) == [f"has {found}, a placeholder of an example: put in your own"]


@pytest.mark.parametrize(
    "value",
    [
        "https://{service}-{namespace}.a.run.app",
        "https://hello-1234567890.europe-west1.run.app",
        "https://my-project.example.communications.net",
        "counterexample.com",
        "hello.example",
        "https://project.a.run.app",
        "PROJECTS",
    ],
)
def test_what_is_none(value: str) -> None:
    assert noted(value) == []


def test_our_own_examples_have_nothing_else() -> None:
    """Whoever fills in what is noted has filled in all of it: capital words are placeholders."""
    manifests = [file.read_text() for file in sorted(DEPLOY.glob("k8s/overlays/*/hgate.yaml"))]
    assert len(manifests) == 3
    (example,) = re.findall(r"```yaml\n# hgate.yaml, a whole file\n(listen:.*?)```", PAGE, re.DOTALL)
    filled_in = ("PROJECT_NUMBER", "REGION", "PROJECT", "POOL", "PROVIDER")
    for text in (*manifests, example):
        words = set(re.findall(r"\b[A-Z][A-Z_]{3,}\b", re.sub(r"#.*", "", text)))
        assert words <= {*filled_in, "CONNECT", "POST"}
        warnings = [told for told in parse(text, "F").warnings if "be there when" not in told]
        assert warnings and all(", a placeholder of an example" in told for told in warnings)
