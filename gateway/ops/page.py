"""The page for people at / of the admin port: its files, and docs/troubleshoot.md, to which it links.

What the page shows comes from strangers: server names, error texts. So its script makes text only, never
markup, and the headers have the browser refuse everything else: scripts, styles and requests other than to
this port, markup made from text (Trusted Types), frames around the page, forms.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

from shared import regular_files
from shared.errors import UnavailableError
from shared.ops.http_server import Handler, Request, Response

FOLDER = Path(__file__).parent / "page"

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
"""By path: the file, and its content type."""

DOCUMENT = "troubleshoot.md"

MAX_BYTES = 1 << 20
"""Of a file of ours."""

HEADERS = (
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'",
    ),
    ("cache-control", "no-store"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
)


def handlers() -> dict[str, Handler]:
    """What answers GET, by path."""
    return {
        **{path: partial(_file, name, content_type) for path, (name, content_type) in FILES.items()},
        f"/docs/{DOCUMENT}": _document,
    }


def _file(name: str, content_type: str, _: Request) -> Response:
    return Response(200, content_type, _content(FOLDER / name), HEADERS)


def _document(_: Request) -> Response:
    import sysconfig

    # In a checkout, and where it is installed (setup.py).
    installed = Path(sysconfig.get_path("data"), "share", "doc", "hbone")
    for folder in (Path(__file__).parents[2] / "docs", installed):
        if (folder / DOCUMENT).is_file():
            return Response(200, FILES["/"][1], _rendered(folder / DOCUMENT), HEADERS)
    return Response.text(404, f"this installation has no {DOCUMENT}; it is in the folder docs of the sources")


@cache
def _content(file: Path) -> bytes:
    try:
        return regular_files.read(file, MAX_BYTES)
    except OSError as error:
        raise UnavailableError(
            f"cannot read {file}: {error.strerror or error}; install hgate again"
        ) from error


@cache
def _rendered(file: Path) -> bytes:
    """A Markdown file of ours for reading: headings with anchors, paragraphs, tables, code, own links."""
    body = "\n".join(map(_block, _blocks(_content(file).decode())))
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Troubleshoot hgate</title>'
    sheet = '<link rel="icon" href="data:,"><link rel="stylesheet" href="/page.css">'
    return f'{head}{sheet}<main class="document"><p><a href="/">Back to hgate</a></p>\n{body}\n'.encode()


def _blocks(text: str) -> Iterator[list[str]]:
    """The lines of each heading, paragraph, list item and table."""
    block: list[str] = []
    for line in text.splitlines():
        ends_one = not line or re.match(r"#|- |\d+\. ", line) or (block and block[0].startswith("#"))
        if block and ends_one:
            yield block
            block = []
        if line:
            block.append(line)
    if block:
        yield block


def _block(lines: list[str]) -> str:
    if heading := re.fullmatch(r"(#{1,6}) (.*)", lines[0]):
        level, title = len(heading[1]), heading[2]
        return f'<h{level} id="{anchor(title)}">{html.escape(title)}</h{level}>'
    if not lines[0].startswith("|"):
        return f"<p>{_inline(' '.join(line.strip() for line in lines))}</p>"
    rows = [line.strip("|").split(" | ") for line in lines if not line.startswith("|---")]
    cells = ("".join(f"<td>{_inline(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _inline(text: str) -> str:
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text.strip()))
    text = re.sub(r"\[([^]]+)\]\((#[a-z0-9-]+)\)", r'<a href="\2">\1</a>', text)
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)  # to other documents, which are not here


def anchor(heading: str) -> str:
    """The fragment of a heading, as GitHub makes it."""
    return re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-")
