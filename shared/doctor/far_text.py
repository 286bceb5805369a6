"""What a far side says, as one line that may be shown: HTML decoded, control characters and secrets out.

A far side may be anything, such as an app that answers with the request's own headers; so a token of ours
can be in what it says.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

MAX_LINE = 200
"""Characters that are shown."""

_SECRET = re.compile(
    r"eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)*"  # a JWT's head or claims (RFC 7515)
    r"|ya29\.[A-Za-z0-9_.-]+"  # Google's access tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END|$)",
    re.DOTALL,
)
_HEADINGS = ("title", "h1", "h2", "p")


def one_line(data: bytes, *, is_html: bool = False, secret: str | None = None) -> str:
    """`data` as text of at most MAX_LINE characters; of HTML its title, headings and first paragraphs.
    `secret` is taken out wherever it occurs, and so is whatever looks like one."""
    text = data.decode("utf-8", "replace")
    if is_html:
        text = headings(text)
    text = without_secrets(" ".join(text.split()), secret)
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}..."


def without_secrets(text: str, secret: str | None = None) -> str:
    """`text` without `secret`, and without what has the form of a token or a key."""
    if secret:
        text = text.replace(secret, "[secret]")
        for count in range(min(len(secret) - 1, len(text)), 3, -1):  # the text may have been cut within it
            if text.endswith(secret[:count]):
                text = f"{text[:-count]}[secret]"
                break
    return _SECRET.sub("[secret]", text)


def without_user(url: str) -> str:
    """A URL without the user and password in it."""
    return re.sub(r"//[^/@]*@", "//", url) if "//" in url else url.rpartition("@")[2]


def headings(page: str) -> str:
    """Title, headings and paragraphs of an HTML page, in their order, each once; the page without its tags
    where it has none of them."""
    reader = _Headings()
    reader.feed(page)
    reader.close()
    parts = reader.parts or [" ".join(reader.rest)]
    words = (" ".join(part.split()) for part in parts)
    return ": ".join(dict.fromkeys(part.rstrip(".:") for part in words if part))


class _Headings(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.rest: list[str] = []
        self._within: str | None = None
        self._hidden = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden = tag in ("style", "script")
        if tag in _HEADINGS:
            self._within = tag
            self.parts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False
        if tag == self._within:
            self._within = None

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if self._within is not None:
            self.parts[-1] += data
        else:
            self.rest.append(data)
