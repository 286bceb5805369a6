"""The page's files: what is served, with which headers, and that nothing in them leaves the port."""

from __future__ import annotations

import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gateway.ops import page
from shared.errors import UnavailableError
from shared.ops.http_server import Request, Response

ROOT = Path(__file__).parents[3]


def got(path: str) -> Response:
    response = page.handlers()[path](Request("GET", path))
    assert isinstance(response, Response)
    return response


def text(path: str) -> str:
    return got(path).body.decode()


class Page(HTMLParser):
    def __init__(self, markup: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


@pytest.mark.parametrize("path", page.handlers())
def test_browsers_are_told_to_refuse_what_is_not_ours(path: str) -> None:
    response = got(path)
    headers = dict(response.headers)
    assert response.status == 200
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store"


def test_the_page_takes_nothing_from_elsewhere_and_has_no_script_or_style_in_it() -> None:
    for tag, attributes in Page(text("/")).elements:
        assert not {name for name in attributes if name.startswith("on") or name == "style"}
        for name in ("src", "href"):
            assert re.match(r"data:,|#|[a-z_]+(/[a-z.]+)?(\.css|\.js)?$", attributes.get(name) or "#"), tag
    assert {path for path in page.handlers() if path.count("/") == 1} == {"/", "/page.css", "/page.js"}
    for path in ("/page.css", "/page.js"):
        assert "//" not in re.sub(r"^ *// .*| // .*", "", text(path), flags=re.MULTILINE)
        assert "@import" not in text(path)


def test_the_script_makes_no_markup_of_texts() -> None:
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|DOMParser|srcdoc"
    assert re.findall(unsafe, text("/page.js")) == []


def test_each_element_that_the_script_names_is_in_the_page() -> None:
    ids = {attributes["id"] for _, attributes in Page(text("/")).elements if "id" in attributes}
    named = set(re.findall(r'\$\("([a-z-]+)"\)', text("/page.js")))
    assert named - ids == set()
    assert {"choice", "pause", "state"} <= named


def test_the_document_has_an_anchor_for_each_section() -> None:
    ids = {attributes.get("id") for _, attributes in Page(text("/docs/troubleshoot.md")).elements}
    assert {"hgate-refuses-a-connection", "the-services-answer", "tokens", "tunnels-that-break"} <= ids


def test_a_document_is_text_whatever_is_in_it(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    table = "| a | `<i>` |\n|---|---|\n| <u> | c |\n"
    file.write_text(f"# <b>T\ntext\n\n{table}\n- <s>\n  `two\n  lines`\n- [x](#t-1) [y](z.md)\n")
    shown = page._rendered(file).decode().partition("</p>\n")[2]
    assert shown.splitlines() == [
        '<h1 id="bt">&lt;b&gt;T</h1>',
        "<p>text</p>",
        "<table><tr><td>a</td><td><code>&lt;i&gt;</code></td></tr><tr><td>&lt;u&gt;</td><td>c</td></tr></table>",
        "<p>- &lt;s&gt; <code>two lines</code></p>",
        '<p>- <a href="#t-1">x</a> y</p>',
    ]


def test_links_inside_of_the_document_lead_somewhere() -> None:
    elements = Page(text("/docs/troubleshoot.md")).elements
    ids = {f"#{attributes['id']}" for _, attributes in elements if "id" in attributes}
    links = {attributes["href"] for tag, attributes in elements if tag == "a"} - {"/"}
    assert len(links) > 5
    assert links <= ids


def test_a_broken_installation_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(
        UnavailableError, match=r"^cannot read .*/page.js: No such file or directory; install"
    ):
        page._content(tmp_path / "page.js")


def test_all_of_it_is_packaged() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "gateway"
    ]
    packaged = {path for pattern in data for path in (ROOT / "gateway").glob(pattern)}
    assert {page.FOLDER / name for name, _ in page.FILES.values()} <= packaged
    assert f'"docs/{page.DOCUMENT}"' in (ROOT / "setup.py").read_text()
