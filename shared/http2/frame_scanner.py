"""Bytes of a connection into frames: DATA as it comes, all other frames whole.

The scanner checks a client's preface, keeps half a frame until the rest has come, and knows since when it has
been waiting.
"""

from __future__ import annotations

from typing import Protocol

from shared.http2 import frames
from shared.http2.frame_rules import SessionError


class DataSink(Protocol):
    """Gets DATA, in order. Every view lives as long as the buffer given to `FrameScanner.scan`."""

    def receive_plain_data(self, data: memoryview, at: int, length: int, stream_id: int) -> int:
        """A DATA frame without flags begins at `at`: receives it, and those like it that follow, if it is
        whole and nothing is odd about it. Returns where the last of them ends, or 0."""

    def receive_data_head(self, length: int, flags: int, stream_id: int, padding: int) -> None:
        """Any other DATA frame has begun; `length` counts what stands before and behind its payload too."""

    def receive_data(self, payload: memoryview) -> None:
        """Some of its payload."""

    def receive_data_end(self) -> None:
        """It is over, padding and all."""


class FrameSink(Protocol):
    """Gets all other frames, in order with DATA."""

    def receive_frame(self, kind: int, flags: int, stream_id: int, payload: memoryview) -> None:
        """A whole frame."""


class HeaderBlocks(Protocol):
    """Knows where a header block begins and ends."""

    block_stream: int
    """Not 0 within a header block, which CONTINUATION has to go on with."""


class FrameScanner:
    """Finds the frames of one connection."""

    __slots__ = (
        "_data",
        "_frames",
        "_headers",
        "_max_frame_bytes",
        "_pad_left",
        "_partial",
        "_preface_left",
        "data_left",
        "since",
    )

    def __init__(
        self,
        data: DataSink,
        others: FrameSink,
        headers: HeaderBlocks,
        *,
        preface: bool,
        max_frame_bytes: int,
    ) -> None:
        self._data = data
        self._frames = others
        self._headers = headers
        self._preface_left = len(frames.PREFACE) if preface else 0
        self._max_frame_bytes = max_frame_bytes
        self._partial = b""  # a frame header, or a frame other than DATA, that is not whole
        self._pad_left = 0
        self.data_left = 0
        """Payload of the DATA frame that we are inside of, still to come."""
        self.since: float | None = None
        """When what has come of a frame or a header block should have been followed by the rest; None if
        nothing is unfinished, or only DATA, which may stop in the middle for as long as the network does."""

    @property
    def waiting_bytes(self) -> int:
        """How much of an unfinished frame is kept."""
        return len(self._partial)

    def scan(self, data: memoryview, now: float) -> None:
        """Finds what frames there are; `now` is in seconds of a steady clock.

        Raises:
            SessionError: no HTTP/2, or a frame larger than announced, or whatever a sink raises.
        """
        sink = self._data
        if self._partial:
            data = memoryview(self._partial + data)
            self._partial = b""
        at = self._preface(data) if self._preface_left else 0
        size = len(data)
        while at < size:
            if self.data_left:
                end = min(at + self.data_left, size)
                self.data_left -= end - at
                sink.receive_data(data[at:end])
                at = end
                if not (self.data_left or self._pad_left):
                    sink.receive_data_end()
                continue
            if self._pad_left:
                at = self._padding(at, size)
                continue
            if size - at < frames.HEADER_BYTES:
                break
            # `frames.read_header`, but for the call: this is done for every frame.
            high, low, kind, flags, stream_id = frames.HEADER.unpack_from(data, at)
            length = high << 8 | low
            stream_id &= frames.MAX_STREAM_ID
            if length > self._max_frame_bytes:
                raise SessionError("frame larger than we announced", frames.FRAME_SIZE_ERROR)
            if kind == frames.DATA:
                end = 0 if flags else sink.receive_plain_data(data, at, length, stream_id)
                if not end:
                    end = self._data_head(data, at, length, flags, stream_id)
                    if not end:
                        break
            else:
                end = at + frames.HEADER_BYTES + length
                if end > size:
                    break
                self._frames.receive_frame(kind, flags, stream_id, data[at + frames.HEADER_BYTES : end])
                if kind == frames.HEADERS and self._headers.block_stream:
                    self.since = None  # the block begins now
            at = end
        if at < size:
            self._partial = bytes(data[at:])
        if not (self._partial or self._headers.block_stream):
            self.since = None
        elif self.since is None or (at and not self._headers.block_stream):
            self.since = now

    def _preface(self, data: memoryview) -> int:
        at = min(self._preface_left, len(data))
        if data[:at] != frames.PREFACE[-self._preface_left :][:at]:
            raise SessionError("not HTTP/2: no connection preface", frames.PROTOCOL_ERROR)
        self._preface_left -= at
        return at

    def _data_head(self, data: memoryview, at: int, length: int, flags: int, stream_id: int) -> int:
        """The head of a DATA frame, pad length included; returns where it ends, or 0 if it is not there
        yet."""
        end = at + frames.HEADER_BYTES
        padded = flags & frames.FLAG_PADDED
        padding = overhead = 0
        if padded and length:
            if end >= len(data):
                return 0
            padding = data[end]
            overhead = 1 + padding
            end += 1
        elif padded:
            raise SessionError("padded DATA without a pad length", frames.FRAME_SIZE_ERROR)
        if overhead > length:
            raise SessionError("more padding than DATA", frames.PROTOCOL_ERROR)
        self._data.receive_data_head(length, flags, stream_id, overhead)
        self.data_left = length - overhead
        self._pad_left = padding
        if not (self.data_left or padding):
            self._data.receive_data_end()
        return end

    def _padding(self, at: int, size: int) -> int:
        end = min(at + self._pad_left, size)
        self._pad_left -= end - at
        if not self._pad_left:
            self._data.receive_data_end()
        return end
