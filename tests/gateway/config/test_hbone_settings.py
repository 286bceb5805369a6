"""What `hbone:` and a route's `identity` can say in the gateway's file, and what is told of each mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.config.config import GatewayConfig, parse
from gateway.config.hbone_settings import HboneSettings
from gateway.config.reload import keep_fixed
from gateway.config.rule_settings import MAX_PATTERNS, MAX_RULES
from gateway.rules.hbone_rules import Rule, Rules
from gateway.rules.routes import Route, TokenRule
from gateway.rules.templates import Template
from shared.address import Address
from shared.errors import ConfigError
from shared.net.tls.mesh_tls import MeshIdentity
from shared.trust.peer_patterns import TrustDomain

# The documents', with everything that can be set.
EXAMPLE = """\
routes: []
hbone:                        # members of the mesh that speak HBONE: CONNECT over mTLS HTTP/2
  listen: ["0.0.0.0:15008"]
  certificates: "/var/run/secrets/workload-spiffe-credentials"
  min_tls: "1.3"
  handshake_timeout: 10s
  max_connections: 1000
  max_tunnels: 10000
  rules:                      # the first that takes a tunnel decides; no match: refused
    - from: ["spiffe://cluster.local/ns/demo/sa/*"]
      to: ["*.prod.svc.cluster.local:*"]
      deny: true
    - from: ["spiffe://cluster.local/ns/demo/**", "spiffe://cluster.local/ns/test/sa/client"]
      to: ["*.svc.cluster.local:8080", "10.0.0.0/8:443"]
"""

RULES = "rules: [{from: ['*'], to: ['*:*']}]"
LEAST = f"routes: []\nhbone:\n  certificates: certs\n  {RULES}\n"


def read(text: str) -> HboneSettings:
    config = parse(text, "/etc/hgate/hgate.yaml")
    assert config.hbone is not None
    return config.hbone


def test_the_example() -> None:
    demo, test = "spiffe://cluster.local/ns/demo", "spiffe://cluster.local/ns/test/sa/client"
    assert read(EXAMPLE) == HboneSettings(
        Path("/var/run/secrets/workload-spiffe-credentials"),
        (
            Rule((f"{demo}/sa/*",), ("*.prod.svc.cluster.local:*",), deny=True),
            Rule((f"{demo}/**", test), ("*.svc.cluster.local:8080", "10.0.0.0/8:443")),
        ),
    )


def test_the_documents_rules_leave_no_way_around() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text()
    (block,) = [text for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "deny: true" in text]
    config = parse(block, "/etc/hgate/hgate.yaml")
    assert config.hbone is not None
    assert any(rule.deny for rule in config.hbone.rules)
    assert [rule.line for rule in config.hbone.rules] != [None, None]
    assert [text for text in config.warnings if "denies names" in text] == []


def test_what_is_left_out() -> None:
    assert read(LEAST) == HboneSettings(
        Path("/etc/hgate/certs"),
        (Rule(("*",), ("*:*",)),),
        listen=(Address("0.0.0.0", 15008),),
        tls12=False,
        handshake_timeout_s=10.0,
        max_connections=1000,
        max_tunnels=10_000,
    )
    assert GatewayConfig(routes=()).hbone is None
    assert parse("routes: []", "f.yaml").hbone is None


@pytest.mark.parametrize("version", ["1.2", "'1.2'"])
def test_what_is_set(version: str) -> None:
    settings = read(
        LEAST + f"  listen: ['127.0.0.1:0', '[::1]:15008']\n  min_tls: {version}\n"
        "  handshake_timeout: 500ms\n  max_connections: 7\n  max_tunnels: 8\n"
    )
    assert settings.listen == (Address("127.0.0.1", 0), Address("::1", 15008))
    assert (settings.tls12, settings.handshake_timeout_s) == (True, 0.5)
    assert (settings.max_connections, settings.max_tunnels) == (7, 8)


def test_no_rules_refuse_everything() -> None:
    assert read("routes: []\nhbone: {certificates: certs, rules: []}").rules == ()


def hbone(*fields: str) -> str:
    """A file with these fields of `hbone`, from line 3 on."""
    return "".join(["routes: []\nhbone:\n", *(f"  {field}\n" for field in fields)])


MANY_PATTERNS = ", ".join(["'*'"] * (MAX_PATTERNS + 1))


def refusals(text: str) -> list[str]:
    """What is said of the text of a file F."""
    with pytest.raises(ConfigError) as caught:
        parse(text, "F")
    return [str(error) for error in caught.value.all]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("routes: []\nhbone:\n", "2: hbone: must be a mapping of fields, not nothing"),
        (hbone("rules: []"), "3: hbone.certificates: missing"),
        (hbone("certificates: c"), "3: hbone.rules: missing, write rules: [] to refuse every tunnel"),
        (
            hbone("certificates: c", RULES) + "admin: '0.0.0.0:15008'",
            "3: hbone: 0.0.0.0:15008 is the address of both admin and hbone",
        ),
        (
            hbone("certificates: c", f"rules: [{', '.join(['a'] * (MAX_RULES + 1))}]"),
            f"4: hbone.rules: has {MAX_RULES + 1} entries, more than {MAX_RULES}",
        ),
    ],
)
def test_a_mistake_is_told_with_its_place(text: str, message: str) -> None:
    assert refusals(text) == [f"F:{message}"]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("certificate: d", "certificate: unknown field, did you mean certificates?"),
        ("listen: []", "listen: needs at least one address"),
        ("listen: ['a:1', 'a:1']", "listen[1]: a:1 stands in the list twice"),
        ("min_tls: 1.1", "min_tls: must be 1.3 or 1.2, not '1.1'"),
        ("handshake_timeout: 0", "handshake_timeout: must be between 0.001s and 60s, not 0"),
        ("max_connections: 0", "max_connections: must be in 1..100000, not 0"),
        ("max_tunnels: 0", "max_tunnels: must be in 1..1000000, not 0"),
    ],
)
def test_a_field_that_is_wrong(field: str, message: str) -> None:
    assert refusals(hbone("certificates: c", RULES, field)) == [f"F:5: hbone.{message}"]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{to: ['*:*']}", "from: missing"),
        ("{from: ['*']}", "to: missing"),
        ("{from: [], to: ['*:*']}", "from: needs at least one pattern"),
        ("{from: ['*'], to: []}", "to: needs at least one pattern"),
        ("{from: '*', to: ['*:*']}", "from: must be a list, not a text"),
        (
            "{from: [demo], to: ['*:*']}",
            "from[0]: pattern 'demo' does not start with spiffe:// or ns/",
        ),
        (
            "{from: ['*', 'spiffe://*/ns/a'], to: ['*:*']}",
            "from[1]: pattern 'spiffe://*/ns/a': the trust domain has to be written out, without *",
        ),
        ("{from: ['*'], to: [a]}", "to[0]: must be HOST:PORT, with * for any"),
        (
            "{from: ['*'], to: ['10.0.0.1/8:*']}",
            "to[0]: 10.0.0.1/8 is no CIDR: it has bits set behind its prefix",
        ),
        ("{from: ['*'], to: ['*:*'], deny: maybe}", "deny: must be true or false, not 'maybe'"),
        (
            "{from: ['*'], to: ['*:*'], allow: true}",
            "allow: unknown field, known here: from, to, deny, claims",
        ),
        (
            f"{{from: [{MANY_PATTERNS}], to: ['*:*']}}",
            f"from: has {MAX_PATTERNS + 1} entries, more than {MAX_PATTERNS}",
        ),
    ],
)
def test_a_rule_that_is_none(rule: str, message: str) -> None:
    text = hbone("certificates: certs", "rules:", f"- {rule}")
    assert refusals(text) == [f"F:5: hbone.rules[0].{message}"]


def test_a_reload_changes_rules_and_limits_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    running = parse(LEAST, "f.yaml")
    assert running.hbone is not None
    rules = parse(LEAST.replace("*:*", "a:80"), "f.yaml")
    assert rules.hbone is not None
    assert keep_fixed(running, rules) == rules
    assert caplog.messages == []
    limits = parse(LEAST + "  max_tunnels: 7\n  idle_timeout: 5s\n  max_tunnels_per_identity: 3\n", "f.yaml")
    assert keep_fixed(running, limits) == limits
    assert caplog.messages == []
    jwt = "  jwt: {issuer: i, audiences: [a], keys: k.json}\n"
    claims = parse(LEAST.replace("['*:*']", "['*:*'], claims: {}") + jwt, "f.yaml")
    assert keep_fixed(running, claims) == claims
    assert caplog.messages == []
    more = parse(LEAST.replace("*:*", "a:80") + "  min_tls: '1.2'\n", "f.yaml")
    assert keep_fixed(running, more).hbone == rules.hbone
    none = parse("routes: []", "f.yaml")
    assert keep_fixed(running, none).hbone == running.hbone
    assert keep_fixed(none, running).hbone is None
    assert caplog.messages == [
        f"reload: a change of {changed} takes effect at the next start"
        for changed in ("hbone.min_tls", "hbone", "hbone")
    ]


# A route that is a member of the mesh itself.


def route(*fields: str, url: str = "https://ztunnel:15008") -> str:
    """A file with one CONNECT route, its further fields from line 5 on."""
    return "".join(
        [f"routes:\n- host: '*'\n  tunnel: {url}\n  method: CONNECT\n", *(f"  {field}\n" for field in fields)]
    )


def one(text: str) -> Route:
    (found,) = parse(text, "/etc/hgate/hgate.yaml").routes
    return found


def test_an_identity() -> None:
    peers = ("spiffe://cluster.local/ns/*/sa/hello", "spiffe://cluster.local/ns/istio-system/sa/ztunnel")
    found = one(route("identity: certs", f"peer: {list(peers)}"))
    assert found.identity == MeshIdentity(Path("/etc/hgate/certs"), peers, "")
    assert found.authority == Template.parse("{host}:{port}")
    assert found.token == TokenRule(), "certificates instead"
    assert found.ca is None


def test_a_name_to_send_and_a_target_to_ask_for() -> None:
    fields = ("identity: /certs", "peer: ['spiffe://a/b']", "sni: East-West.Example", "authority: a:80")
    found = one(route(*fields))
    assert found.identity == MeshIdentity(Path("/certs"), ("spiffe://a/b",), "east-west.example")
    assert found.authority == Template.parse("a:80")
    found = one(route("identity: /certs", "peer: ['spiffe://a/b']", "sni: none"))
    assert found.identity is not None and found.identity.server_name == ""


def test_connect_without_an_identity() -> None:
    assert one(route(url="http://ztunnel:15009/")).identity is None
    assert one(route()).token == TokenRule(audience=Template.parse("https://ztunnel"))


def test_post_with_an_identity() -> None:
    text = "routes:\n- {host: '*', tunnel: 'https://a/b', identity: c, peer: ['spiffe://a/b']}"
    assert one(text).identity == MeshIdentity(Path("/etc/hgate/c"), ("spiffe://a/b",))


PEER = ("identity: c", "peer: ['spiffe://a/b']")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (route("identity: c"), "5: identity: needs peer beside it: who the server has to be"),
        (route("peer: ['spiffe://a/b']"), "5: peer: has a meaning only beside identity, or inner: none"),
        (route("sni: none"), "5: sni: has a meaning only beside identity, or inner: none"),
        (route("crl: crl.pem"), "5: crl: has a meaning only beside identity, or inner: none"),
        (route("identity: c", "peer: []"), "6: peer: needs at least one pattern"),
        (
            route("identity: c", "peer: ['*']"),
            "6: peer[0]: pattern '*' does not start with spiffe:// or ns/",
        ),
        (
            route(*PEER, "sni: '10.0.0.1'"),
            "7: sni: '10.0.0.1' is no host name: it reads as an IPv4 address",
        ),
        (route(*PEER, "ca: ca.pem"), "7: ca: cannot stand beside identity, whose folder has the roots"),
        (
            route(*PEER, url="http://a:1"),
            "5: identity: has no meaning for an http tunnel, which has no TLS",
        ),
        (
            route(url="https://a/_hbone/15003"),
            "3: tunnel: has a path, which CONNECT does not carry: the target is authority",
        ),
        (route("authority: a"), "5: authority: has no port: write HOST:PORT"),
        (route("authority: 'a:0'"), "5: authority: the port must be 1..65535 or {port}"),
        (
            route("authority: '{hots}:{port}'"),
            "5: authority: unknown placeholder {hots}, did you mean {host}?",
        ),
        (
            route("authority: a:1").replace("CONNECT", "POST").replace(":15008", "/b"),
            "5: authority: has a meaning only beside method: CONNECT, which it is the target of",
        ),
        (
            "routes:\n- host: a\n  forward: b:1\n  identity: c",
            "4: identity: has no meaning beside forward, only beside tunnel",
        ),
    ],
)
def test_a_route_s_mistake_is_told_with_its_place(text: str, message: str) -> None:
    line, _, rest = message.partition(": ")
    assert refusals(text)[0] == f"F:{line}: routes[0].{rest}"


# Whose peers they are.


MESH = """trust_domain: new.local
trust_domain_aliases: [old.local]
routes:
- {host: a, tunnel: "https://a", method: CONNECT, identity: c, peer: [ns/a/sa/b], crl: lists/crl.pem}
hbone:
  certificates: certs
  crl: crl.pem
  rules:
  - {from: [{namespace: "demo-*"}, {service_account: hello}, "ns/x/sa/*", "*"], to: ["*:*"]}
reverse:
  certificates: certs
  crl: /etc/crl.pem
  listen: ["0.0.0.0:15441"]
  rules:
  - {from: [{namespace: demo, service_account: "h*o"}], names: ["*.demo"]}
"""


def test_peers_of_our_own_trust_domain() -> None:
    found = parse(MESH, "/etc/hgate/hgate.yaml")
    trust = TrustDomain("new.local", ("old.local",))
    assert (found.trust_domain, found.trust_domain_aliases) == ("new.local", ("old.local",))
    assert found.hbone is not None and found.reverse is not None
    assert found.hbone.trust == found.reverse.trust == trust
    assert (found.hbone.crl, found.reverse.crl) == (Path("/etc/hgate/crl.pem"), Path("/etc/crl.pem"))
    assert found.hbone.rules[0].identities == ("ns/demo-*/sa/*", "ns/*/sa/hello", "ns/x/sa/*", "*")
    assert found.reverse.rules[0].identities == ("ns/demo/sa/h*o",)
    identity = found.routes[0].identity
    assert identity is not None
    assert (identity.peers, identity.trust) == (("ns/a/sa/b",), trust)
    assert identity.crl == Path("/etc/hgate/lists/crl.pem")
    Rules(found.hbone.rules, trust)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("trust_domain: new.local\n", "", "1: trust_domain_aliases: needs trust_domain beside it"),
        ("new.local", "New", "1: trust_domain: no SPIFFE ID: 'spiffe://New'"),
        ("[old.local]", "[a/b]", "2: trust_domain_aliases[0]: no SPIFFE ID"),
        ('"demo-*"', '"a/b"', "9: hbone.rules[0].from[0].namespace: 'a/b' is no single segment"),
        ('{namespace: "demo-*"}', "{name: x}", "9: hbone.rules[0].from[0].name: unknown field"),
    ],
)
def test_a_mistake_about_peers(old: str, new: str, message: str) -> None:
    assert old in MESH
    assert refusals(MESH.replace(old, new, 1))[0].startswith(f"F:{message}")


def test_our_own_trust_domain_has_to_be_told() -> None:
    text = "routes: []\nhbone:\n  certificates: c\n  rules:\n  - {from: [ns/a/sa/b], to: ['*:*']}\n"
    assert "our own trust domain, which is not told" in refusals(text)[0]


def test_a_reload_takes_up_aliases(caplog: pytest.LogCaptureFixture) -> None:
    running = parse(MESH, "F")
    wanted = parse(MESH.replace("[old.local]", "[old.local, older.local]"), "F")
    kept = keep_fixed(running, wanted)
    assert kept == wanted and not caplog.text
    keep_fixed(running, parse(MESH.replace("crl: crl.pem", "crl: other.pem"), "F"))
    assert "a change of hbone.crl takes effect at the next start" in caplog.text
