"""Each failure of the catalogue made in reality, as far as one process can; the rest is made in
`tests/path/test_doctor.py`, with hgate, krun and programs that are not ours."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from time import time

from agent.config.settings import Settings
from hbone import arguments
from hbone.cloudrun.limits import FrontEndLimits
from hbone.doctor import container_path, machine
from shared.address import Address
from shared.doctor.failures import Failure
from shared.doctor.service_path import Deadlines
from shared.doctor.walk import Report
from shared.http2 import frames
from tests.hbone.cloudrun.world import URL, Credentials
from tests.hbone.doctor.looking import (
    HASTY,
    HTML,
    NAME,
    PATIENT,
    Bench,
    behind,
    dns,
    odd_certificate,
    s_server,
    says,
    server_tls,
    tcp,
    tls_server,
)
from tests.support import running_gateway
from tests.support.http2_peer import Http2Peer, Service
from tests.support.krun_port import KrunPort
from tests.support.metadata_server import Answer, MetadataServer, closed_port
from tests.support.name_server import SERVFAIL, never
from tests.support.network import unanswering
from tests.support.tcp_peer import TcpServer

Maker = Callable[[Bench], Awaitable[Report]]

MADE: dict[Failure, Maker] = {}


def makes(failure: Failure) -> Callable[[Maker], Maker]:
    """Marks what makes a failure, and looks."""

    def register(maker: Maker) -> Maker:
        assert failure not in MADE
        MADE[failure] = maker
        return maker

    return register


# This machine.


@makes(Failure.NO_PROGRAM)
async def no_program(bench: Bench) -> Report:
    return machine.look({"PATH": str(bench.folder), "HOME": str(bench.folder)})


@makes(Failure.NO_DESTINATION)
async def no_destination(bench: Bench) -> Report:
    return await bench.look("ftp://hello.example/_hbone/22")


@makes(Failure.NO_TOKEN)
async def no_token(bench: Bench) -> Report:
    nobody = {"GCE_METADATA_HOST": f"127.0.0.1:{closed_port()}", "HBONE_TOKENS": "metadata"}
    return await bench.look(f"{URL}/_hbone/22", environ=nobody)


@makes(Failure.TOKEN_DENIED)
async def token_denied(bench: Bench) -> Report:
    async with MetadataServer(lambda _: Answer(b"no such account", 403)) as server:
        environ = {"GCE_METADATA_HOST": server.host, "HBONE_TOKENS": "metadata"}
        return await bench.look(f"{URL}/_hbone/22", environ=environ)


@makes(Failure.TOKEN_FILE)
async def token_file(bench: Bench) -> Report:
    return await bench.look(f"{URL}/_hbone/22", "--token-file", bench.folder / "none")


@makes(Failure.OWN_CERTIFICATE)
async def own_certificate(bench: Bench) -> Report:
    file = bench.folder / "cert.pem"
    file.write_text("no certificate")
    return await bench.through(closed_port(), certificates=file)


# The way there.


@makes(Failure.NO_NAME)
async def no_name(bench: Bench) -> Report:
    async with dns():
        return await bench.look(f"https://{NAME}/_hbone/22", "--no-token")


@makes(Failure.NO_ADDRESS)
async def no_address(bench: Bench) -> Report:
    async with dns() as server:
        server.names = {f"{NAME}.": ()}
        return await bench.look(f"https://{NAME}/_hbone/22", "--no-token")


@makes(Failure.DNS_SILENT)
async def dns_silent(bench: Bench) -> Report:
    async with dns() as server:
        server.faults = {"*": never}
        return await bench.look(f"https://{NAME}/_hbone/22", "--no-token", deadlines=HASTY)


@makes(Failure.DNS_FAILED)
async def dns_failed(bench: Bench) -> Report:
    async with dns() as server:
        server.faults = {"*": lambda _, answer: replace(answer, code=SERVFAIL, addresses=())}
        return await bench.look(f"https://{NAME}/_hbone/22", "--no-token")


async def by_proxy(bench: Bench, port: int) -> Report:
    proxy = {"https_proxy": f"http://me:secret@127.0.0.1:{port}"}
    return await bench.look(f"https://{NAME}/_hbone/22", "--no-token", environ=proxy)


@makes(Failure.PROXY_DOWN)
async def proxy_down(bench: Bench) -> Report:
    return await by_proxy(bench, closed_port())


@makes(Failure.PROXY_REFUSED)
async def proxy_refused(bench: Bench) -> Report:
    async with tcp(lambda peer: peer.send_soon(b"HTTP/1.1 403 Forbidden\r\n\r\n")) as port:
        return await by_proxy(bench, port)


@makes(Failure.TCP_REFUSED)
async def tcp_refused(bench: Bench) -> Report:
    return await bench.look(f"http://127.0.0.1:{closed_port()}/_hbone/22")


@makes(Failure.TCP_SILENT)
async def tcp_silent(bench: Bench) -> Report:
    with unanswering() as port:
        return await bench.look(f"http://127.0.0.1:{port}/_hbone/22", deadlines=HASTY)


@makes(Failure.TCP_UNREACHABLE)
async def tcp_unreachable(bench: Bench) -> Report:
    return await bench.look("http://255.255.255.255:80/_hbone/22", "--no-token")


@makes(Failure.CA_FILE)
async def ca_file(bench: Bench) -> Report:
    file = bench.folder / "ca.pem"
    file.write_text("no certificate")
    async with tls_server(server_tls(bench.credentials)) as port:
        return await bench.look(f"https://127.0.0.1:{port}/_hbone/22", "--no-token", "--ca", file)


@makes(Failure.NOT_TLS)
async def not_tls(bench: Bench) -> Report:
    async with tcp(lambda peer: peer.send_soon(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as port:
        return await bench.look(f"https://127.0.0.1:{port}/_hbone/22", "--no-token")


TLS_1_1 = ("-tls1_1", "-cipher", "ALL:@SECLEVEL=0")


@makes(Failure.TLS_VERSION)
async def tls_version(bench: Bench) -> Report:
    async with s_server(bench.credentials, *TLS_1_1) as port:
        return await bench.at_front_end(port)


@makes(Failure.TLS_SILENT)
async def tls_silent(bench: Bench) -> Report:
    async with TcpServer.listening() as server:
        return await bench.at_front_end(server.port, deadlines=HASTY)


@makes(Failure.TLS_CLOSED)
async def tls_closed(bench: Bench) -> Report:
    async with tcp(lambda peer: peer.reset()) as port:
        return await bench.at_front_end(port)


@makes(Failure.TLS_ALERT)
async def tls_alert(bench: Bench) -> Report:
    """TLS 1.2 tells in the handshake that it wants a certificate."""
    async with s_server(bench.credentials, "-tls1_2", "-Verify", "1", "-verify_return_error") as port:
        return await bench.at_front_end(port)


async def with_odd_certificate(bench: Bench, context: ssl.SSLContext, ca: Path) -> Report:
    async with tls_server(context) as port:
        return await bench.look(
            f"{URL}/_hbone/22", "--no-token", "--connect", f"127.0.0.1:{port}", "--ca", ca
        )


@makes(Failure.CERTIFICATE_EXPIRED)
async def certificate_expired(bench: Bench) -> Report:
    odd = odd_certificate(bench.folder, from_days=-3, to_days=-1)
    return await with_odd_certificate(bench, *odd)


@makes(Failure.CERTIFICATE_TOO_NEW)
async def certificate_too_new(bench: Bench) -> Report:
    return await with_odd_certificate(bench, *odd_certificate(bench.folder, from_days=1, to_days=2))


@makes(Failure.CERTIFICATE_NAME)
async def certificate_name(bench: Bench) -> Report:
    return await with_odd_certificate(bench, *odd_certificate(bench.folder, "other.example"))


@makes(Failure.CERTIFICATE_UNTRUSTED)
async def certificate_untrusted(bench: Bench) -> Report:
    context, _ = odd_certificate(bench.folder)
    return await with_odd_certificate(bench, context, bench.credentials.folder / "ca.pem")


@makes(Failure.CERTIFICATE_BAD)
async def certificate_bad(bench: Bench) -> Report:
    return await with_odd_certificate(bench, *odd_certificate(bench.folder, for_clients=True))


@makes(Failure.NO_HTTP2)
async def no_http2(bench: Bench) -> Report:
    async with tls_server(server_tls(bench.credentials, "http/1.1")) as port:
        return await bench.at_front_end(port)


# The service.


@makes(Failure.TOKEN_EXPIRED)
async def token_expired(bench: Bench) -> Report:
    async with bench.credentials.front_end(closed_port()) as port:
        return await bench.at_front_end(port, "--token-file", bench.token(lifetime_s=-60))


@makes(Failure.TOKEN_AUDIENCE)
async def token_audience(bench: Bench) -> Report:
    async with bench.credentials.front_end(closed_port()) as port:
        return await bench.at_front_end(port, "--token-file", bench.token("https://other.a.run.app"))


@makes(Failure.TOKEN_REFUSED)
async def token_refused(bench: Bench) -> Report:
    """By the stand-in, for nobody there knows the key."""
    folder = bench.folder / "others"
    folder.mkdir()
    async with bench.credentials.front_end(closed_port()) as port:
        return await bench.at_front_end(port, "--token-file", bench.token(by=Credentials.make(folder)))


@makes(Failure.TOKEN_WANTED)
async def token_wanted(bench: Bench) -> Report:
    async with bench.credentials.front_end(closed_port()) as port:
        return await bench.at_front_end(port, "--no-token")


@makes(Failure.CLOCK_WRONG)
async def clock_wrong(bench: Bench) -> Report:
    date = (b"date", formatdate(time() + 3600, usegmt=True).encode())
    async with says((401, [*HTML, date], b"<h1>Error: Unauthorized</h1>")) as port:
        return await bench.look(
            f"http://127.0.0.1:{port}/_hbone/22", "--audience", URL, "--token-file", bench.token()
        )


@makes(Failure.NO_SERVICE)
async def no_service(bench: Bench) -> Report:
    page = b"<title>Error 404 (Not Found)!!1</title><p><b>404.</b> <ins>That's an error.</ins>"
    async with says((404, HTML, page)) as port:
        return await bench.look(f"http://127.0.0.1:{port}/_hbone/22")


@makes(Failure.INGRESS)
async def ingress(bench: Bench) -> Report:
    async with bench.credentials.front_end(closed_port(), is_internal=True) as port:
        return await bench.at_front_end(port)


@makes(Failure.NOT_INVOKER)
async def not_invoker(bench: Bench) -> Report:
    async with bench.credentials.front_end(closed_port(), invokers=["other@local"]) as port:
        return await bench.at_front_end(port)


@makes(Failure.IAP)
async def iap(bench: Bench) -> Report:
    login = (b"location", b"https://accounts.google.com/o/oauth2/v2/auth?client_id=1")
    async with says((302, [login, (b"x-goog-iap-generated-response", b"true")], b"")) as port:
        return await bench.look(f"http://127.0.0.1:{port}/_hbone/22")


@makes(Failure.REDIRECTED)
async def redirected(bench: Bench) -> Report:
    async with says((301, [(b"location", b"https://www.example/?q=1")], b"")) as port:
        return await bench.look(f"http://127.0.0.1:{port}/_hbone/22")


@makes(Failure.NO_INSTANCE)
async def no_instance(bench: Bench) -> Report:
    """One request has the only place."""
    async with (
        Service.listening() as container,
        bench.credentials.front_end(container.port, FrontEndLimits(concurrency=1)) as port,
        bench.credentials.client(port) as other,
    ):
        other.request(b"POST", b"/", [bench.credentials.bearer()])
        await container.request()
        return await bench.at_front_end(port)


@makes(Failure.SERVICE_ERROR)
async def service_error(bench: Bench) -> Report:
    async with says((500, HTML, b"<title>500 Server Error</title>")) as port:
        return await bench.look(f"http://127.0.0.1:{port}/_hbone/22")


@makes(Failure.CONTAINER_DOWN)
async def container_down(bench: Bench) -> Report:
    async with bench.credentials.front_end(closed_port()) as port:
        return await bench.at_front_end(port)


@makes(Failure.CONTAINER_SLOW)
async def container_slow(bench: Bench) -> Report:
    async with (
        Service.listening() as container,
        bench.credentials.front_end(container.port, FrontEndLimits(request_timeout_s=0.2)) as port,
    ):
        return await bench.at_front_end(port)


@makes(Failure.NO_ANSWER)
async def no_answer(bench: Bench) -> Report:
    async with Service.listening() as container, bench.credentials.front_end(container.port) as port:
        return await bench.at_front_end(port, deadlines=replace(HASTY, hop_s=20.0))


@makes(Failure.ANSWER_BROKE)
async def answer_broke(bench: Bench) -> Report:
    async with behind(lambda stream: stream.reset(frames.INTERNAL_ERROR)) as port:
        return await bench.look(f"http://127.0.0.1:{port}/_hbone/22")


@makes(Failure.OTHER_STATUS)
async def other_status(bench: Bench) -> Report:
    async with says((418, [], b"I'm a teapot")) as port:
        return await bench.look(f"http://127.0.0.1:{port}/_hbone/22")


# The container.


@makes(Failure.NOT_KRUN)
async def not_krun(bench: Bench) -> Report:
    async with says((200, HTML, b"<title>Welcome</title>")) as port:
        return await bench.look(f"http://127.0.0.1:{port}/_hbone/22")


async def at_krun(
    bench: Bench, settings: Settings, path: str = "/_hbone/22", deadlines: Deadlines = PATIENT
) -> Report:
    """A look at a krun behind the stand-in."""
    async with (
        KrunPort.serving(settings) as krun,
        bench.credentials.front_end(krun.port) as port,
    ):
        return await bench.at_front_end(port, path=path, deadlines=deadlines)


@makes(Failure.NO_PROBES)
async def no_probes(bench: Bench) -> Report:
    async with KrunPort.serving(Settings()) as krun:
        url = f"http://127.0.0.1:{krun.port}"
        options = arguments.command_parser("doctor").parse_args(["--probe", url])
        report, _ = await container_path.walk_to_krun(url, options, {}, PATIENT)
        return report


@makes(Failure.NO_TARGET)
async def no_target(bench: Bench) -> Report:
    return await at_krun(bench, Settings(), "/_hbone/nobody")


@makes(Failure.KRUN_TOO_OLD)
async def krun_too_old(bench: Bench) -> Report:
    async with says(*[(404, (), b"no such target; known are 15003, 22")] * 3) as port:
        return await bench.look(f"http://127.0.0.1:{port}/_hbone/15008")


@makes(Failure.TARGET_REFUSED)
async def target_refused(bench: Bench) -> Report:
    return await at_krun(bench, Settings(sshd=Address("127.0.0.1", closed_port())))


@makes(Failure.KRUN_FULL)
async def krun_full(bench: Bench) -> Report:
    async with TcpServer.listening() as target:
        settings = Settings(sshd=Address("127.0.0.1", target.port), max_tunnels=1)
        async with KrunPort.serving(settings) as krun, Http2Peer.connected(krun.port) as other:
            assert await other.request(b"POST", b"/_hbone/22").status() == 200
            return await bench.look(f"http://127.0.0.1:{krun.port}/_hbone/22")


@makes(Failure.DIAL_FAILED)
async def dial_failed(bench: Bench) -> Report:
    with unanswering() as port:
        return await at_krun(bench, Settings(sshd=Address("127.0.0.1", port), dial_timeout_s=0.1))


async def with_sshd(bench: Bench, sshd: int, deadlines: Deadlines = PATIENT) -> Report:
    return await at_krun(bench, Settings(sshd=Address("127.0.0.1", sshd)), deadlines=deadlines)


@makes(Failure.SSH_SILENT)
async def ssh_silent(bench: Bench) -> Report:
    async with TcpServer.listening() as target:
        return await with_sshd(bench, target.port, deadlines=replace(HASTY, hop_s=1.0, answer_s=20.0))


@makes(Failure.SSH_CLOSED)
async def ssh_closed(bench: Bench) -> Report:
    async with tcp(lambda peer: peer.end()) as port:
        return await with_sshd(bench, port)


@makes(Failure.NOT_SSH)
async def not_ssh(bench: Bench) -> Report:
    async with tcp(lambda peer: peer.send_soon(b"HTTP/1.1 200 OK\r\n\r\n")) as port:
        return await with_sshd(bench, port)


# The gateway.


@makes(Failure.NOT_GATEWAY)
async def not_gateway(bench: Bench) -> Report:
    async with tcp(lambda peer: peer.reset()) as port:
        return await bench.through(port)


@makes(Failure.GATEWAY_SILENT)
async def gateway_silent(bench: Bench) -> Report:
    async with TcpServer.listening() as server:
        return await bench.through(server.port, deadlines=HASTY)


async def at_hgate(bench: Bench, front_end: int) -> Report:
    """A look through an hgate whose only route leads to a front end of the stand-in's."""
    route = {
        "host": NAME,
        "tunnel": f"{URL}/_hbone/15003",
        "connect": f"127.0.0.1:{front_end}",
        "ca": str(bench.credentials.folder / "ca.pem"),
        "token": {"file": str(bench.token())},
    }
    async with running_gateway.running(bench.folder / "hgate.yaml", [route], max_retries=0) as gateway:
        return await bench.through(gateway.port)


@makes(Failure.NO_ROUTE)
async def no_route(bench: Bench) -> Report:
    async with running_gateway.running(bench.folder / "hgate.yaml", []) as gateway:
        return await bench.through(gateway.port)


@makes(Failure.ROUTE_DENIED)
async def route_denied(bench: Bench) -> Report:
    async with bench.credentials.front_end(closed_port(), invokers=["other@local"]) as port:
        return await at_hgate(bench, port)


@makes(Failure.ROUTE_FAILED)
async def route_failed(bench: Bench) -> Report:
    return await at_hgate(bench, closed_port())


@makes(Failure.PEER_ALPN)
async def peer_alpn(bench: Bench) -> Report:
    async with s_server(bench.credentials, "-alpn", "h2") as port:
        return await bench.through(port)


@makes(Failure.PEER_FAILED)
async def peer_failed(bench: Bench) -> Report:
    async with s_server(bench.credentials, *TLS_1_1) as port:
        return await bench.through(port)
