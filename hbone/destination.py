"""Where a command's tunnels lead, by its command line: the URL, whom to dial for it, and which token to send.

Every command that opens tunnels has the same flags for it (`arguments.add_destination`), and what it is given
as URL may be anything that `find` understands. How a service is told from a host:
`hbone.services.named_service`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from hbone import target, token_choice
from hbone.target import TunnelTarget
from hbone.token_choice import MintedToken
from shared.address import Address
from shared.credentials.tokens.tokens import TokenSource
from shared.errors import UsageError
from shared.net.dial import Origin
from shared.tunnel.tunnel_request import TUNNEL_PREFIX

if TYPE_CHECKING:
    from hbone.services.named_service import ServiceName
    from shared.net.http_proxy import HttpProxy

CONNECT_TIMEOUT_S = 10.0
"""For TCP and TLS."""


class Destination(NamedTuple):
    """One place in a container, and the way there. No dataclass, as its target."""

    target: TunnelTarget
    origin: Origin
    """Whom to dial, and how it has to prove itself."""

    token: TokenSource
    """For the service's front end; NoToken if it is to get none."""

    found_by: str = ""
    """Who said where the service is, for people; empty if the user has written a host."""

    @property
    def token_was_kept(self) -> bool:
        """Whether the last token was not a new one, so that another may be accepted where it was refused."""
        return isinstance(self.token, MintedToken) and self.token.was_kept

    def __str__(self) -> str:
        return str(self.target)


async def find(
    text: str, options: argparse.Namespace, environ: Mapping[str, str], *, default_port: str | None = None
) -> Destination:
    """What `text`, a command's URL, means with the flags of `arguments.add_destination`.

    `default_port` is where a tunnel leads if `text` names a service or a host only: a port, or the name of a
    target, such as 22 for ssh; empty: to krun itself. None: then `text` has to say it.

    Raises:
        UsageError: `text`, a flag, or a variable of `environ`, is wrong.
        UnavailableError: `text` names a service that nobody knows.
    """
    if options.no_token and (options.token_file is not None or options.audience is not None):
        raise UsageError("--no-token is not allowed with --token-file or --audience")
    connect = _connect(options.connect)
    audience, found_by = options.audience, ""
    wanted = _service_in(text)
    if wanted is None:
        if options.project or options.region:
            raise UsageError(f"{text}: --project and --region are for SERVICE; this is a host")
        where = target.parse(text, default_port)
    else:
        where, audience, found_by = await _of_service(text, wanted, options, environ, default_port)
    token = token_choice.for_tunnel(
        where,
        environ,
        connect=connect,
        token_file=options.token_file,
        audience=audience,
        none=options.no_token,
        chosen_by=found_by,
    )
    dialled = connect or where.address
    proxy = _proxy(dialled, environ) if where.scheme == "https" else None
    # A person has written the name, and is used to what resolv.conf makes of it.
    searched = wanted is None
    origin = Origin(where.scheme, where.host, dialled, options.ca, searched=searched, proxy=proxy)
    return Destination(where, origin, token, found_by)


def _service_in(text: str) -> ServiceName | None:
    if "/" in text:  # a URL
        return None
    from hbone.services import named_service

    return named_service.read(text)


async def _of_service(
    text: str,
    wanted: ServiceName,
    options: argparse.Namespace,
    environ: Mapping[str, str],
    default_port: str | None,
) -> tuple[TunnelTarget, str | None, str]:
    """The URL of a service, the audience that was asked for if any, and who said so."""
    port = wanted.port or default_port
    if port is None:
        raise UsageError(
            f"{text}: no command, and no port of a service: write {wanted}:22 for ssh, {wanted}:PORT, or a "
            f"URL such as https://HOST{TUNNEL_PREFIX}22"
        )
    from hbone.services.lookup import Lookup  # ssh users wait for `hbone URL`

    lookup = Lookup(environ, project=options.project or "", region=options.region or "")
    found = await lookup.find(wanted)
    where = target.parse(found.url, port)
    if found.audience and options.audience is None and not options.no_token and options.token_file is None:
        # Others may have written it: what they ask for is sent only where it cannot be used elsewhere.
        token_choice.demand_own(found.audience, where, found.place)
        return where, found.audience, found.place
    return where, options.audience, found.place


def _proxy(address: Address, environ: Mapping[str, str]) -> HttpProxy | None:
    """The proxy that `environ` names for `address`. Raises UsageError if it names a wrong one."""
    if not any(name.lower() in ("https_proxy", "all_proxy") for name in environ):
        return None
    from hbone import proxy_choice

    return proxy_choice.for_address(address, environ)


def _connect(text: str | None) -> Address | None:
    try:
        return Address.parse(text) if text else None
    except ValueError as error:
        raise UsageError(f"--connect {text}: {error}") from error
