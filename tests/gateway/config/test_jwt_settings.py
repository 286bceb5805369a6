"""What `hbone.jwt` and a rule's `claims` can say in the gateway's file, and what is told of each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.config import parse
from gateway.config.hbone_settings import HboneSettings
from gateway.config.jwt_settings import MAX_AUDIENCES, MAX_CLAIMS, JwtSettings
from gateway.rules.hbone_rules import Rule
from shared.credentials.certificates.authority import Authority
from shared.errors import ConfigError
from tests.support.revocation import revocation_list

JWT = 'jwt: {issuer: "https://accounts.google.com", audiences: ["https://hgate.example", b], keys: KEYS}'
GOOGLE = "https://www.googleapis.com/oauth2/v3/certs"


def file(jwt: str, *rules: str) -> str:
    """A file with `jwt` in line 4 and rules from line 6 on."""
    return "".join(
        f"{line}\n"
        for line in (
            "routes: []",
            "hbone:",
            "  certificates: certs",
            f"  {jwt}",
            "  rules:",
            *(f"  - {{from: ['*'], to: ['*:*'], {rule}}}" for rule in rules or ["deny: true"]),
        )
    )


def read(jwt: str, *rules: str) -> HboneSettings:
    config = parse(file(jwt, *rules), "/etc/hgate/hgate.yaml")
    assert config.hbone is not None
    return config.hbone


@pytest.mark.parametrize(
    ("written", "keys"),
    [
        (GOOGLE, GOOGLE),
        ("http://127.0.0.1:8444/certs", "http://127.0.0.1:8444/certs"),
        ("keys.json", "/etc/hgate/keys.json"),
        ("/keys.json", "/keys.json"),
    ],
)
def test_whose_tokens_count(written: str, keys: str) -> None:
    found = read(JWT.replace("KEYS", f'"{written}"')).jwt
    assert found == JwtSettings("https://accounts.google.com", ("https://hgate.example", "b"), keys)


def test_who_is_trusted_with_the_keys(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_bytes(Authority.create("issuer.local").root_pem)
    found = read(JWT.replace("KEYS", f"{GOOGLE}, ca: {ca}")).jwt
    assert found is not None and found.ca == ca


def test_claims() -> None:
    settings = read(
        JWT.replace("KEYS", "k"),
        'claims: {email: ["*@example.com", me], "https://a.b/c": ["1"]}',
        "claims: {}",
        "deny: true",
        "claims: {sub: ['1']}, deny: true",
    )
    claims = (("email", ("*@example.com", "me")), ("https://a.b/c", ("1",)))
    assert settings.rules == (
        Rule(("*",), ("*:*",), claims=claims),
        Rule(("*",), ("*:*",), claims=()),
        Rule(("*",), ("*:*",), deny=True),
        Rule(("*",), ("*:*",), deny=True, claims=(("sub", ("1",)),)),
    )


MANY = ", ".join("'a'" for _ in range(MAX_AUDIENCES + 1))
MANY_CLAIMS = ", ".join(f"c{number}: [a]" for number in range(MAX_CLAIMS + 1))


def refusal(text: str) -> str:
    """What is said of the text of a file F."""
    with pytest.raises(ConfigError) as caught:
        parse(text, "F")
    return str(caught.value)


def test_it_has_to_have_fields() -> None:
    assert refusal(file("jwt:")) == "F:4: hbone.jwt: must be a mapping of fields, not nothing"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("audiences: [a], keys: k", "issuer: missing"),
        ("issuer: i, keys: k", "audiences: missing"),
        ("issuer: i, audiences: [a]", "keys: missing"),
        ("issuer: i, audience: [a], keys: k", "audience: unknown field, did you mean audiences?"),
        ("issuer: '', audiences: [a], keys: k", "issuer: must not be empty"),
        (
            "issuer: i, audiences: [], keys: k",
            "audiences: needs at least one audience: who we are to the issuer",
        ),
        (f"issuer: i, audiences: [{MANY}], keys: k", "audiences: has 101 entries, more than 100"),
    ],
)
def test_a_field_that_is_wrong(fields: str, message: str) -> None:
    assert refusal(file(f"jwt: {{{fields}}}")) == f"F:4: hbone.jwt.{message}"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("'http://a/k'", "keys: keys are fetched with https only"),
        ("'file:///k'", "keys: URL with scheme 'file' instead of http or https"),
        ("k, ca: ca.pem", "ca: has a meaning only for keys that are fetched with https"),
        (f"'{GOOGLE}', ca: /nonexistent", "ca: /nonexistent: No such file or directory"),
        (f"'{GOOGLE}', ca: {__file__}", f"ca: {__file__}: no certificate in PEM"),
    ],
)
def test_keys_that_are_none(keys: str, message: str) -> None:
    assert refusal(file(f"jwt: {{issuer: i, audiences: [a], keys: {keys}}}")) == f"F:4: hbone.jwt.{message}"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("claims: {}, deny: true", "claims: denies with any token and without one: leave it out"),
        ("claims: [email]", "claims: must be a mapping of fields, not a list"),
        ("claims: {email: me}", "claims.email: must be a list, not a text"),
        ("claims: {email: []}", "claims.email: needs at least one pattern"),
        (
            "claims: {email_verified: [true]}",
            "claims.email_verified[0]: must be a text, not a boolean: put it in quotes",
        ),
        ("claims: {email: ['*********']}", "claims.email[0]: has 9 stars, more than 8"),
        ("claims: {a: [b], a: [c]}", "claims.a: given twice, the first time in line 6"),
        (f"claims: {{{MANY_CLAIMS}}}", "claims: has 33 entries, more than 32"),
    ],
)
def test_claims_that_are_none(rule: str, message: str) -> None:
    assert refusal(file(JWT, rule)) == f"F:6: hbone.rules[0].{message}"


def test_claims_of_nobody_s_tokens() -> None:
    message = "F:6: hbone.rules[0].claims: needs jwt beside rules: whose tokens count"
    assert refusal(file("idle_timeout: 1h", "claims: {}")) == message


def test_a_revocation_list_is_no_trusted_certificate(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(revocation_list(Authority.create("a.example")))
    jwt = f"jwt: {{issuer: i, audiences: [a], keys: '{GOOGLE}', ca: ca.pem}}"
    with pytest.raises(ConfigError, match=r"hbone\.jwt\.ca: .*ca\.pem: no certificate in PEM"):
        parse(file(jwt), str(tmp_path / "hgate.yaml"))


def test_workloads_that_register_show_no_tokens() -> None:
    text = file(JWT) + "reverse:\n  certificates: c\n  rules: [{from: ['*'], names: [a], claims: {}}]\n"
    with pytest.raises(ConfigError, match=r"reverse\.rules\[0\]\.claims: unknown field"):
        parse(text, "F")
