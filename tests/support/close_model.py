"""One carried connection as its two ends see it, bare sockets both, and what each must have got in the end.

The rules, of one direction's bytes:

1. What arrives is at all times the beginning of what was sent.
2. FIN arrives only behind everything, and only if the sender has ended. This one comes first.
3. RST arrives only if the sender broke off before it had ended, or something between the two broke.
4. Something arrives in the end: who reads learns how it ended.

A sender that breaks off has ended if its FIN, and so all before it, was acknowledged: then nothing may be
lost.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import random
import socket
import sys
import termios

from shared.net.legs.tcp_end import RESET_ON_CLOSE
from tests.support.http2_peer import PeerStream

FIN = "FIN"
RST = "RST"

MOST_BYTES = 4 << 20
"""What one end may send."""

READ_BYTES = 1 << 16

_STREAM = random.Random(1).randbytes(2 * MOST_BYTES)
"""What ends send, each from a place of its own on."""


class End:
    """One end. `sent` and `received` count what the kernel took and gave."""

    def __init__(self, name: str, sock: socket.socket, number: int, first: bytes = b"") -> None:
        """`first` is what it sends before all else."""
        sock.setblocking(False)
        self.name = name
        self.sock = sock
        self.sent = 0
        self.received = bytearray()
        self.end = ""
        """FIN or RST, once it came."""
        self.has_ended = False
        """It has sent FIN."""
        self.gone = False
        """It has closed its socket, or broken off."""
        self.delivered = False
        """It had ended, and all of it was acknowledged, before it was gone."""
        self._loop = asyncio.get_running_loop()
        start = number * 104_729 % MOST_BYTES
        self._stream = memoryview(_STREAM)[start : start + MOST_BYTES]
        if first:
            self._stream = memoryview(first + self._stream.tobytes())
        self._wanted = 0
        self._end_wanted = False
        self._writing = False
        self._reading = False
        self._send_error = 0

    def __repr__(self) -> str:
        how = ("ended, " if self.has_ended else "") + ("gone, " if self.gone else "")
        whole = "delivered, " if self.delivered else ""
        return f"<{self.name}: {how}{whole}sent {self.sent}, got {len(self.received)} {self.end}>"

    def bytes_sent(self, count: int) -> memoryview:
        """The first `count` bytes that it sends."""
        return self._stream[:count]

    @property
    def may_send(self) -> bool:
        """Whether it has neither ended nor failed."""
        return not (self.gone or self._end_wanted or self._send_error)

    # What it does.

    def send(self, count: int) -> None:
        """Sends so many bytes more, as they are taken."""
        self._wanted = min(self._wanted + count, MOST_BYTES)
        self._write()

    def finish(self) -> None:
        """Sends FIN after all that."""
        self._end_wanted = True
        self._write()

    def read(self) -> None:
        """Takes what comes, from now on."""
        if not (self.gone or self.end or self._reading):
            self._reading = True
            self._loop.add_reader(self.sock, self._readable)

    def stop_reading(self) -> None:
        """Takes nothing more, until `read`."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self.sock)

    def break_off(self) -> None:
        """Sends RST."""
        self._let_go()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.sock.close()

    def close(self) -> None:
        """Closes the socket, as a program does that is no longer interested: the kernel sends FIN, or RST if
        there is something unread, or if something still comes."""
        self._let_go()
        self.has_ended = True  # if it is FIN
        self.sock.close()

    def _let_go(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self.sock)
        self.stop_reading()
        if not self.gone:
            self.gone = True
            self.delivered = self.has_ended and not _unacknowledged(self.sock)

    def _write(self) -> None:
        if self.gone or self._send_error or self.has_ended:
            return
        try:
            while self.sent < self._wanted:
                self.sent += self.sock.send(self._stream[self.sent : self._wanted])
            if self._end_wanted:
                self.sock.shutdown(socket.SHUT_WR)
                self.has_ended = True
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self.sock, self._write)
            return
        except OSError as error:
            self._send_error = error.errno or errno.EIO
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self.sock)

    def _readable(self) -> None:
        try:
            # Up to the last: of a socket in error uvloop tells only once.
            while data := self.sock.recv(READ_BYTES):
                self.received += data
        except BlockingIOError:
            return
        except OSError:
            self._ended(RST)
            return
        # Whoever has heard of RST by sending reads an end behind it. EPIPE, and ENOTCONN of shutdown, say
        # that FIN came before (tests/shared/net/legs/test_tcp.py has the proof).
        self._ended(RST if self._send_error == errno.ECONNRESET else FIN)

    def _ended(self, how: str) -> None:
        self.stop_reading()
        self.end = how


class StreamEnd:
    """The same for an HTTP/2 stream that h2 plays: FIN is END_STREAM, RST is RST_STREAM. What it sends goes
    out as the window opens, whenever `pump` is called."""

    def __init__(self, name: str, stream: PeerStream, number: int) -> None:
        self.name = name
        self.stream = stream
        self.sent = 0
        self.has_ended = False
        self.gone = False
        self.delivered = False
        self._stream = memoryview(_STREAM)[number * 104_729 % MOST_BYTES :]
        self._wanted = 0
        self._end_wanted = False

    def __repr__(self) -> str:
        return f"<{self.name}: sent {self.sent}, {self.stream}>"

    @property
    def received(self) -> bytearray:
        return self.stream.data

    @property
    def end(self) -> str:
        if self.stream.ended:
            return FIN
        return RST if self.stream.reset_code is not None and not self.gone else ""

    @property
    def may_send(self) -> bool:
        return not (self.gone or self._end_wanted or self.stream.reset_code is not None)

    def bytes_sent(self, count: int) -> memoryview:
        return self._stream[:count]

    def send(self, count: int) -> None:
        self._wanted = min(self._wanted + count, MOST_BYTES)
        self.pump()

    def finish(self) -> None:
        self._end_wanted = True
        self.pump()

    def read(self) -> None:
        if not (self.gone or self.stream.peer.lost) and self.stream.window_held:
            self.stream.release_window()

    def stop_reading(self) -> None:
        if not self.gone and not self.stream.data:
            self.stream.window_held = True  # from the first byte on: `release_window` credits all of them

    def break_off(self, code: int = 8) -> None:
        """Sends RST_STREAM, CANCEL by itself. What went before it arrives before it."""
        if not self.gone and self.stream.reset_code is None and not self.stream.peer.lost:
            self.delivered = self.has_ended
            if not (self.has_ended and self.stream.ended):  # else the stream is no more
                self.stream.reset(code)
        self.gone = True

    close = break_off

    def pump(self) -> None:
        """Sends what the window allows."""
        peer = self.stream.peer
        if self.gone or self.has_ended or peer.lost or self.stream.reset_code is not None:
            return
        while self.sent < self._wanted and (room := peer.window(self.stream)) > 0:
            part = bytes(self._stream[self.sent : min(self.sent + room, self._wanted)])
            peer.act(lambda h2, part=part: h2.send_data(self.stream.number, part))  # type: ignore[misc]  # a default
            self.sent += len(part)
        if self._end_wanted and self.sent == self._wanted:
            self.stream.end()
            self.has_ended = True


class Carried:
    """A connection with both its ends."""

    def __init__(self, client: End, app: End | StreamEnd) -> None:
        self.client = client
        self.app = app
        self.disturbed = False
        """Something between the two broke."""

    @property
    def ends(self) -> tuple[End, End | StreamEnd]:
        """Both."""
        return self.client, self.app

    def look(self) -> None:
        """Holds rules 1 to 3."""
        self._look("client to app", self.client, self.app)
        self._look("app to client", self.app, self.client)

    def settle(self) -> None:
        """Both ends read, and end if they have not."""
        for end in self.ends:
            if not end.gone:
                end.read()
                end.finish()

    @property
    def settled(self) -> bool:
        """Whether all ends that are there know how it ended."""
        return all(end.gone or end.end for end in self.ends)

    def _look(self, way: str, sender: End | StreamEnd, receiver: End | StreamEnd) -> None:
        count = len(receiver.received)
        assert count <= sender.sent, f"{way}: {count} bytes of {sender.sent}"
        assert receiver.received == sender.bytes_sent(count), f"{way}: other bytes than were sent"
        if receiver.end == FIN:
            assert sender.has_ended, f"{way}: FIN, but the sender has not ended"
            assert count == sender.sent, f"{way}: FIN after {count} of {sender.sent} bytes"
        elif receiver.end == RST and not self.disturbed:
            assert sender.gone and not sender.delivered, f"{way}: RST after {count} of {sender.sent} bytes"


def _unacknowledged(sock: socket.socket) -> int:
    """Bytes in flight or waiting, FIN included (SIOCOUTQ, tcp(7))."""
    return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
