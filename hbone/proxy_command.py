"""`hbone URL`: standard input and output through a tunnel, as ssh's ProxyCommand wants it.

ssh shows a user nothing of why its ProxyCommand failed but what that writes to standard error, and waits for
the end of its output: so one line there, then the end (ssh_config(5), ProxyCommand). A signal, and a reader
that has gone away, end it without a word, as they end any filter.

Here is what comes before the first byte to the service; `stdio_tunnel` has the rest, and is imported while
the network is on its way.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Mapping

from hbone import destination
from hbone.destination import CONNECT_TIMEOUT_S
from shared.net.dial import dial_http2
from shared.net.early_connection import EarlyConnection
from shared.tasks import spawn

HELLO_SENT_S = 0.002
"""By then TLS' first message is out, or the network is not here but on its way."""


async def run(options: argparse.Namespace, environ: Mapping[str, str], input_fd: int) -> int:
    """Carries standard input, which is `input_fd` by now (`stdio.own_input`), and standard output until both
    directions have ended. Returns the exit code: 0, or 128+N for signal N; that is SIGPIPE's when nobody
    reads our output any more.

    Raises:
        UsageError: the command line, or a variable of `environ`, is wrong.
        HboneError: the tunnel could not be opened, or broke.
    """
    loop = asyncio.get_running_loop()
    carrying = asyncio.current_task()
    assert carrying is not None
    stopped_by: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        stopped_by.append(number)
        carrying.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup's SIG_IGN stays
            loop.add_signal_handler(number, stop, number)
    try:
        return await _carry(options, environ, input_fd)
    except asyncio.CancelledError:
        if not stopped_by:
            raise  # SIGINT: the event loop makes a KeyboardInterrupt of it
        return 128 + stopped_by[0]


async def _carry(options: argparse.Namespace, environ: Mapping[str, str], input_fd: int) -> int:
    hops = dialling = None
    if options.verbose:
        from hbone import verbose

        hops = verbose.Hops(options.verbose)
    where = await destination.find(options.url, options, environ, default_port=options.default_port)
    if hops is not None:
        hops.found(where)
    token = await where.token.token()
    if hops is not None:
        hops.has_token(where, token)  # and each hop after it gets its time, without what is imported
    else:
        dialling = spawn(dial_http2(where.origin, CONNECT_TIMEOUT_S, EarlyConnection), name="dial")
        await asyncio.sleep(0)  # its first step makes the TLS context, which may take 8 ms
        await asyncio.wait((dialling,), timeout=HELLO_SENT_S)

    from hbone import stdio_tunnel

    return await stdio_tunnel.carry(where, token, dialling, input_fd, options.keepalive, hops)
