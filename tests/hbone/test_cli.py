"""What `hbone` makes of its arguments, in this process; what tunnels do is in test_proxy_command.py."""

from __future__ import annotations

import re

import pytest

from hbone import cli
from shared import version
from shared.config.fields import table_of
from shared.credentials.token_sources.token_settings import TokenSettings
from shared.errors import EXIT_DENIED, EXIT_OK, EXIT_USAGE
from tests.support.metadata_server import closed_port


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["demo", "--help"], ["cloudrun", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments, {}) == EXIT_OK
    out, err = capsys.readouterr()
    assert out.startswith("usage: hbone")
    assert err == ""


def test_help_names_commands_variables_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["--help"], {})
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r" 0 success.* 64 .* 69 .* 77 .* 128\+N ended by signal N \(130: interrupted\)", out)
    for command in ("connect", "token", "certs", "demo", "cloudrun", "version"):
        assert f" {command} " in out
    for setting in table_of(TokenSettings).values():
        assert f" {setting.variable} " in out
    assert "ProxyCommand='hbone https://" in out


@pytest.mark.parametrize(
    "arguments", [["--version"], ["version"], ["--no-token", "--version"], ["h:22", "--version"]]
)
def test_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments, {}) == EXIT_OK
    out, err = capsys.readouterr()
    assert (out, err) == (version.describe("hbone") + "\n", "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "hbone: no URL and no command; see hbone --help"),
        (["connect"], "hbone: the following arguments are required: URL; see hbone connect --help"),
        (["www.h.example:22", "more"], "unrecognized arguments: more"),
        (["shh", "hello.demo"], "hbone: 'shh' is no command; see hbone --help"),
        (["--unknown", "www.h.example:22"], "unrecognized arguments: --unknown"),
        (
            ["--no-token", "--token-file", "f", "x.h.example:22"],
            "--no-token is not allowed with --token-file",
        ),
        (["--no-token", "--audience", "a", "www.h.example:22"], "--no-token is not allowed with"),
        (["--keepalive", "-1", "www.h.example:22"], "'-1' is no number in 0..86400"),
        (["--keepalive", "nan", "www.h.example:22"], "'nan' is no number in 0..86400"),
        (["--keepalive", "soon", "www.h.example:22"], "'soon' is no number in 0..86400"),
        (["--token-file", "f", "http://h.example/x"], "leads to another machine without TLS"),
        (["--audience", "a", "--connect", "h.example:80", "http://127.0.0.1/x"], "by way of h.example:80"),
        (
            ["www.h.example"],
            "hbone: www.h.example: write HOST:PORT or a URL such as https://HOST/_hbone/22",
        ),
        (["ftp://h.example/x"], "hbone: ftp://h.example/x: the scheme must be https or http, not ftp"),
        (["tokne"], "hbone: tokne: no command, and no port of a service: write tokne:22 for ssh"),
        (["--connect", "here", "www.h.example:22"], "hbone: --connect here: no port: write HOST:PORT"),
        (["demo", "--inbound", "none"], "invalid choice: 'none'"),
        (["certs", "a", "b"], "unrecognized arguments: b"),
        (["cloudrun", "--listen"], "expected one argument"),
        (["cloudrun", "--timeout", "soon"], "argument --timeout: soon is no number"),
        (["cloudrun", "--timeout", "0"], "argument --timeout: 0 is not above 0 and up to 3600"),
        (["cloudrun", "--timeout", "nan"], "argument --timeout: nan is not above 0 and up to 3600"),
        (["cloudrun", "--max-streams", "-1"], "argument --max-streams: -1 is not above 0"),
        (["cloudrun", "--max-header-bytes", "1.5"], "argument --max-header-bytes: 1.5 is no number"),
        (["doctor", "--sni", "n", "h:22"], "--sni, --cert, --key and --peer are for --gateway"),
        (["doctor", "--gateway", "h:1"], "--gateway needs --sni"),
        (["doctor", "--gateway", "h:1", "--sni", "n", "h:22"], "URL is not allowed with --gateway"),
        (["doctor", "--gateway", "h", "--sni", "n"], "--gateway h: no port"),
        (["doctor", "--gateway", "h:1", "--sni", "n", "--key", "k"], "--key needs --cert"),
        (["doctor", "--gateway", "h:1", "--sni", "n", "--peer", "spiffe://"], "--peer spiffe://: "),
        (["doctor", "--timeout", "0"], "argument --timeout: 0 is not above 0"),
        (["doctor", "--probe-for", "4000"], "argument --probe-for: 4000 is not above 0 and up to 3660"),
        (["cloudrun", "--log-format", "xml"], "invalid choice: 'xml'"),
        (["cloudrun", "--listen", "here"], "hbone: --listen here: no port"),
        (["cloudrun", "--container", "127.0.0.1:99999"], "hbone: --container 127.0.0.1:99999: port '99999'"),
        (["cloudrun", "--metadata", "::1:80"], "hbone: --metadata ::1:80: an IPv6 address needs brackets"),
        (
            ["cloudrun", "--keys", "http://a.example/"],
            "--keys http://a.example/: keys are fetched with",
        ),
        (["cloudrun", "--audience", "hello"], "hbone: --audience hello: "),
        (["cloudrun", "--audience", "http://h.example"], "write the service's URL, https://HOST"),
        (["cloudrun", "--audience", "https://"], "write the service's URL, https://HOST"),
        (["cloudrun", "--audience", "https://b\u00fccher.example"], "write the service's URL, https://HOST"),
        (["token"], "--audience is missing"),
        (["token", "--show"], "--audience is missing"),
        (["token", "--audience", ""], "--audience must not be empty"),
        (["token", "--audience", "a", "--source", "no"], "argument --source: invalid choice: 'no'"),
        (["token", "--token-file", "f", "--source", "gke"], "--source is not allowed with --token-file"),
    ],
)
def test_usage_errors(arguments: list[str], text: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments, {}) == EXIT_USAGE
    out, err = capfd.readouterr()
    assert out == "", "it may be ssh's"
    assert text in err


def test_the_metadata_host_is_the_environment_s(capfd: pytest.CaptureFixture[str]) -> None:
    port = closed_port()
    assert cli.run(["www.h.example:22"], {"GCE_METADATA_HOST": f"127.0.0.1:{port}"}) == EXIT_DENIED
    assert f"127.0.0.1:{port}" in capfd.readouterr().err
    assert cli.run(["www.h.example:22"], {"GCE_METADATA_HOST": "no host"}) == EXIT_USAGE
    assert "invalid GCE_METADATA_HOST=no host (" in capfd.readouterr().err
