"""Opening the tunnel of a `forward:` route: Istio's ALPN check, dialling, and two sockets for the relay.

The client's connection stays with its leg while the upstream is dialled: so what it sends meanwhile is kept
within the leg's bound, and its reset ends the dialling. Only then is its socket taken from the event loop.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable

from gateway.config.limit_settings import Limits
from gateway.ports.admission import DESCRIPTORS
from gateway.ports.hello import ClientLeg
from gateway.rules.routes import Target
from gateway.sni.cluster_endpoints import ClusterEndpoints
from shared.address import Address
from shared.errors import AlpnError, ClientGoneError, LimitError, StreamResetError
from shared.net.dial import dial_socket, reason
from shared.net.relay.edge_poll import EdgePoll
from shared.net.relay.pipes import Pipes
from shared.net.relay.splice import SpliceRelay
from shared.tls.istio_sni import ISTIO_ALPN


class Forward:
    """Opens spliced tunnels, which share one watch and one stock of pipes."""

    def __init__(self, limits: Limits, endpoints: ClusterEndpoints) -> None:
        """`endpoints` are those of the cluster's Services."""
        self._endpoints = endpoints
        self.pipes = Pipes(limits.splice_pipes)
        self._edges = EdgePoll()
        self.use_limits(limits)

    def use_limits(self, limits: Limits) -> None:
        """Goes by `limits` for connections to come, and for pipes that are lent from now on."""
        self.pipes.most = limits.splice_pipes
        self._connect_timeout_s = limits.connect_timeout_s

    async def open(
        self,
        leg: ClientLeg,
        target: Target,
        alpn: Iterable[str],
        finished: Callable[[SpliceRelay], None],
        half_closed_timeout_s: float,
        dialled: Callable[[Address], None],
    ) -> SpliceRelay:
        """The tunnel of the client at `leg`, whose hello has `alpn`, to be started at once. Of a Service,
        `dialled` is told the endpoint.

        Raises:
            AlpnError: the route demands Istio's ALPN and the client has none of it.
            ClientGoneError: the client has broken off meanwhile.
            DialError: the upstream cannot be connected.
            LimitError: file descriptors, or watches, have run out.
        """
        check_alpn(target, alpn)
        if target.is_service:
            endpoint, upstream = await self._endpoints.dial(target.dial, self._connect_timeout_s)
            dialled(endpoint)
        else:
            upstream = await dial_socket(target.dial, self._connect_timeout_s)
        leg.when_lost(None)  # its transport ends now, the connection does not
        sockets = [upstream]
        try:
            self._edges.open()  # what can fail does so while the client can still be told
            downstream, early = leg.detach()
            sockets.append(downstream)
            return SpliceRelay(
                downstream,
                upstream,
                finished,
                edges=self._edges,
                pipes=self.pipes,
                early=early,
                half_closed_timeout_s=half_closed_timeout_s,
            )
        except StreamResetError as error:
            _close(sockets)
            raise ClientGoneError() from error
        except OSError as error:
            _close(sockets)
            text = f"no file descriptor for the tunnel: {reason(error)}"
            raise LimitError(text, DESCRIPTORS) from error

    def close(self) -> None:
        """Lets go of what tunnels share; none may be open any more."""
        self._edges.close()
        self.pipes.close()


def check_alpn(target: Target, alpn: Iterable[str]) -> None:
    """Raises AlpnError if `target` is for mesh clients only and `alpn`, the hello's, has no name of Istio's.

    Istio's gateways do so with AUTO_PASSTHROUGH for names of the form outbound_.PORT_.SUBSET_.HOST.
    """
    if target.istio_alpn and ISTIO_ALPN.isdisjoint(alpn):
        raise AlpnError("the client offers none of Istio's ALPN names; the route's alpn: any would let it in")


def _close(sockets: Iterable[socket.socket]) -> None:
    for sock in sockets:
        sock.close()
