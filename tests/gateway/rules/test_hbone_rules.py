"""Who may open a tunnel to where: `:authority`, patterns, and the order of the rules."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.rules.hbone_rules import (
    Rule,
    Rules,
    address_of,
    bypasses,
    check_target,
)
from shared.address import MAX_PORT, Address
from shared.address_forms import IpAddress, contains, is_about_near, is_near
from shared.errors import DeniedError, TokenNeededError
from shared.trust.peer_patterns import TrustDomain
from shared.trust.spiffe import SpiffeId

ALICE = SpiffeId.parse("spiffe://demo.local/ns/demo/sa/alice")
BOB = SpiffeId.parse("spiffe://demo.local/ns/other/sa/bob")
EVE = SpiffeId.parse("spiffe://elsewhere.example/ns/demo/sa/alice")
DEMO = "spiffe://demo.local/ns/demo/sa/*"

ports = st.integers(1, MAX_PORT)
labels = st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
names = st.lists(labels, min_size=1, max_size=5).map(".".join)
addresses = st.ip_addresses()


# Rules.


def verdict(rules: list[Rule], identity: SpiffeId, target: str, *resolved: str) -> str:
    """`yes`, or why not; for a name `resolved` is what it stands for, of which one has to be allowed."""
    compiled = Rules(rules)
    wanted = Address.parse(target)
    try:
        compiled.check_request(identity, wanted)
        for address in resolved:
            compiled.check(identity, wanted, ipaddress.ip_address(address))
    except DeniedError as error:
        assert str(error).startswith(f"peer {identity} denied {wanted}: ")
        return str(error).removeprefix(f"peer {identity} denied {wanted}: ")
    return "yes"


NO = "no rule allows it"
ALLOW = [Rule((DEMO,), ("*.demo.svc.cluster.local:8080", "10.0.0.0/8:443", "[2001:db8::/32]:*"))]


@pytest.mark.parametrize(
    ("rules", "identity", "target", "resolved", "answer"),
    [
        ([], ALICE, "10.0.0.1:80", (), NO),
        ([], ALICE, "hello:80", (), NO),
        # Names.
        (ALLOW, ALICE, "hello.demo.svc.cluster.local:8080", ("192.0.2.1",), "yes"),
        (ALLOW, ALICE, "hello.demo.svc.cluster.local.:8080", ("192.0.2.1",), "yes"),
        (ALLOW, ALICE, "hello.demo.svc.cluster.local:8081", ("192.0.2.1",), f"{NO} at 192.0.2.1"),
        (ALLOW, ALICE, "demo.svc.cluster.local:8080", ("192.0.2.1",), f"{NO} at 192.0.2.1"),
        (ALLOW, BOB, "hello.demo.svc.cluster.local:8080", (), NO),
        (ALLOW, EVE, "hello.demo.svc.cluster.local:8080", (), NO),
        # Addresses, and names that stand for them.
        (ALLOW, ALICE, "10.9.9.9:443", (), "yes"),
        (ALLOW, ALICE, "10.9.9.9:444", (), NO),
        (ALLOW, ALICE, "11.0.0.1:443", (), NO),
        (ALLOW, ALICE, "[::ffff:10.9.9.9]:443", (), "yes"),
        (ALLOW, ALICE, "[2001:db8::5]:1", (), "yes"),
        (ALLOW, ALICE, "[2001:db9::5]:1", (), NO),
        (ALLOW, ALICE, "db.example:443", ("10.0.0.7",), "yes"),
        (ALLOW, ALICE, "db.example:443", ("192.0.2.1",), f"{NO} at 192.0.2.1"),
        (ALLOW, ALICE, "db.example:443", ("::ffff:10.0.0.7",), "yes"),
        # A glob takes no address, a CIDR no name.
        ([Rule((DEMO,), ("a*:80",))], ALICE, "10.1.2.3:80", (), NO),
        # The first that takes it decides.
        (
            [Rule((str(ALICE),), ("*:*",), deny=True), Rule((DEMO,), ("*:*",))],
            ALICE,
            "a:80",
            (),
            "rules[0] denies it",
        ),
        (
            [Rule((DEMO,), ("*:*",)), Rule((str(ALICE),), ("*:*",), deny=True)],
            ALICE,
            "a:80",
            ("192.0.2.1",),
            "yes",
        ),
        (
            [Rule(("*",), ("a:80",), deny=True), Rule(("*",), ("*:*",))],
            EVE,
            "a:80",
            (),
            "rules[0] denies it",
        ),
        ([Rule(("*",), ("a:80",), deny=True), Rule(("*",), ("*:*",))], EVE, "b:80", ("192.0.2.1",), "yes"),
        # No name leads around a rule about addresses.
        (
            [Rule(("*",), ("10.0.0.0/8:*",), deny=True), Rule(("*",), ("*:*",))],
            EVE,
            "b:80",
            ("10.0.0.1",),
            "rules[0] denies it",
        ),
        (
            [Rule(("*",), ("10.0.0.0/8:*",), deny=True), Rule(("*",), ("*:*",))],
            EVE,
            "b:80",
            ("::ffff:10.0.0.1",),
            "rules[0] denies it",
        ),
        # This machine and its link.
        ([Rule(("*",), ("*:*",))], ALICE, "127.0.0.1:15000", (), NO),
        ([Rule(("*",), ("*:*",))], ALICE, "[::1]:15000", (), NO),
        ([Rule(("*",), ("*:*",))], ALICE, "[::ffff:127.0.0.1]:15000", (), NO),
        ([Rule(("*",), ("*:*",))], ALICE, "169.254.169.254:80", (), NO),
        ([Rule(("*",), ("*:*",))], ALICE, "metadata.google.internal:80", ("169.254.169.254",), None),
        ([Rule(("*",), ("localhost:*",))], ALICE, "localhost:15000", ("127.0.0.1",), f"{NO} at 127.0.0.1"),
        ([Rule(("*",), ("127.0.0.0/8:80",))], ALICE, "127.0.0.1:80", (), "yes"),
        ([Rule(("*",), ("127.0.0.0/8:80",))], ALICE, "localhost:80", ("127.0.0.1",), "yes"),
        (
            [Rule(("*",), ("localhost:*",), deny=True), Rule(("*",), ("127.0.0.1:*",))],
            ALICE,
            "localhost:80",
            (),
            "rules[0] denies it",
        ),
    ],
)
def test_the_rules(
    rules: list[Rule], identity: SpiffeId, target: str, resolved: tuple[str, ...], answer: str | None
) -> None:
    found = verdict(rules, identity, target, *resolved)
    assert found == (answer or f"{NO} at {resolved[0]}")


def test_no_name_is_looked_up_for_whom_no_rule_could_allow_it() -> None:
    rules = Rules([Rule((DEMO,), ("10.0.0.0/8:443",)), Rule(("*",), ("*.public:80",))])
    rules.check_request(ALICE, Address("db", 443))  # it may stand for an address in 10/8
    rules.check_request(BOB, Address("a.public", 80))
    for identity, target in ((ALICE, "db:444"), (BOB, "db:443"), (BOB, "a.public:81")):
        with pytest.raises(DeniedError):
            rules.check_request(identity, Address.parse(target))


@given(names, ports)
def test_a_rule_with_the_very_name_and_port_takes_them_and_no_other_port(name: str, port: int) -> None:
    rules = [Rule((DEMO,), (f"{name}:{port}",))]
    assert verdict(rules, ALICE, f"{name}:{port}", "192.0.2.1") == "yes"
    assert verdict(rules, ALICE, f"{name}:{port % MAX_PORT + 1}", "192.0.2.1") == NO
    assert verdict(rules, ALICE, f"x{name}:{port}", "192.0.2.1") == NO
    assert verdict(rules, BOB, f"{name}:{port}", "192.0.2.1") == NO


@given(addresses, st.integers(0, 128), addresses, ports)
def test_a_cidr_takes_what_the_network_has(
    of: ipaddress.IPv4Address | ipaddress.IPv6Address,
    bits: int,
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
    port: int,
) -> None:
    network = ipaddress.ip_network(f"{of}/{bits % (of.max_prefixlen + 1)}", strict=False)
    text = f"[{network}]" if network.version == 6 else str(network)
    try:
        rules = [Rule((DEMO,), (check_target(f"{text}:{port}"),))]
    except ValueError as error:
        assert "clothes" in str(error)
        return
    plain = address_of(str(address))
    assert plain is not None
    taken = verdict(rules, ALICE, str(Address(str(address), port))) == "yes"
    if is_near(plain):
        assert taken == (contains(network, plain, any_form=False) and is_about_near(network))
    else:
        assert taken == contains(network, plain, any_form=False)


@given(addresses)
def test_a_star_takes_every_address_but_the_near_ones(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    plain = address_of(str(address))
    assert plain is not None
    near = plain.is_loopback or plain.is_link_local or plain.is_unspecified or plain.is_multicast
    assert is_near(plain) or not near
    taken = verdict([Rule(("*",), ("*:*",))], ALICE, str(Address(str(address), 80)))
    assert taken == (NO if is_near(plain) else "yes")


METADATA = (
    "fd20:ce::254",  # Google's
    "fd00:ec2::254",  # Amazon's
    "100.100.100.200",  # Alibaba's
    "168.63.129.16",  # Azure's
    "64:ff9b::169.254.169.254",  # by NAT64
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::a9fe:a9fe",  # by NAT64 with a prefix of the network's own: /96,
    "64:ff9b:1:a9fe:a9:fe00::",  # /48,
    "64:ff9b:1:a9:fe:a9fe::",  # /56,
    "64:ff9b:1::a9:fea9:fe00:0",  # /64
    "2002:a9fe:a9fe::1",  # by 6to4
    "::169.254.169.254",  # compatible
    "::ffff:169.254.169.254",  # mapped
    "::ffff:0:169.254.169.254",  # translated
    "2001:0:1234:5678:0:ffff:5601:5601",  # Teredo
    "2001:0:a9fe:a9fe:0:ffff:8000:1",  # and its server
    "2001:db8::5efe:169.254.169.254",  # ISATAP
    "::",
    "0.0.0.0",
    "64:ff9b::127.0.0.1",
    "2002:7f00:1::",
    "::127.0.0.1",
    "::ffff:0:127.0.0.1",
    "::ffff:0.0.0.0",
    "64:ff9b::",
    "64:ff9b:1::",
)


@pytest.mark.parametrize("address", METADATA)
def test_no_spelling_of_a_near_address_passes_a_star_or_a_wide_network(address: str) -> None:
    target = str(Address(address, 80))
    wide = Rule(
        ("*",), ("*:*", "0.0.0.0/0:*", "100.64.0.0/10:*", "[::/0]:*", "[fd00::/8]:*", "[64:ff9b::/96]:*")
    )
    assert verdict([wide], ALICE, target) == NO
    # Nor does a name that stands for it,
    assert verdict([wide], ALICE, "name:80", address).startswith(NO)
    named = Rule(("*",), ("name:*",))
    assert verdict([named], ALICE, "name:80", address).startswith(NO)
    # But a rule that says so does.
    plain = address_of(address)
    assert plain is not None
    text = f"[{plain}]" if plain.version == 6 else str(plain)
    assert verdict([Rule(("*",), (f"{text}:80",))], ALICE, target) == "yes"


SPELLINGS_OF_10_1_2_3 = (
    "::ffff:10.1.2.3",
    "::10.1.2.3",
    "::ffff:0:10.1.2.3",
    "64:ff9b::10.1.2.3",
    "64:ff9b:1::10.1.2.3",
    "64:ff9b:1:a01:2:300::",
    "2002:a01:203::1",
    "2001:0:1234:5678:0:ffff:f5fe:fdfc",
    "2001:db8::200:5efe:10.1.2.3",
)


@pytest.mark.parametrize("address", SPELLINGS_OF_10_1_2_3)
def test_no_spelling_leads_around_a_deny(address: str) -> None:
    target = str(Address(address, 80))
    rules = [Rule(("*",), ("10.0.0.0/8:*",), deny=True), Rule(("*",), ("*:*", "[::/0]:*"))]
    assert verdict(rules, ALICE, target) == "rules[0] denies it"
    assert verdict(rules, ALICE, "name:80", address) == "rules[0] denies it"


@pytest.mark.parametrize(
    ("address", "answer"),
    [
        ("::ffff:10.1.2.3", "yes"),
        ("64:ff9b::10.1.2.3", "yes"),  # what DNS64 makes of it
        ("64:ff9b::11.1.2.3", NO),
        ("2001:0:1234:5678:0:ffff:f5fe:fdfc", NO),  # its server is elsewhere
        ("2001:db8::1", NO),
    ],
)
def test_an_ipv4_network_allows_what_leads_there_and_nowhere_else(address: str, answer: str) -> None:
    assert verdict([Rule(("*",), ("10.0.0.0/8:*",))], ALICE, str(Address(address, 80))) == answer


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "10.9.8.7", "2001:4860:4860::8888", "fd12::1", "64:ff9b::8.8.8.8"]
)
def test_a_star_still_takes_all_others(address: str) -> None:
    assert verdict([Rule(("*",), ("*:*",))], ALICE, str(Address(address, 80))) == "yes"


@given(st.lists(st.sampled_from([True, False]), max_size=6), st.data())
def test_the_first_rule_that_takes_a_tunnel_decides(denies: list[bool], data: st.DataObject) -> None:
    takes = [data.draw(st.booleans()) for _ in denies]
    rules = [
        Rule((DEMO,), ("10.0.0.0/8:80" if taken else "11.0.0.0/8:80",), deny)
        for deny, taken in zip(denies, takes, strict=True)
    ]
    first = next((deny for deny, taken in zip(denies, takes, strict=True) if taken), True)
    for target, resolved in (("10.1.2.3:80", ()), ("name:80", ("10.1.2.3",))):
        assert (verdict(rules, ALICE, target, *resolved) == "yes") == (not first)


# What is no mistake, but hardly meant.

NO_PROD = Rule((DEMO,), ("db.prod.svc:*", "*.prod.svc:443"), deny=True)


@pytest.mark.parametrize(
    ("rules", "found"),
    [
        ([NO_PROD, Rule((DEMO,), ("*:*",))], [0]),
        ([NO_PROD, Rule((DEMO,), ("*.svc:*", "10.0.0.0/8:443"))], [0]),
        ([NO_PROD, Rule(("*",), ("[::/0]:443",))], [0]),
        ([Rule((str(BOB),), ("a:1",)), NO_PROD, Rule((DEMO,), ("10.0.0.0/8:443",))], [1]),
        ([NO_PROD, NO_PROD, Rule((DEMO,), ("10.0.0.0/8:443",))], [0, 1]),
        # Nothing leads past these.
        ([NO_PROD, Rule((DEMO,), ("*.svc:*",))], []),
        ([NO_PROD], []),
        ([Rule((DEMO,), ("10.0.0.0/8:443",)), NO_PROD], []),
        ([Rule((DEMO,), ("db.prod.svc:80",), deny=True), Rule((DEMO,), ("10.0.0.0/8:443",))], []),
        ([Rule((str(BOB),), ("db.prod.svc:*",), deny=True), Rule((DEMO,), ("*:*",))], []),
        ([Rule((DEMO,), ("db:*", "10.0.0.0/8:*"), deny=True), Rule((DEMO,), ("*:*",))], []),
        ([Rule((DEMO,), ("*:22",), deny=True), Rule((DEMO,), ("*:*",))], []),
    ],
)
def test_rules_that_deny_names_and_not_their_addresses(rules: list[Rule], found: list[int]) -> None:
    assert [index for index, _ in bypasses(rules)] == found


# Patterns.


@pytest.mark.parametrize(
    "text",
    [
        "*:*",
        "*:80",
        "hello:*",
        "*.demo.svc.cluster.local:8080",
        "10.0.0.0/8:*",
        "10.0.0.1:80",
        "[::1]:80",
        "[2001:db8::/32]:*",
    ],
)
def test_a_target_pattern(text: str) -> None:
    assert check_target(text) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hello", "must be HOST:PORT"),
        (":80", "must be HOST:PORT"),
        ("[2001:db8::1]", "must be HOST:PORT"),
        ("hello:0", "the port must be"),
        ("hello:65536", "the port must be"),
        ("hello:8*", "the port must be"),
        ("hello:80-90", "the port must be"),
        ("he_llo..x:80", "empty label"),
        ("he llo:80", "only letters"),
        ("10.0.0.*:80", "written as CIDR"),
        ("10.*:80", "written as CIDR"),
        ("10.0.0.1/8:80", "bits set behind its prefix"),
        ("10.0.0.0/33:80", "is no CIDR"),
        ("10.0.0.0/x:80", "is no CIDR"),
        ("2001:db8::1:80", "needs brackets"),
        ("[10.0.0.0/8]:80", "brackets are for IPv6"),
        ("[hello]:80", "is no CIDR"),
        ("[::ffff:10.0.0.0/104]:80", "IPv4 in IPv6's clothes"),
        ("outbound_.80_._.hello:80", "leave the rest out"),
    ],
)
def test_what_is_no_target_pattern(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_target(text)


def test_identity_patterns() -> None:
    rules = Rules(
        [Rule((DEMO.replace("/demo/", "/de*/"),), ("*:80",))], TrustDomain("demo.local", ("old.local",))
    )
    rules.check_request(SpiffeId.parse("spiffe://old.local/ns/demo/sa/alice"), Address("a", 80))
    with pytest.raises(DeniedError):
        rules.check_request(BOB, Address("a", 80))
    with pytest.raises(ValueError, match="does not start with spiffe://"):
        Rules([Rule(("demo",), ("*:80",))])


# Rules about tokens.


class Shown:
    """A token that says this, or is none that is good; counts who looks at it."""

    is_awaited = False

    def __init__(self, said: dict[str, object] | None) -> None:
        self.said = said
        self.looks = 0
        self.fault = "" if said is not None else "it is bad"
        self.challenge = b"Bearer of shame"

    def claims(self) -> dict[str, object] | None:
        self.looks += 1
        return self.said

    async def prepare(self) -> None:
        raise AssertionError("nothing is to be waited for")


ME = (("sub", ("me", "also-*")),)
ANYBODY = SpiffeId("demo.local", "/ns/demo/sa/anybody")


def verdict_on(rules: list[Rule], said: dict[str, object] | None, target: str = "10.0.0.1:80") -> str:
    """`ok`, or why not."""
    try:
        Rules(rules).check_request(ANYBODY, Address.parse(target), Shown(said))
    except DeniedError as error:
        challenged = isinstance(error, TokenNeededError)
        assert not challenged or error.challenge == b"Bearer of shame"  # type: ignore[attr-defined]
        return ("token: " if challenged else "") + str(error).partition(f" {target}: ")[2]
    return "ok"


ALL = (("*",), ("*:*",))
NONE_GOOD, OTHERS = "asks for a token: it is bad", "asks for other claims than its token has"


@pytest.mark.parametrize(
    ("rules", "said", "verdict"),
    [
        ([Rule(*ALL, claims=ME)], {"sub": "me"}, "ok"),
        ([Rule(*ALL, claims=ME)], {"sub": "also-i"}, "ok"),
        ([Rule(*ALL, claims=ME)], {"sub": "you"}, f"token: rules[0] {OTHERS}"),
        ([Rule(*ALL, claims=ME)], {}, f"token: rules[0] {OTHERS}"),
        ([Rule(*ALL, claims=ME)], None, f"token: rules[0] {NONE_GOOD}"),
        ([Rule(*ALL, claims=())], {}, "ok"),
        ([Rule(*ALL, claims=())], None, f"token: rules[0] {NONE_GOOD}"),
        # The next rule may take who the first does not.
        ([Rule(*ALL, claims=ME), Rule(*ALL)], None, "ok"),
        ([Rule(*ALL, claims=ME), Rule(("*",), ("*:81",))], None, f"token: rules[0] {NONE_GOOD}"),
        ([Rule(("*",), ("*:81",), claims=ME)], None, "no rule allows it"),
        ([Rule(("spiffe://demo.local/ns/x",), ("*:*",), claims=ME)], None, "no rule allows it"),
        ([Rule(*ALL, claims=ME), Rule(*ALL, deny=True)], None, "rules[1] denies it"),
        # Nobody gets past a rule that denies without a token that says something else.
        (
            [Rule(*ALL, True, ME), Rule(*ALL)],
            {"sub": "me"},
            "token: rules[0] denies it for what its token says",
        ),
        ([Rule(*ALL, True, ME), Rule(*ALL)], {}, "token: rules[0] denies it for what its token says"),
        ([Rule(*ALL, True, ME), Rule(*ALL)], None, f"token: rules[0] {NONE_GOOD}"),
        ([Rule(*ALL, True, ME), Rule(*ALL)], {"sub": "you"}, "ok"),
        ([Rule(*ALL, True, ME)], {"sub": "you"}, "no rule allows it"),
        ([Rule(("*",), ("*:81",), True, ME), Rule(*ALL)], None, "ok"),
    ],
)
@pytest.mark.parametrize("target", ["10.0.0.1:80", "hello:80"])
def test_rules_about_tokens(
    rules: list[Rule], said: dict[str, object] | None, verdict: str, target: str
) -> None:
    assert verdict_on(rules, said, target) == verdict


def test_claims_and_what_a_name_stands_for() -> None:
    network = Rules([Rule(("*",), ("10.0.0.0/8:*",), claims=ME)])
    named, address = Address("hello", 80), ipaddress.ip_address("10.0.0.1")
    network.check_request(ANYBODY, named, Shown({"sub": "me"}))
    network.check(ANYBODY, named, address, Shown({"sub": "me"}))
    with pytest.raises(TokenNeededError):  # it is not even looked up
        network.check_request(ANYBODY, named, Shown(None))
    with pytest.raises(DeniedError, match=r"no rule allows it at 11\.0\.0\.1"):
        network.check(ANYBODY, named, ipaddress.ip_address("11.0.0.1"), Shown({"sub": "me"}))
    shut = Rules([Rule(("*",), ("10.0.0.0/8:*",), True, ME), Rule(*ALL)])
    shut.check_request(ANYBODY, named, Shown(None))
    shut.check(ANYBODY, named, ipaddress.ip_address("11.0.0.1"), Shown(None))
    for shown in (Shown({"sub": "me"}), Shown(None)):
        with pytest.raises(TokenNeededError):
            shut.check(ANYBODY, named, address, shown)


def test_a_token_is_looked_at_by_rules_with_claims_that_take_the_rest_only() -> None:
    rules = Rules(
        [
            Rule(("*",), ("*:81",), claims=ME),
            Rule(("spiffe://demo.local/ns/x",), ("*:*",), True, ME),
            Rule(("*",), ("*:80",)),
            Rule(*ALL, claims=ME),
        ]
    )
    for target, looks in (("10.0.0.1:80", 0), ("hello:80", 0), ("10.0.0.1:82", 1), ("10.0.0.1:81", 1)):
        shown = Shown({"sub": "me"})
        rules.check_request(ANYBODY, Address.parse(target), shown)
        assert shown.looks == looks, target


# Names that a route takes, which nobody looks up.


ASKED = ipaddress.ip_address("10.96.0.7")


@pytest.mark.parametrize(
    ("rules", "asked", "is_allowed"),
    [
        ([Rule((DEMO,), ("*.prod.svc:5432",))], None, True),
        ([Rule((DEMO,), ("*:*",))], None, True),
        ([Rule((DEMO,), ("*.prod.svc:80",))], None, False),
        ([Rule((DEMO,), ("10.0.0.0/8:*", "[::/0]:*"))], None, False),
        ([Rule((DEMO,), ("10.0.0.0/8:*",))], ASKED, False),
        ([Rule((DEMO,), ("db.prod.svc:*",))], ASKED, True),
        ([Rule(("*",), ("10.0.0.0/8:*",), deny=True), Rule((DEMO,), ("db.prod.svc:*",))], ASKED, False),
        ([Rule(("*",), ("10.0.0.0/8:*",), deny=True), Rule((DEMO,), ("db.prod.svc:*",))], None, True),
        ([Rule(("*",), ("db.prod.svc:*",), deny=True), Rule((DEMO,), ("*:*",))], None, False),
        ([Rule((DEMO,), ("db.prod.svc:*",)), Rule(("*",), ("10.0.0.0/8:*",), deny=True)], ASKED, True),
    ],
)
def test_a_name_that_a_route_takes(rules: list[Rule], asked: IpAddress | None, is_allowed: bool) -> None:
    """Only names allow it; networks deny an address that was asked for in its place."""
    target = Address("db.prod.svc", 5432)
    if is_allowed:
        Rules(rules).check_name(ALICE, target, asked)
        return
    with pytest.raises(DeniedError, match=r"alice denied db\.prod\.svc:5432: (no rule allows it|rules\[0\])"):
        Rules(rules).check_name(ALICE, target, asked)


def test_a_name_that_a_route_takes_for_a_token() -> None:
    target = Address("db.prod.svc", 5432)
    rules = Rules([Rule((DEMO,), ("db.prod.svc:*",), claims=(("sub", ("me",)),))])
    rules.check_name(ALICE, target, None, Shown({"sub": "me"}))
    with pytest.raises(TokenNeededError, match=r"rules\[0\] asks for other claims"):
        rules.check_name(ALICE, target, None, Shown({"sub": "you"}))
