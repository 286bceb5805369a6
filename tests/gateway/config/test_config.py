from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.config import GatewayConfig, load, parse
from gateway.config.limit_settings import Limits
from gateway.config.route_settings import MAX_ROUTES
from gateway.config.yaml_nodes import MAX_FILE_BYTES
from gateway.rules.routes import Route, RouteTable, TokenRule
from gateway.rules.templates import Template, TunnelUrl
from shared.address import Address
from shared.errors import EXIT_CONFIG, ConfigError, ConfigErrors

# The example of the documents and of the design, with everything that a file can hold.
EXAMPLE = """\
listen: ["0.0.0.0:15443", "0.0.0.0:15442"]
admin: "127.0.0.1:15000"
metrics: "0.0.0.0:15020"
health: "0.0.0.0:15021"
routes:                       # first match wins; no match: the connection is refused, no token is minted
  - host: "*.fortio.svc.cluster.local"     # glob on HOST of outbound_.PORT_.SUBSET_.HOST, or on the bare name
    tunnel: "https://{service}.a.run.app/_hbone/15003"    # {service} {namespace} {port} {subset} {host}
    connect: "127.0.0.1:24443"             # dial here, not the URL's host (private endpoint, tests)
    ca: "ca.pem"                           # trust for the outer TLS, default: the system's
    token: {audience: "https://{service}.a.run.app"}      # or {file: "token.jwt"}, or none
    method: POST                           # or CONNECT
  - host: "istiod.istio-system.svc"
    forward: "istiod.istio-system.svc:15012"   # raw TCP after the peek, no tunnel: the spliced path
"""


def test_the_example(folder: Path) -> None:
    file = folder / "hgate.yaml"
    file.write_text(EXAMPLE)
    assert load(file) == GatewayConfig(
        listen=(Address("0.0.0.0", 15443), Address("0.0.0.0", 15442)),
        admin=Address("127.0.0.1", 15000),
        metrics=Address("0.0.0.0", 15020),
        health=Address("0.0.0.0", 15021),
        routes=(
            Route(
                host="*.fortio.svc.cluster.local",
                tunnel=TunnelUrl.parse("https://{service}.a.run.app/_hbone/15003"),
                connect=Address("127.0.0.1", 24443),
                ca=folder / "ca.pem",
                token=TokenRule(audience=Template.parse("https://{service}.a.run.app")),
                method="POST",
                line=6,
            ),
            Route(
                host="istiod.istio-system.svc",
                forward=Address("istiod.istio-system.svc", 15012),
                line=12,
            ),
        ),
    )


def test_the_defaults_are_the_example_s(folder: Path) -> None:
    full = parse(EXAMPLE, str(folder / "hgate.yaml"))
    short = parse("routes: []", "hgate.yaml")
    assert short.routes == ()
    assert (short.listen, short.admin, short.metrics, short.health, short.limits) == (
        full.listen,
        full.admin,
        full.metrics,
        full.health,
        Limits(),
    )
    limits = Limits()
    assert (limits.hello_timeout_s, limits.connect_timeout_s) == (10.0, 10.0)
    assert (limits.response_timeout_s, limits.drain_delay_s, limits.drain_timeout_s) == (30.0, None, 20.0)
    assert (limits.max_connections, limits.streams_per_connection) == (10_000, 100)
    assert limits.half_closed_timeout_s == 3600.0


def test_listeners() -> None:
    config = parse(
        'listen: ["[::]:15443", localhost:0, localhost:0]\nadmin: off\nmetrics: "off"\n'
        "health: 127.0.0.1:0\nroutes: []",
        "f.yaml",
    )
    assert config.listen == (Address("::", 15443), Address("localhost", 0), Address("localhost", 0))
    assert (config.admin, config.metrics, config.health) == (None, None, Address("127.0.0.1", 0))


HOST_ONLY = "routes:\n- host: a\n"


def refusal(text: str, folder: Path) -> str:
    """What is said of the text of a file F in a folder D."""
    file = folder / "hgate.yaml"
    with pytest.raises(ConfigError) as caught:
        parse(text, str(file))
    return str(caught.value).replace(str(file), "F").replace(str(folder), "D")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # The file as a whole.
        ("", "F: is empty"),
        ("- a", "F:1: must be a mapping of fields, not a list"),
        ("listen: []\nroutes: []", "F:1: listen: needs at least one address"),
        ("admin: off", "F:1: routes: missing, write routes: [] to refuse every name"),
        ("routes:", "F:1: routes: must be a list, not nothing"),
        ("routes: {}", "F:1: routes: must be a list, not a mapping"),
        ("routes: []\n\nroutes: []", "F:3: routes: given twice, the first time in line 1"),
        # Listeners.
        ("routes: []\nlisten: 0.0.0.0:1", "F:2: listen: must be a list, not a text"),
        ("routes: []\nlisten: [" + "'a:0'," * 17 + "]", "F:2: listen: has 17 entries, more than 16"),
        ("routes: []\nadmin:", "F:2: admin: has no value"),
        ("routes: []\nmetrics: ::1:80", "F:2: metrics: an IPv6 address needs brackets: write [IPV6]:PORT"),
        ("routes: []\nhealth: a:65536", "F:2: health: port '65536' is not in 0..65535"),
        (
            "routes: []\nmetrics: 127.0.0.1:15000",
            "F:2: metrics: 127.0.0.1:15000 is the address of both admin and metrics",
        ),
        (
            "routes: []\nlisten: ['0.0.0.0:15021']",
            "F:2: listen: 0.0.0.0:15021 is the address of both listen and health",
        ),
        ("routes: []\nlimits: 5", "F:2: limits: must be a mapping of fields, not a number"),
        # Routes.
        ("routes:\n- a", "F:2: routes[0]: must be a mapping of fields, not a text"),
        ("routes:\n- tunnel: https://a/b", "F:2: routes[0].host: missing"),
        (
            f"{HOST_ONLY}  forward: b:1\n  token: none",
            "F:4: routes[0].token: has no meaning beside forward, only beside tunnel",
        ),
        (
            f"{HOST_ONLY}  forward: b:1\n  cold_start: 60s",
            "F:4: routes[0].cold_start: has no meaning beside forward, only beside tunnel",
        ),
        (
            f"{HOST_ONLY}  tunnel: https://a/b\n  cold_start: 11m",
            "F:4: routes[0].cold_start: must be 0 or between 1s and 600s, not 11m",
        ),
        (
            f"{HOST_ONLY}  method: POST\n  forward: b:1",
            "F:3: routes[0].method: has no meaning beside forward, only beside tunnel",
        ),
        (
            f"{HOST_ONLY}  forward: b:1\n  alpn: h2",
            "F:4: routes[0].alpn: must be istio or any, not 'h2'",
        ),
        (f"{HOST_ONLY}  forward: b:0", "F:3: routes[0].forward: port 0 cannot be dialled"),
        (
            "routes:\n" + "- {}\n" * (MAX_ROUTES + 1),
            "F:2: routes: has 1001 entries, more than 1000",
        ),
        (
            f"{HOST_ONLY}  tunnel: http://a/b\n  ca: ca.pem",
            "F:4: routes[0].ca: has no meaning for an http tunnel, which has no TLS",
        ),
    ],
)
def test_a_mistake_is_told_with_its_place(text: str, message: str, folder: Path) -> None:
    assert refusal(text, folder) == message


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (
            "outbound_.8080_._.a.b",
            "only HOST of outbound_.PORT_.SUBSET_.HOST is matched: leave the rest out",
        ),
        ("a:8080", "a host has only letters, digits, dots, hyphens, underscores and *"),
        ("8080", "must be a text, not a number: put it in quotes"),
    ],
)
def test_a_host_that_is_none(host: str, reason: str, folder: Path) -> None:
    text = f"routes:\n- host: {host}\n  forward: b:1"
    assert refusal(text, folder) == f"F:2: routes[0].host: {reason}"


BAD_PORT = "the port must be 1..65535 or {port}"
BAD_PATH = "the path has a character that needs %XX, or a % without two hex digits"
BAD_BRACE = "a brace has no partner: placeholders look like {service}"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("a.run.app/b", "must begin with https:// or http://"),
        ("https://{service}.a.run.app", "has no path: did you mean /_hbone/15003 at its end?"),
        ("https://a/b?c", "must have no query (?)"),
        ("https://a/b#c", "must have no fragment (#)"),
        ("https://u:secret@a/b", "must have no user information (@)"),
        ("https:///b", "the host name is empty"),
        ("https://a:0/b", BAD_PORT),
        ("https://a:/b", BAD_PORT),
        ("https://a:8{port}/b", BAD_PORT),
        ("https://[::1]8/b", BAD_PORT),
        ("https://[::1/b", "the bracket of the IPv6 address is not closed"),
        ("https://[{host}]/b", "'{host}' is no IPv6 address"),
        ("https://a b/c", "'a b' is no host name: 'a b' has a character out of place"),
        ("https://10.0.0.256/c", "'10.0.0.256' is no host name: it reads as an IPv4 address"),
        ("https://{servce}.a/b", "unknown placeholder {servce}, did you mean {service}?"),
        ("https://a/{}", "unknown placeholder {}, known are {service} {namespace} {port} {subset} {host}"),
        ("https://{service.a/b", BAD_BRACE),
        ("https://a/b}", BAD_BRACE),
        ("https://a/{{port}}", BAD_BRACE),
        ("https://a/b c", BAD_PATH),
        ("https://a/%{port}", BAD_PATH),
        ("https://a/b/../c", "the path must have no . or .. segments"),
    ],
)
def test_a_tunnel_url_that_is_none(url: str, reason: str, folder: Path) -> None:
    assert refusal(f"{HOST_ONLY}  tunnel: '{url}'", folder) == f"F:3: routes[0].tunnel: {reason}"


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("forward: b:1", "forward: cannot stand beside tunnel, take one of them"),
        ("alpn: any", "alpn: has a meaning only beside forward"),
        ("connect: b:0", "connect: port 0 cannot be dialled"),
        # What may be a token is not repeated.
        ("token: eyJhbGciOi", "token: must be none, {audience: TEMPLATE} or {file: PATH}"),
        ("token:", "token: has no value"),
        ("token: {}", "token: needs audience or file"),
        ("token: {aud: a}", "token.aud: unknown field, known here: audience, file, service_account"),
        ("token: {audience: ''}", "token.audience: must not be empty"),
        ("token: {audience: '{pot}'}", "token.audience: unknown placeholder {pot}, did you mean {port}?"),
        ("token: {file: }", "token.file: has no value"),
        (
            "token: {file: eyJhbGciOi.x.x}",
            "token.file: has to be a file's path; this looks like what should be in the file",
        ),
        # Certificates.
        ("ca: none.pem", "ca: D/none.pem: No such file or directory"),
        ("ca: folder.pem", "ca: D/folder.pem: it is a directory, not a regular file"),
        ("ca: pipe.pem", "ca: D/pipe.pem: it is a named pipe, not a regular file"),
        ("ca: empty.pem", "ca: D/empty.pem: empty"),
        ("ca: text.pem", "ca: D/text.pem: no certificate in PEM"),
        ("ca: cut.pem", "ca: D/cut.pem: a certificate that cannot be read"),
        (f"ca: {'a' * 300}", f"ca: D/{'a' * 300}: File name too long"),
    ],
)
def test_a_field_of_a_tunnel_that_is_wrong(field: str, message: str, folder: Path) -> None:
    text = f"{HOST_ONLY}  tunnel: https://a.run.app/_hbone/15003\n  {field}"
    assert refusal(text, folder) == f"F:4: routes[0].{message}"


def test_a_file_that_is_too_large(folder: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: it is a device"):
        load(Path("/dev/zero"))
    file = folder / "large.yaml"
    file.write_bytes(b"routes: []\n".ljust(MAX_FILE_BYTES, b"#"))
    assert load(file).routes == ()
    file.write_bytes(b"routes: []\n".ljust(MAX_FILE_BYTES + 1, b"#"))
    with pytest.raises(ConfigError, match="cannot be read: it is longer than 1048576 bytes"):
        load(file)


@given(st.text(max_size=200) | st.binary(max_size=200))
def test_any_content_is_taken_or_refused(content: str | bytes) -> None:
    check(content)


@given(st.data())
def test_a_damaged_file_is_taken_or_refused(data: st.DataObject) -> None:
    text = EXAMPLE
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(start + 8, len(text))))
        piece = data.draw(
            st.text(max_size=4) | st.sampled_from(list(":{}[]&*!|>'\"%#,\n\t -\0\x85") + PIECES)
        )
        text = text[:start] + piece + text[end:]
    check(text)


PIECES = [
    "{port}",
    "{",
    "..",
    "//",
    "off",
    "null",
    "~",
    "1e9",
    "\n  - ",
    ": ",
    "routes:",
    "- host: a\n",
    "🎈",
]


def check(content: str | bytes) -> None:
    """A configuration comes out, and a table that can be asked, or a ConfigError of one line."""
    try:
        config = parse(content, "none/hgate.yaml")
    except ConfigError as error:
        assert str(error).isprintable()
        assert len(str(error)) < 500
    else:
        RouteTable(config.routes).explain("outbound_.8080_._.hello.fortio.svc.cluster.local")


# All mistakes at once.

MANY = """\
listen: [a:1, a, a:1]
admin: on
trust_domain: Not.A.Domain
metrix: off
limits:
  hello_timeout: soon
  stream_window: 1
  retires: 3
  max_waiting: 0
routes:
- host: a..b
  tunnel: ftp://a/b
  token: {fil: a, audience: "{x}"}
  method: GET
  max_connections: many
- hots: b
  forward: b
  ca: ca.pem
- host: c
  tunel: https://c/d
  authority: c
  ca: none.pem
- host: d
- host: e
  forward: b:1
- host: E
  forward: b:1
hbone:
  listen: []
  rules:
  - {from: [], to: ["a"]}
  - {form: ["*"], to: ["a:0", "b:1", "c"], deny: maybe}
  - {from: ["ns/a/sa/b", "x"], to: ["*:*"], claims: {email: []}}
  min_tls: "1.1"
  jwt: {issuer: i, keys: "http://a/b", ca: none.pem}
reverse:
  certificates: c
  keepalive: 1ms
tokens:
  source: mine
  project_number: x
"""

ALL_OF_THEM = [
    "1: listen[1]: no port: write HOST:PORT",
    "1: listen[2]: a:1 stands in the list twice",
    "2: admin: no port: write HOST:PORT",
    "3: trust_domain: ",
    "4: metrix: unknown field, did you mean metrics?",
    "6: limits.hello_timeout: must be a duration such as 10s, 500ms or 5m, not 'soon'",
    "7: limits.stream_window: must be in 65535..2147483647 bytes, not 1",
    "8: limits.retires: unknown field, did you mean max_retries?",
    "9: limits.max_waiting: must be in 1..1000000, not 0",
    "11: routes[0].host: has an empty label: two dots in a row, or one at an end",
    "12: routes[0].tunnel: must begin with https:// or http://",
    "13: routes[0].token.fil: unknown field, did you mean file?",
    "13: routes[0].token.audience: unknown placeholder {x}, known are",
    "14: routes[0].method: must be POST or CONNECT, not 'GET'",
    "15: routes[0].max_connections: must be a whole number, not 'many'",
    "16: routes[1].hots: unknown field, did you mean host?",
    "17: routes[1].forward: no port: write HOST:PORT",
    "18: routes[1].ca: has no meaning beside forward, only beside tunnel",
    "20: routes[2].tunel: unknown field, did you mean tunnel?",
    "21: routes[2].authority: has a meaning only beside method: CONNECT, which it is the target of",
    "23: routes[3]: needs tunnel or forward or reverse",
    "26: routes[5]: is never reached: routes[4] has the same host",
    "29: hbone.certificates: missing",
    "29: hbone.listen: needs at least one address",
    "31: hbone.rules[0].from: needs at least one pattern",
    "31: hbone.rules[0].to[0]: must be HOST:PORT, with * for any",
    "32: hbone.rules[1].form: unknown field, did you mean from?",
    "32: hbone.rules[1].deny: must be true or false, not 'maybe'",
    "32: hbone.rules[1].to[0]: the port must be 1..65535 or *",
    "32: hbone.rules[1].to[2]: must be HOST:PORT, with * for any",
    "33: hbone.rules[2].from[1]: pattern 'x' does not start with spiffe:// or ns/",
    "33: hbone.rules[2].claims.email: needs at least one pattern",
    "34: hbone.min_tls: must be 1.3 or 1.2, not '1.1'",
    "35: hbone.jwt.audiences: missing",
    "35: hbone.jwt.keys: ",
    "35: hbone.jwt.ca: ",
    "37: reverse.rules: missing, write rules: [] to refuse every registration",
    "38: reverse.keepalive: must be between 0.05s and 3600s, not 1ms",
    "40: tokens.source: must be auto, metadata, google, gke or gcloud",
    "41: tokens.project_number: has to be a number",
]


def test_all_mistakes_are_told_at_once() -> None:
    """Each once, sorted by line, and nothing that only follows from another."""
    with pytest.raises(ConfigErrors) as caught:
        parse(MANY, "F")
    found = [str(error) for error in caught.value.all]
    assert all(text.startswith(f"F:{start}") for text, start in zip(found, ALL_OF_THEM, strict=False)), found
    assert len(found) == len(ALL_OF_THEM)
    assert str(caught.value) == f"{found[0]} (and {len(found) - 1} more mistakes)"
    assert caught.value.exit_code == EXIT_CONFIG


def test_one_mistake_is_an_error_of_its_own() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("routes: []\nadmin: on", "F")
    assert type(caught.value) is ConfigError
    assert caught.value.all == (caught.value,)


def test_warnings_are_sorted_and_change_nothing_else() -> None:
    text = "routes:\n- {host: '*', forward: b:1}\nhbone: {certificates: c, crl: none.pem, rules: []}\n"
    config = parse(text, "F")
    assert [warning.partition(": ")[0] for warning in config.warnings] == ["F:2", "F:3"]
    assert config == dataclasses.replace(config, warnings=())
    with pytest.raises(ConfigError) as caught:
        parse(text.replace("b:1", "b"), "F")
    assert str(caught.value) == "F:2: routes[0].forward: no port: write HOST:PORT"
