"""What a gateway tells a workload that has dialled it: whether its name is registered, and with whom.

On a reverse connection the workload dials and proves who it is by mTLS; its SNI is the name that it wants to
have. Then HTTP/2 runs the other way round, the gateway being the client, and its first request is this one:
`POST /_hbone/reverse/registration`. The workload answers 204, or 409 if it is registered with that process
already. Only after a 204 does the gateway open tunnels.

    hbone-registration   accepted, or refused
    hbone-process        the gateway's process, 16 hexadecimal digits that no other one has
    hbone-workers        how many processes share the port, each of which wants a connection of its own
    hbone-reason         why it was refused
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shared.http2.events import Headers

PATH = b"/_hbone/reverse/registration"
"""No tunnel's and no app's: names of targets have no slash."""

REGISTERED = 204
ALREADY_REGISTERED = 409

MAX_WORKERS = 256
"""Processes that share a port. No machine that this is for has more CPUs: a larger number is a mistake."""

MAX_REASON_CHARS = 300
"""Of a refusal's reason, which goes into the workload's log."""

_PROCESS = re.compile(r"[0-9a-f]{16}")
_NOT_SHOWN = re.compile(r"[^\x20-\x7e]")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gateway says."""

    process: str
    """The gateway's process."""

    workers: int = 1
    """How many processes share the gateway's port."""

    refusal: str | None = None
    """Why the name is not registered; None: it is."""


def request(name: str, verdict: Verdict) -> list[tuple[bytes, bytes]]:
    """Headers of the request that tells `verdict` on the name."""
    headers = [
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":authority", name.encode()),
        (b":path", PATH),
        (b"hbone-registration", b"accepted" if verdict.refusal is None else b"refused"),
        (b"hbone-process", verdict.process.encode()),
        (b"hbone-workers", str(verdict.workers).encode()),
    ]
    if verdict.refusal is not None:
        headers.append((b"hbone-reason", _visible(verdict.refusal).encode()))
    return headers


def read(headers: Headers) -> Verdict:
    """The verdict of a request to PATH. Raises ValueError if it has none."""
    found = {name: value.decode("latin-1") for name, value in headers if name.startswith(b"hbone-")}
    state = found.get(b"hbone-registration")
    if state not in ("accepted", "refused"):
        raise ValueError("hbone-registration must be accepted or refused")
    process, workers = found.get(b"hbone-process", ""), found.get(b"hbone-workers", "")
    if not _PROCESS.fullmatch(process):
        raise ValueError("hbone-process must be 16 hexadecimal digits")
    if not re.fullmatch(r"[0-9]{1,3}", workers) or not 1 <= int(workers) <= MAX_WORKERS:
        raise ValueError(f"hbone-workers must be in 1..{MAX_WORKERS}")
    refusal = _visible(found.get(b"hbone-reason", "no reason given")) if state == "refused" else None
    return Verdict(process, int(workers), refusal)


def _visible(text: str) -> str:
    return _NOT_SHOWN.sub("?", text[:MAX_REASON_CHARS]).strip() or "no reason given"
