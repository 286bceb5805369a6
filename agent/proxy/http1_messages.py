"""HTTP/1.1 towards the app, as bytes: the request's head and chunks, the answer's head and chunks (RFC 9112).

Our own, and not h11, for its cost: h11 takes 34 µs for a small GET and its answer, this takes 5, and HAProxy
46 for all that it does. Tests compare it with h11. Bodies of known length pass as they are; so only heads
and chunks are read here.

What cannot be understood in one way only is an error: the app's answer is refused then, and no connection is
used again after it.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from agent.proxy.fields import Field, RequestHead

MAX_HEAD_BYTES = 64 << 10
"""Of an answer's head, interim ones for themselves, and of its trailers: as many as of a request's."""

CHUNK_LINE_BYTES = 4 << 10
"""The line in front of a chunk: its size and extensions, which nobody uses."""

LENGTH_DIGITS = 19
"""Of a content-length: a body of more bytes ends in no lifetime."""

LENGTH_UNTIL_END = -1
"""`ResponseHead.length` where the body ends with the connection."""

LENGTH_CHUNKED = -2
"""Where it is chunked."""

_TOKEN = ("!#$%&'*+-.^_`|~" + string.digits + string.ascii_letters).encode()
_TARGET = re.compile(rb"[\x21-\x7e]+")
_NOT_IN_VALUES = re.compile(rb"[\x00\r\n\x0b\x0c]")
_NOT_IN_LINES = re.compile(rb"[\x00\r\x0b\x0c]")
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_STATUS_LINE = re.compile(rb"HTTP/1\.([0-9]) ([1-9][0-9]{2})(?: .*)?")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[^\r\n]*)?[ \t]*")
_BLANKS = b" \t"

_BEGINS = b"HTTP/1."


class Http1Error(ValueError):
    """Not HTTP/1.1 as we understand it. The text quotes nothing, for it may be a secret."""


# Requests.


def request_bytes(head: RequestHead, *, chunked: bool, upgrade: Sequence[Field] = ()) -> bytes:
    """The head of a request. `upgrade` are the fields that ask for another protocol, on a GET.

    Raises:
        Http1Error: HTTP/2 can say it and HTTP/1.1 cannot (RFC 9112 section 3, RFC 9110 section 5).
    """
    names, values = zip(*head.fields, strict=True) if head.fields else ((), ())
    method = b"GET" if upgrade else head.method
    if b"".join((method, *names)).translate(None, _TOKEN) or not method:
        raise Http1Error("a method or a name that is no token")
    if not _TARGET.fullmatch(head.path) or _NOT_IN_VALUES.search(b"".join((head.authority, *values))):
        raise Http1Error("a target or a value with bytes that do not belong there")
    lines = [b"%b %b HTTP/1.1\r\nhost: %b" % (method, head.path, head.authority)]
    lines += map(b"%b: %b".__mod__, head.fields)
    if chunked:
        lines.append(b"transfer-encoding: chunked")
    lines += map(b"%b: %b".__mod__, upgrade)
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


def chunk(data: bytes | bytearray | memoryview) -> bytes:
    """`data`, which is not empty, as one chunk."""
    return b"".join((b"%x\r\n" % len(data), data, b"\r\n"))


def last_chunk(trailers: list[Field]) -> bytes:
    """The end of a chunked body. Trailers that HTTP/1.1 cannot say are left out: nobody relies on them."""
    lines = [b"0\r\n"]
    for name, value in trailers:
        if not name.translate(None, _TOKEN) and not _NOT_IN_VALUES.search(value):
            lines.append(b"%b: %b\r\n" % (name, value))
    lines.append(b"\r\n")
    return b"".join(lines)


# Answers.


@dataclass(slots=True)
class ResponseHead:
    """The head of an answer, interim or final."""

    status: int

    fields: list[Field]
    """As they came, names in lower case, but with one `content-length` at most, and none beside
    `transfer-encoding` or where there can be none."""

    length: int
    """Bytes of the body, LENGTH_UNTIL_END or LENGTH_CHUNKED."""

    keeps: bool
    """The connection may carry another request after this answer, as far as its head says."""

    @property
    def is_interim(self) -> bool:
        """1xx: the final one is still to come (101 is final: what follows is another protocol)."""
        return self.status < 200


def end_of_head(data: bytes | bytearray, begin: int = 0) -> int:
    """Where what follows the head begins; 0 if the head is not whole. Looks from `begin` on.

    Raises:
        Http1Error: these bytes begin no answer, or are too many.
    """
    if data[: len(_BEGINS)] != _BEGINS[: len(data)]:
        raise Http1Error("these are no words of HTTP/1.1")
    found = _END_OF_HEAD.search(data, max(0, begin - 2))
    if found is None:
        if len(data) > MAX_HEAD_BYTES:
            raise Http1Error(f"a head of more than {MAX_HEAD_BYTES} bytes")
        return 0
    if found.end() > MAX_HEAD_BYTES:
        raise Http1Error(f"a head of more than {MAX_HEAD_BYTES} bytes")
    return found.end()


def read_head(data: bytes, *, method: bytes) -> ResponseHead:
    """Reads a whole head, the empty line included, of an answer to `method`.

    Raises:
        Http1Error: it cannot be understood.
    """
    first, *lines = _lines(data)
    status_line = _STATUS_LINE.fullmatch(first)
    if status_line is None:
        raise Http1Error("a wrong status line")
    status = int(status_line[2])
    keeps = status_line[1] != b"0"
    fields = read_fields(lines)
    length = LENGTH_UNTIL_END
    lengths = 0
    chunked = False
    for name, value in fields:
        if name == b"content-length":
            size = _content_length(value)
            if lengths and size != length:
                raise Http1Error("several lengths")
            length = size
            lengths += 1
        elif name == b"transfer-encoding":
            if chunked or value.lower() != b"chunked":
                raise Http1Error("a transfer-encoding other than chunked")
            chunked = True
        elif name == b"connection" and b"close" in map(bytes.strip, value.lower().split(b",")):
            keeps = False
    if chunked and (lengths or status_line[1] == b"0"):
        keeps = False  # framing that others may read otherwise (RFC 9112 sections 6.1 and 6.3)
    if lengths and (chunked or status < 200 or status == 204):  # where it means nothing, or must not be
        fields = [item for item in fields if item[0] != b"content-length"]
    elif lengths:
        fields = _one_length(fields, length)
    if method == b"HEAD" or (status == 204 and (chunked or length > 0)):
        # Some send a body even so, as Waitress does for a WSGI app: it would be the next answer.
        keeps = False
    if method == b"HEAD" or status < 200 or status in (204, 304):
        length = 0
    elif chunked:
        length = LENGTH_CHUNKED
    elif not lengths:
        keeps = False
    return ResponseHead(status, fields, length, keeps)


def read_fields(lines: list[bytes]) -> list[Field]:
    """The fields of a head or of trailers, a line each without its end; names in lower case.

    Raises:
        Http1Error: one of them is malformed.
    """
    fields: list[Field] = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if line[:1] in (b" ", b"\t"):  # folded (RFC 9112 section 5.2)
            if not fields:
                raise Http1Error("a malformed field")
            last, before = fields[-1]
            fields[-1] = (last, (before + b" " + line.strip(_BLANKS)).strip(_BLANKS))
        elif not (colon and name) or name.translate(None, _TOKEN):
            raise Http1Error("a malformed field")
        else:
            fields.append((name.lower(), value.strip(_BLANKS)))
    return fields


def _lines(data: bytes) -> list[bytes]:
    """Those of a head or of trailers, up to the empty one."""
    text = data.replace(b"\r\n", b"\n")
    if _NOT_IN_LINES.search(text):
        raise Http1Error("bytes that do not belong in a head")
    return text.split(b"\n")[:-2]


def _content_length(value: bytes) -> int:
    """Repetitions of the same number count as one (RFC 9110 section 8.6)."""
    numbers = {number.strip(_BLANKS) for number in value.split(b",")}
    number = numbers.pop()
    if numbers or not number.isdigit() or len(number) > LENGTH_DIGITS:
        raise Http1Error("a malformed length")
    return int(number)


def _one_length(fields: list[Field], length: int) -> list[Field]:
    only = (b"content-length", b"%d" % length)
    if fields.count(only) == 1 and sum(name == b"content-length" for name, _ in fields) == 1:
        return fields
    first = next(at for at, (name, _) in enumerate(fields) if name == b"content-length")
    rest = [item for item in fields[first + 1 :] if item[0] != b"content-length"]
    return [*fields[:first], only, *rest]


class _At(Enum):
    SIZE = "the line in front of a chunk"
    DATA = "its bytes"
    DATA_END = "the line end after it"
    TRAILERS = "what follows the last chunk"
    END = "nothing more"


class Chunks:
    """A chunked body as it comes."""

    __slots__ = ("_at", "_kept", "_left", "trailers")

    def __init__(self) -> None:
        self._at = _At.SIZE
        self._left = 0  # of the chunk
        self._kept = bytearray()  # an unfinished line, or unfinished trailers
        self.trailers: list[Field] = []
        """There once it has ended."""

    @property
    def ended(self) -> bool:
        """The last chunk and the trailers have come."""
        return self._at is _At.END

    def take(self, data: memoryview) -> tuple[list[memoryview], memoryview]:
        """The body's bytes in `data`, in pieces of it, and what is left of `data` after the body's end.

        Raises:
            Http1Error: these are no chunks. What came before in `data` is lost with them.
        """
        pieces: list[memoryview] = []
        while data and self._at is not _At.END:
            if self._at is _At.DATA:
                piece, data = data[: self._left], data[self._left :]
                pieces.append(piece)
                self._left -= len(piece)
                if not self._left:
                    self._at = _At.DATA_END
            elif self._at is _At.SIZE:
                data = self._size(data)
            elif self._at is _At.DATA_END:
                data = self._data_end(data)
            else:
                data = self._trailers(data)
        return pieces, data

    def _size(self, data: memoryview) -> memoryview:
        line, data = self._line(data, CHUNK_LINE_BYTES)
        if line is not None:
            found = _CHUNK_LINE.fullmatch(line)
            if found is None:
                raise Http1Error("a chunk without a size")
            self._left = int(found[1], 16)
            self._at = _At.DATA if self._left else _At.TRAILERS
        return data

    def _data_end(self, data: memoryview) -> memoryview:
        line, data = self._line(data, 0)
        if line is not None:
            if line:
                raise Http1Error("a chunk longer than its size")
            self._at = _At.SIZE
        return data

    def _line(self, data: memoryview, most: int) -> tuple[bytes | None, memoryview]:
        """A line without its CRLF, once it is whole, and what follows it."""
        kept = self._kept
        before = len(kept)
        kept += data[: most + 2 - before]
        end = kept.find(b"\n")
        if end < 0:
            if len(kept) > most + 1 or (not most and bytes(kept) not in (b"", b"\r")):
                raise Http1Error("a line without an end between chunks")
            return None, data[:0]
        if kept[end - 1 : end] != b"\r" or b"\r" in kept[: end - 1]:
            raise Http1Error("a line without CRLF between chunks")
        line = bytes(kept[: end - 1])
        kept.clear()
        return line, data[end + 1 - before :]

    def _trailers(self, data: memoryview) -> memoryview:
        kept = self._kept
        before = len(kept)
        kept += data[: MAX_HEAD_BYTES + 1 - before]
        if kept[:2] == b"\r\n":
            end = 2
        else:
            found = _END_OF_HEAD.search(kept, max(0, before - 2))
            end = 0 if found is None else found.end()
        if not end:
            if len(kept) > MAX_HEAD_BYTES:
                raise Http1Error(f"trailers of more than {MAX_HEAD_BYTES} bytes")
            return data[:0]
        if end > 2:
            self.trailers = read_fields(_lines(bytes(kept[:end])))
        kept.clear()
        self._at = _At.END
        return data[end - before :]
