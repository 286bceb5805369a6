"""What an operator can do about each response flag: a line, and a section of docs/troubleshoot.md to read."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import Flag

_REFUSED = "hgate-refuses-a-connection"
_ANSWER = "the-services-answer"
_TOKENS = "tokens"
_BROKEN = "tunnels-that-break"
_PORTS = "the-hbone-and-reverse-ports"
_CERTIFICATES = "certificates"


@dataclass(frozen=True, slots=True)
class Cure:
    """For one flag."""

    text: str
    section: str
    """The anchor of a section of docs/troubleshoot.md."""


CURES = {
    Flag.NONE: Cure("Nothing is to be done.", _BROKEN),
    Flag.NOT_TLS: Cure(
        "Switch mTLS on at the client: a DestinationRule with tls mode ISTIO_MUTUAL. A health check "
        "of a load balancer that sends HTTP belongs on port 15021.",
        _REFUSED,
    ),
    Flag.HELLO_TIMEOUT: Cure(
        "Look at the client, and at what is between it and hgate: the connection was made, and the "
        "ClientHello did not come.",
        _REFUSED,
    ),
    Flag.EMPTY: Cure("Nothing is to be done: this is a health check.", _REFUSED),
    Flag.BAD_HELLO: Cure(
        "Find out who connects: this is no TLS client, or a proxy changes its bytes.",
        _REFUSED,
    ),
    Flag.NO_SNI: Cure(
        "Set the server name (SNI) at the client, which dialled an address without one.",
        _REFUSED,
    ),
    Flag.BAD_SNI: Cure("Correct tls.sni in the client's DestinationRule.", _REFUSED),
    Flag.NO_ROUTE: Cure(
        "If the name is a service of yours, add a route for it: * is one label, ** any number. hgate "
        "explain --sni NAME says which routes were tried.",
        _REFUSED,
    ),
    Flag.ALPN: Cure(
        "Let the client use the mesh's mTLS. If it is not to, set alpn: any on the forward route.",
        _REFUSED,
    ),
    Flag.IDENTITY_ERROR: Cure(
        "Look at the table of tokens for the last failure, then check hgate's account and the token source.",
        _TOKENS,
    ),
    Flag.CONNECT: Cure(
        "Check the address that the message names: the route's URL and connect, its name in DNS, "
        "firewall, NetworkPolicy and Private Google Access; of a reverse route, whether the workload "
        "runs.",
        _REFUSED,
    ),
    Flag.UPSTREAM: Cure(
        "Look at the service's and krun's log: it takes requests and does not answer them in time. If"
        " all its connections are full, allow more instances.",
        _REFUSED,
    ),
    Flag.STATUS: Cure(
        "401 or 403: check the token's audience and roles/run.invoker. 404: the URL, its path, and "
        "the service's ingress setting. 429: more instances. 502 or 503: the container's log.",
        _ANSWER,
    ),
    Flag.UPSTREAM_RESET: Cure(
        "Find krun's log line with the same traceparent. After a whole number of minutes it is Cloud "
        "Run's request timeout: raise that, or set max_tunnel_lifetime below it.",
        _BROKEN,
    ),
    Flag.DOWNSTREAM_RESET: Cure("Nothing is to be done here: the client broke off.", _BROKEN),
    Flag.DENY: Cure(
        "If the peer is to come in, add a rule for its identity. If its certificate was revoked or "
        "has expired, it needs a new one.",
        _PORTS,
    ),
    Flag.TLS_FAILURE: Cure(
        "Check the peer's certificate and the roots that hgate trusts: hbone certs FOLDER shows both.",
        _CERTIFICATES,
    ),
    Flag.LIMIT: Cure(
        "Raise the limit that the message names, add hgate replicas, or find out who opens so many "
        "connections.",
        _REFUSED,
    ),
    Flag.IDLE: Cure("Switch on keep-alive in the application, or raise idle_timeout.", _BROKEN),
    Flag.HALF_CLOSED: Cure(
        "Look at the application: one side has ended, and the other neither sent nor ended.",
        _BROKEN,
    ),
    Flag.LIFETIME: Cure("Nothing is to be done: an old tunnel ended in order.", _BROKEN),
    Flag.LIFETIME_RESET: Cure(
        "Let clients renew their connections sooner (maxConnectionDuration), or raise max_tunnel_lifetime.",
        _BROKEN,
    ),
    Flag.OVERLOAD: Cure(
        "Give hgate more memory, or raise limits.max_buffered; and find the reader that is slow.",
        _BROKEN,
    ),
    Flag.STOPPED: Cure(
        "Nothing is to be done if hgate was being replaced: clients connect again. Otherwise raise "
        "drain_timeout.",
        _REFUSED,
    ),
    Flag.BAD_REQUEST: Cure(
        "Correct the client of the HBONE port: it must send CONNECT with HOST:PORT, and not for a "
        "forbidden target.",
        _PORTS,
    ),
    Flag.INTERNAL: Cure(
        "Report it, with hgate's log of that moment: this is a fault of hgate.",
        _REFUSED,
    ),
}
"""For each flag."""
