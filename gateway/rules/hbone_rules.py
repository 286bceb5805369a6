"""Who may open a tunnel to where, on the HBONE port: the rules.

No I/O: a name is looked up between `Rules.check_request` and `Rules.check`. One that a route takes is not
looked up at all, and has `Rules.check_name`.

The first rule that matches identity, target and token decides. If none matches, the tunnel is denied.

1. A rule matches a tunnel if one of its `from` patterns matches the peer's SPIFFE ID and one of its `to`
   patterns the target, host and port.
2. A host glob matches names as the peer wrote them; a dot at the end does not count. A CIDR matches
   addresses: the one that the peer asked for, or one that the name stands for, so no name leads around a rule
   about addresses. An IPv4 address inside an IPv6 one counts as well: to deny, one of several is enough; to
   allow, all have to match. A lone `*` matches names and addresses.
3. This machine and its link (loopback, link-local, unspecified, multicast) and the clouds' metadata servers
   are near. Only a CIDR that is about them allows them, not one that is wide enough to contain them too. No
   name and no `*` leads there.
4. A rule with claims that allows matches only a peer that shows a good token with these claims. A rule with
   claims that denies matches every peer, except one that shows a good token with other claims. The token is
   checked when the first such rule matches identity and target, or may match once the name is looked up.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gateway.rules.claims import (
    NO_TOKEN,
    ClaimPatterns,
    Claims,
    Token,
)
from gateway.rules.templates import is_port, shown
from shared.address import MAX_PORT, Address
from shared.address_forms import (
    MAPPED,
    IpAddress,
    IpNetwork,
    contains,
    is_about_near,
    is_near,
    plain,
)
from shared.errors import DeniedError, TokenNeededError
from shared.name_globs import compile_glob
from shared.trust.peer_patterns import PeerPatterns, TrustDomain, may_overlap
from shared.trust.spiffe import SpiffeId

ANY = "*"

# What nobody means with a glob: an address, or a part of one.
_NUMERIC = re.compile(r"[0-9.*]*[0-9][0-9.*]*")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule as the file has it."""

    identities: tuple[str, ...]
    """`from`: patterns of SPIFFE IDs; `*` is everybody."""

    targets: tuple[str, ...]
    """`to`: HOST:PORT; HOST is a glob on names, a CIDR or an address (IPv6 in brackets), or `*`; PORT is a
    number or `*`."""

    deny: bool = False
    """Whether it denies what it matches."""

    claims: Claims | None = None
    """`claims`: what the request's token has to have; empty: any good token; None: no token is asked for."""

    line: int | None = field(default=None, compare=False)
    """Where in the file it is, counting from 1."""


def bypasses(rules: Sequence[Rule]) -> Iterator[tuple[int, str]]:
    """The rules that deny names only, while a later one allows addresses to the same peers on the same port:
    each by its place, with what is wrong and what to write. Whoever asks for an address gets past them."""
    targets = [[_Target(text) for text in rule.targets] for rule in rules]
    for index, rule in enumerate(rules):
        if not rule.deny or any(target.matches_addresses for target in targets[index]):
            continue
        for later, allowing in enumerate(rules[index + 1 :], index + 1):
            if allowing.deny or not may_overlap(rule.identities, allowing.identities):
                continue
            pairs = zip(allowing.targets, targets[later], strict=True)
            around = [text for text, target in pairs if target.leads_around(targets[index])]
            if around:
                yield index, _around(later, allowing, around[0])
                break


def _around(place: int, allowing: Rule, text: str) -> str:
    at = "" if allowing.line is None else f" (line {allowing.line})"
    port = text.rpartition(":")[2]
    return (
        f"denies names, but rules[{place}]{at} allows addresses ({text}): a peer that asks for a name's "
        f'address gets past it. Deny the addresses here, too, such as "ADDRESS/BITS:{port}", or allow only '
        "names there"
    )


class Rules:
    """The rules, compiled. Raises ValueError with the reason if a pattern is wrong."""

    def __init__(self, rules: Iterable[Rule], trust: TrustDomain | None = None) -> None:
        """`trust` is our own domain, with its aliases."""
        self._rules = tuple(_CompiledRule(rule, trust) for rule in rules)

    def check_request(self, identity: SpiffeId, target: Address, token: Token = NO_TOKEN) -> None:
        """Raises DeniedError if the tunnel is refused whatever address the target's name has, and whatever
        `token` raises."""
        address = address_of(target.host)
        if address is not None:
            self.check(identity, target, address, token)
            return
        wanting: int | None = None
        for index, rule in enumerate(self._rules):
            if rule.matches_peer(identity):
                matched = rule.matches(target, None)
                if matched and rule.deny and rule.matches_token(token):
                    raise rule.denied(index, identity, target, token)
                if not rule.deny and (matched or rule.may_match_addresses(target.port)):
                    if rule.matches_token(token):
                        return
                    wanting = index if wanting is None else wanting
        raise _not_allowed(identity, target, "", token, wanting)

    def check_name(
        self, identity: SpiffeId, target: Address, asked: IpAddress | None, token: Token = NO_TOKEN
    ) -> None:
        """Raises DeniedError unless `identity` may have `target`, a name that a route takes, and whatever
        `token` raises. Nobody looks the name up: only patterns of names allow it. `asked` is the address that
        the peer asked for in its place: patterns of addresses deny it, and allow nothing, for which name it
        stands for may be the peer's word."""
        wanting: int | None = None
        for index, rule in enumerate(self._rules):
            if not rule.matches_peer(identity):
                continue
            matched = rule.matches(target, None)
            if not matched and rule.deny and asked is not None:
                matched = rule.matches(Address(str(asked), target.port), asked)
            if not matched:
                continue
            if not rule.matches_token(token):
                wanting = index if wanting is None and not rule.deny else wanting
                continue
            if rule.deny:
                raise rule.denied(index, identity, target, token)
            return
        raise _not_allowed(identity, target, "", token, wanting)

    def check(self, identity: SpiffeId, target: Address, address: IpAddress, token: Token = NO_TOKEN) -> None:
        """Raises DeniedError unless `identity` may have `target` at `address`, which is the target's host or
        what that stands for, and whatever `token` raises."""
        address = plain(address)
        wanting: int | None = None
        for index, rule in enumerate(self._rules):
            if rule.matches_peer(identity) and rule.matches(target, address):
                if not rule.matches_token(token):
                    wanting = index if wanting is None and not rule.deny else wanting
                    continue
                if rule.deny:
                    raise rule.denied(index, identity, target, token)
                return
        at = "" if address_of(target.host) else f" at {address}"
        raise _not_allowed(identity, target, at, token, wanting)


def check_target(text: str) -> str:
    """Returns `text`, a pattern for `Rule.targets`. Raises ValueError with the reason if it is none."""
    _Target(text)
    return text


def address_of(host: str) -> IpAddress | None:
    """The address that `host` is, None if it is a name."""
    try:
        return plain(ipaddress.ip_address(host))
    except ValueError:
        return None


def _denied(identity: SpiffeId, target: Address, reason: str) -> DeniedError:
    return DeniedError(_text(identity, target, reason))


def _text(identity: SpiffeId, target: Address, reason: str) -> str:
    return f"peer {identity} denied {shown(str(target))}: {reason}"


def _not_allowed(
    identity: SpiffeId, target: Address, at: str, token: Token, wanting: int | None
) -> DeniedError:
    """No rule has allowed it; the rule with the index `wanting` would, with another token."""
    if wanting is None:
        return _denied(identity, target, f"no rule allows it{at}")
    reason = f"asks for a token: {token.fault}" if token.fault else "asks for other claims than its token has"
    return TokenNeededError(_text(identity, target, f"rules[{wanting}] {reason}"), token.challenge)


class _CompiledRule:
    __slots__ = ("_claims", "_peers", "_targets", "deny")

    def __init__(self, rule: Rule, trust: TrustDomain | None) -> None:
        self.deny = rule.deny
        self._peers = PeerPatterns(rule.identities, trust, anybody=True)
        self._targets = tuple(_Target(text) for text in rule.targets)
        self._claims = None if rule.claims is None else ClaimPatterns(rule.claims)

    def matches_token(self, token: Token) -> bool:
        """Whether the rule matches a request with `token`. Raises what `token` raises, if it is asked."""
        if self._claims is None:
            return True
        said = token.claims()
        if said is None:
            return self.deny  # a peer without a token must not get past the rule
        return self._claims.deny(said) if self.deny else self._claims.allow(said)

    def denied(self, index: int, identity: SpiffeId, target: Address, token: Token) -> DeniedError:
        """The error about this rule, which matches and denies."""
        if self._claims is None:
            return _denied(identity, target, f"rules[{index}] denies it")
        reason = f"asks for a token: {token.fault}" if token.fault else "denies it for what its token says"
        return TokenNeededError(_text(identity, target, f"rules[{index}] {reason}"), token.challenge)

    def matches_peer(self, identity: SpiffeId) -> bool:
        return self._peers.matches(identity)

    def matches(self, target: Address, address: IpAddress | None) -> bool:
        """Whether a pattern matches `target`; `address` None: it is a name that is not yet looked up."""
        return any(pattern.matches(target, address, self.deny) for pattern in self._targets)

    def may_match_addresses(self, port: int) -> bool:
        return any(pattern.network is not None and pattern.matches_port(port) for pattern in self._targets)


class _Target:
    """One `to` pattern."""

    __slots__ = ("_glob", "_port", "network")

    def __init__(self, text: str) -> None:
        host, colon, port = text.rpartition(":")
        if not colon or not host or host.endswith(":") or "]" in port:
            raise ValueError("must be HOST:PORT, with * for any")
        self._port = None if port == ANY else _read_port(port)
        self.network = _read_network(host)
        self._glob = None
        if self.network is None and host != ANY:
            if _NUMERIC.fullmatch(host):
                raise ValueError("addresses are written as CIDR, such as 10.0.0.0/8:*")
            self._glob = compile_glob(host)

    @property
    def matches_addresses(self) -> bool:
        """Whether it matches an address that a peer asks for: a CIDR, or a lone `*`."""
        return self._glob is None

    def matches_port(self, port: int) -> bool:
        return self._port is None or self._port == port

    def leads_around(self, denied: Iterable[_Target]) -> bool:
        """Whether it matches addresses on a port of one of the names that are denied."""
        ports = (self._port is None or name.matches_port(self._port) for name in denied)
        return self.matches_addresses and any(ports)

    def matches(self, target: Address, address: IpAddress | None, deny: bool) -> bool:
        if not self.matches_port(target.port):
            return False
        may_be_near = deny or address is None or not is_near(address)
        if self.network is not None:
            if address is None or not contains(self.network, address, any_form=deny):
                return False
            return may_be_near or is_about_near(self.network)
        if not may_be_near:
            return False
        if self._glob is None:
            return True
        # The glob comes first: to see that a name is no address costs more.
        return bool(self._glob.fullmatch(target.host.removesuffix("."))) and address_of(target.host) is None


def _read_port(text: str) -> int:
    if not is_port(text):
        raise ValueError(f"the port must be 1..{MAX_PORT} or *")
    return int(text)


def _read_network(host: str) -> IpNetwork | None:
    """The network of a CIDR or an address, None for a glob."""
    bracketed = host.startswith("[") and host.endswith("]")
    inner = host[1:-1] if bracketed else host
    if not bracketed:
        if ":" in host:
            raise ValueError("an IPv6 address needs brackets: write [2001:db8::/32]:PORT")
        if "/" not in host and address_of(host) is None:
            return None
    try:
        network = ipaddress.ip_network(inner)
    except ValueError as error:
        raise ValueError(f"{shown(inner)} is no CIDR: {_why_no_network(inner)}") from error
    if bracketed != (network.version == 6):
        raise ValueError("brackets are for IPv6 addresses")
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(MAPPED):
        raise ValueError(f"{shown(inner)} is IPv4 in IPv6's clothes: write the IPv4 address")
    return network


def _why_no_network(text: str) -> str:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return "write ADDRESS/BITS"
    return "it has bits set behind its prefix"
