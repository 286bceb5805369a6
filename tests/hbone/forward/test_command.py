"""What the command line of `hbone forward` refuses before anything is asked. The rest is in tests/path."""

from __future__ import annotations

from pathlib import Path

import pytest

from hbone import arguments
from hbone.forward.cli import Plan
from shared.errors import UsageError

URL = "https://hello.a.run.app"
CERT = ["--cert", "c", "--key", "k"]


def plan(*words: str) -> Plan:
    return Plan(arguments.command_parser("forward").parse_args(words))


def test_what_is_asked_for() -> None:
    wanted = plan(URL, "-L", "1:DB", "-L", "2:22", "-R", "3:4", "-D", "5")
    assert (len(wanted.local), len(wanted.remote), len(wanted.socks)) == (2, 1, 1)
    assert plan("127.0.0.1:15442", "--sni", "a", *CERT, "-L", "1").through_gateway


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([URL], "nothing to forward: write -L, -R or -D"),
        ([URL, "-L", "x"], "-L x: "),
        ([URL, "-R", "3:4", "-R", "3:5"], "-R: a port in the container can be listened on once"),
        ([URL, "-L", "1:DB", *CERT], "--cert, --key and --peer need --sni"),
        ([URL, "-D", "1", "--sni", "a", *CERT], "--sni: only -L goes through a gateway"),
        ([URL, "-L", "1", "--sni", "a", "--token-file", "f"], "--sni: no token is sent to a gateway"),
        (
            [URL, "-L", "1:DB", "--sni", "a", *CERT],
            "with --sni the name chooses the target",
        ),
        ([URL, "-L", "1:DB", "-q", "-v"], "not allowed with"),
    ],
)
def test_what_is_refused(words: list[str], reason: str) -> None:
    with pytest.raises(UsageError) as raised:
        plan(*words)
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--sni", "a"], "--sni needs --cert and --key"),
        (["--sni", "a b", *CERT], "no name that TLS can send"),
        (["--sni", "a", *CERT, "--peer", "demo"], "--peer demo: "),
        (["--sni", "a", *CERT], "no root certificates in "),
        (["--sni", "a", *CERT, "--ca", "ca.pem"], "--cert c: No such file or directory"),
    ],
)
def test_files_and_names_of_a_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], reason: str
) -> None:
    from hbone.forward.sni_gateway import SniGateway
    from shared.address import Address
    from shared.errors import HboneError

    monkeypatch.chdir(tmp_path)
    told = plan("127.0.0.1:15442", "-L", "1", *words).options
    with pytest.raises(HboneError) as raised:
        SniGateway.of(Address("127.0.0.1", 1), told.sni, told.cert, told.key, told.ca, told.peer or ())
    assert reason in str(raised.value)
