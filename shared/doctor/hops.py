"""The hops of a path, in the order in which they are walked, and the exit code of each.

A walk from a client to a container has those of `PATH`, one through a gateway those of `GATEWAY`, a look at
this machine alone those of `MACHINE`.
"""

from __future__ import annotations

from enum import Enum


class Section(Enum):
    """A heading of the report."""

    HERE = "this machine"
    NETWORK = "the way there"
    SERVICE = "the service"
    CONTAINER = "the container"
    MESH = "the gateway"


class Hop(Enum):
    """A part of a path that can fail by itself. The exit codes are none of sysexits.h's (64 to 78), and none
    of a shell's (126 and above)."""

    word: str
    section: Section
    exit_code: int
    about: str

    def __new__(cls, word: str, section: Section, exit_code: int, about: str) -> Hop:
        hop = object.__new__(cls)
        hop._value_ = word
        hop.word = word
        hop.section = section
        hop.exit_code = exit_code
        hop.about = about
        return hop

    MACHINE = "machine", Section.HERE, 80, "what this machine has: programs, files, variables"
    DESTINATION = "destination", Section.HERE, 81, "what the argument means"
    CREDENTIALS = "credentials", Section.HERE, 82, "a token, or a certificate, can be had"
    DNS = "dns", Section.NETWORK, 83, "the host has addresses"
    PROXY = "proxy", Section.NETWORK, 84, "the HTTP proxy lets us through"
    TCP = "tcp", Section.NETWORK, 85, "one of the addresses accepts"
    TLS = "tls", Section.NETWORK, 86, "the handshake, and the server's certificate"
    ALPN = "alpn", Section.NETWORK, 87, "the server speaks HTTP/2"
    TOKEN = "token", Section.SERVICE, 88, "the token is for this service, valid, and believed"
    INGRESS = "ingress", Section.SERVICE, 89, "there is such a service, and it lets this network in"
    FRONT_END = "front end", Section.SERVICE, 90, "the front end passes the request to a container"
    HTTP2 = "http2", Section.CONTAINER, 91, "HTTP/2 reaches the container, both ways at once"
    KRUN = "krun", Section.CONTAINER, 92, "it is krun that answers"
    DIAL = "dial", Section.CONTAINER, 93, "krun reaches the tunnel's target"
    SSH = "ssh", Section.CONTAINER, 94, "an SSH server answers, and shows its host key"
    SNI = "sni", Section.MESH, 95, "the gateway has a route for the name"
    ROUTE = "route", Section.MESH, 96, "the gateway reaches the workload by it"
    PEER = "peer", Section.MESH, 97, "the mTLS peer is who it should be"
    POLICY = "policy", Section.MESH, 98, "the mTLS peer lets us in"


PATH = (
    Hop.DESTINATION,
    Hop.CREDENTIALS,
    Hop.DNS,
    Hop.PROXY,
    Hop.TCP,
    Hop.TLS,
    Hop.ALPN,
    Hop.TOKEN,
    Hop.INGRESS,
    Hop.FRONT_END,
    Hop.HTTP2,
    Hop.KRUN,
    Hop.DIAL,
    Hop.SSH,
)
"""From a client to a port in a container."""

GATEWAY = (Hop.CREDENTIALS, Hop.DNS, Hop.TCP, Hop.SNI, Hop.ROUTE, Hop.PEER, Hop.POLICY)
"""From a member of the mesh, through a gateway that routes by SNI, to a workload's mTLS end."""
