"""-v: each hop on the way to the first byte, as a line on standard error with the time that it took."""

from __future__ import annotations

import math
import sys
import time
from contextlib import suppress

from hbone.destination import Destination
from hbone.output import write
from hbone.stdio import StdioLeg
from hbone.token_choice import MintedToken
from shared.errors import UnavailableError
from shared.net.legs.contract import Buffer
from shared.printable import printable
from shared.trust.token_claims import at_utc, describe


class Hops:
    """Prints them."""

    def __init__(self, level: int) -> None:
        """1: one line a hop; 2: more about each."""
        self._level = level
        self._began_s = time.perf_counter()

    def __call__(self, hop: str, text: str) -> None:
        """`hop` is passed; it took as long as it is since the one before."""
        now_s = time.perf_counter()
        took_ms, self._began_s = (now_s - self._began_s) * 1000, now_s
        self._print(hop, f"{text} ({took_ms:.1f} ms)")

    def found(self, where: Destination) -> None:
        """The destination is."""
        self("destination", f"{where}, by {where.found_by or 'the command line'}")

    def told_leg(self, input_fd: int) -> StdioLeg:
        """Standard input, which is `input_fd`, and output, whose first byte out is a hop."""
        return _ToldLeg(input_fd, self)

    def has_token(self, where: Destination, token: str | None) -> None:
        """It is known which token is sent; nothing of the token itself is printed."""
        if token is None:
            self("token", "none is sent")
            return
        source = where.token
        self("token", source.identity if isinstance(source, MintedToken) else "of --token-file")
        if isinstance(source, MintedToken) and source.not_kept:
            self._print("token", f"it is not kept for the next time: {source.not_kept}")
        self._more("token", describe(token))

    def answered(self, where: Destination, certificate_ends_s: float) -> None:
        """The tunnel is open; `certificate_ends_s` is the end of the server's certificate, in seconds since
        1970, or infinite."""
        self("answer", "200, the tunnel is open")
        self._more("request", f"POST {where}, for {where.target.authority}")
        if math.isfinite(certificate_ends_s):
            self._more("certificate", f"ends {at_utc(certificate_ends_s)}")

    def _more(self, hop: str, text: str) -> None:
        if self._level > 1:
            self._print(hop, text)

    def _print(self, hop: str, text: str) -> None:
        with suppress(UnavailableError):  # nobody reads it any more
            write(sys.stderr, f"hbone: {hop}: {printable(text)}\n")


class _ToldLeg(StdioLeg):
    def __init__(self, input_fd: int, hops: Hops) -> None:
        super().__init__(input_fd)
        self._hops: Hops | None = hops

    def write(self, data: Buffer) -> None:
        if self._hops is not None:
            self._hops("first byte", f"{len(data)} bytes from the container")
            self._hops = None
        super().write(data)
