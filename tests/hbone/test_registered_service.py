"""What a command line of `hbone register` asks for, and what --print prints."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.registration import mesh_service
from gateway.config.config import parse
from hbone import registered_service
from hbone.arguments import command_parser
from hbone.cli import run
from hbone.registered_service import RegisteredService
from shared.address import Address
from shared.cluster.mesh_objects import manifests
from shared.errors import EXIT_OK, EXIT_USAGE, UsageError

HELLO = "https://hello-123456789012.us-central1.run.app"


def read(*arguments: str) -> RegisteredService:
    return registered_service.read(command_parser("register").parse_args(arguments), "demo")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        (HELLO, "hello"),
        ("https://fortio-cr-icq63pqnqq-uc.a.run.app", "fortio-cr"),
        ("https://canary---fortio-cr-icq63pqnqq-uc.a.run.app", "fortio-cr"),
        ("https://v2---hello-123456789012.us-central1.run.app/", "hello"),
        ("https://API.example.com", "api"),
        ("https://two-words.example.com", "two-words"),
    ],
)
def test_the_name_is_in_the_url(url: str, name: str) -> None:
    assert read(url).name == name
    assert read(url, "--name", "other").name == "other"


def test_ports() -> None:
    def ports(*texts: str) -> list[tuple[str, int]]:
        arguments = [word for text in texts for word in ("--port", text)]
        return [(one.name, one.number) for one in read(HELLO, *arguments).ports]

    assert ports() == [("http", 80)]
    assert ports("8080") == [("http", 8080)]
    assert ports("80", "8080") == [("http-80", 80), ("http-8080", 8080)]
    assert ports("grpc:8083", "tcp-db:5432") == [("grpc", 8083), ("tcp-db", 5432)]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "URL is missing"),
        (("http://h.example",), "URL http://h.example has to be https://HOST"),
        ((f"{HELLO}/_hbone/15003",), "and no path"),
        (("https://9lives.example",), "--name is missing: '9lives'"),
        ((HELLO, "--name", "Hello"), "--name Hello is no name of a Service"),
        ((HELLO, "--port", "http:"), "no PORT or NAME:PORT"),
        ((HELLO, "--port", "Http:80"), "no PORT or NAME:PORT"),
        ((HELLO, "--port", "65536"), "1 to 65535"),
        ((HELLO, "--port", "a:80", "--port", "b:80"), "two ports have the same"),
        ((HELLO, "--port", "a:80", "--port", "a:81"), "two ports have the same"),
        ((HELLO, "--method", "GET"), "--method GET has to be POST or CONNECT"),
        ((HELLO, "--cold-start", "2h"), "--cold-start 2h has to be a duration such as 60s or 1m"),
        ((HELLO, "--egress", "all"), "--egress all has to be hosts of a Sidecar's egress"),
    ],
)
def test_a_wrong_command_line(arguments: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        read(*arguments)


def test_gateways() -> None:
    assert registered_service.gateways(["10.0.0.5", "10.0.0.5:15443", "[fd00::1]:15443", "fd00::1"]) == [
        Address("10.0.0.5", 15442),
        Address("10.0.0.5", 15443),
        Address("fd00::1", 15443),
        Address("fd00::1", 15442),
    ]
    for text in ("hgate.hbone-system", "hgate:15443", "10.0.0.5:x", ""):
        with pytest.raises(UsageError, match="no IP address"):
            registered_service.gateways([text])


@given(st.text())
def test_any_text_for_a_port_or_a_gateway_has_a_verdict(text: str) -> None:
    for reads in (
        lambda: registered_service.gateways([text]),
        lambda: read(HELLO, f"--port={text}"),
        lambda: read(HELLO, f"--name={text}"),
    ):
        with contextlib.suppress(UsageError):
            reads()


PRINT = ("register", "--print", HELLO, "-n", "demo", "--gateway", "10.0.0.5")


def printed(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[str, list[dict[str, Any]]]:
    assert run([*PRINT, *more], {}) == EXIT_OK
    text = capsys.readouterr().out
    return text, list(yaml.safe_load_all(text))


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--port", "grpc:8083", "--workload", "worker", "--workload-account", "account", "--egress", "none"),
        ("--ambient-network", "cloud", "--domain", "example.org"),
    ],
)
def test_what_is_printed_is_what_hgate_would_register(
    capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    """But for the owner."""
    _, (service, *others) = printed(capsys, *more)
    domain = "example.org" if "--domain" in more else "cluster.local"
    told = mesh_service(service, [Address("10.0.0.5", 15442)], domain)
    assert others == manifests(told)


def test_the_route_that_is_printed_is_one_of_hgate_s_file(capsys: pytest.CaptureFixture[str]) -> None:
    account = "gw@p.iam.gserviceaccount.com"
    text, _ = printed(
        capsys, "--service-account", account, "--method", "CONNECT", "--audience", "https://a.b"
    )
    lines = [line[4:] for line in text.splitlines() if line.startswith("#   ")]
    (route,) = parse("routes:\n" + "\n".join(lines) + "\n", "hgate.yaml").routes
    assert (route.method, route.token.service_account) == ("CONNECT", account)
    assert route.cold_start_s == 0.0
    text, (service, *_) = printed(capsys, "--cold-start", "90s")
    assert service["metadata"]["annotations"]["hbone.dev/cold-start"] == "90s"
    assert "#     cold_start: 90s\n" in text


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (PRINT[:-2], "--print needs --gateway"),
        (("register", "--print", HELLO, "--gateway", "10.0.0.5"), "--print needs --namespace"),
        ((*PRINT[:4], "De_mo", *PRINT[5:]), "--namespace De_mo is no name of a namespace"),
        ((*PRINT, "--remove"), "not allowed with argument --print"),
        (("register", HELLO, "--domain", "x"), "--domain has a meaning with --print only"),
        (("register", "--remove"), "--name is missing"),
    ],
)
def test_what_does_not_go_together(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str
) -> None:
    assert run(arguments, {}) == EXIT_USAGE
    assert reason in capsys.readouterr().err


def test_the_cluster_of_the_context_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(("register", HELLO), {"KUBECONFIG": "/nowhere"}) == 69
    assert capsys.readouterr().err == "hbone: no kubeconfig: /nowhere: no such file\n"
