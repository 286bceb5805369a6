"""The rules that capture the app's outbound connections, as text for iptables-restore and from iptables-save.

Our own minimal set, for where there is no `pilot-agent istio-iptables`. A new connection goes to Envoy unless

1. it is Envoy's, pilot-agent's or krun's own, by user or group 1337;
2. it stays on this machine (interface lo), or goes to the metadata server;
3. its address or its port is excluded, or neither is included.

Questions to a name server go to pilot-agent if it answers DNS. Nothing that comes in is captured: tunnels
lead to the mTLS end's own port.

Removal goes by the names of chains, Istio's included, whoever has added them and with whichever settings. So
rules of a krun that was killed leave no doubles.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent.config.capture_settings import ALL, EVERYWHERE, CaptureSettings
from agent.config.pilot_settings import UID
from shared import ports

PREFIXES = ("KRUN_", "ISTIO_")
"""How the names of our chains begin, and of Istio's."""

OUTPUT, REDIRECT = "KRUN_OUTPUT", "KRUN_REDIRECT"

MARK = "KRUN_ISTIO"
"""An empty chain, which says that krun has made Istio's chains."""

METADATA = "169.254.169.254/32"
"""Google's metadata server, on Cloud Run the name server, too: Envoy may be told to let nothing through."""

_DECLARED = re.compile(r":(\S+) ")
_TARGET = re.compile(r" -[jg] (\S+)")


@dataclass(frozen=True, slots=True)
class Rules:
    """Text for iptables-restore, and for ip6tables-restore; empty where nothing is to be captured."""

    ipv4: str
    ipv6: str


def own_rules(settings: CaptureSettings, name_servers: Sequence[str]) -> Rules:
    """The minimal set. `name_servers` are addresses, for a pilot-agent that answers DNS."""
    servers = name_servers if settings.captures_dns else ()
    return Rules(_family(settings, servers, 4), _family(settings, servers, 6))


def _family(settings: CaptureSettings, name_servers: Iterable[str], version: int) -> str:
    included = _of(settings.included_ranges or (), version)
    servers = [one for one in name_servers if ipaddress.ip_address(one).version == version]
    if not (included or settings.included_ports or servers):
        return ""
    lines = ["*nat", f":{OUTPUT} - [0:0]", f":{REDIRECT} - [0:0]"]

    def add(rule: str, chain: str = OUTPUT) -> None:
        lines.append(f"-A {chain} {rule}")

    add(f"-p tcp -j REDIRECT --to-ports {ports.OUTBOUND}", REDIRECT)
    for owner in ("uid", "gid"):
        add(f"-m owner --{owner}-owner {UID} -j RETURN")
    for server in servers:
        for protocol in ("udp", "tcp"):
            add(f"-p {protocol} -d {server} --dport 53 -j REDIRECT --to-ports {ports.PILOT_DNS}")
    add("-o lo -j RETURN")
    for network in _of((METADATA, *settings.excluded_ranges), version):
        add(f"-d {network} -j RETURN")
    for port in settings.excluded_ports or ():
        add(f"-p tcp --dport {port} -j RETURN")
    for port in settings.included_ports:
        add(f"-p tcp --dport {port} -j {REDIRECT}")
    for network in included:
        add(f"-p tcp -d {network} -j {REDIRECT}")
    add(f"-j {OUTPUT}", "OUTPUT")
    return "\n".join([*lines, "COMMIT", ""])


def _of(ranges: Iterable[str], version: int) -> list[str]:
    """Those of one version of IP, each once."""
    told = [one for each in ranges for one in (EVERYWHERE if each == ALL else (each,))]
    return [one for one in dict.fromkeys(told) if ipaddress.ip_network(one).version == version]


def mark() -> str:
    """What adds the MARK, for iptables-restore."""
    return f"*nat\n:{MARK} - [0:0]\nCOMMIT\n"


def removal(saved: str, prefixes: tuple[str, ...] = PREFIXES) -> str:
    """What takes our chains and Istio's, or those with other `prefixes`, out of what iptables-save tells, for
    iptables-restore without flush; empty if there are none."""
    lines: list[str] = []
    table: list[str] = []
    chains: list[str] = []
    for line in saved.splitlines():
        if line.startswith("*"):
            table, chains = [line], []
        elif (declared := _DECLARED.match(line)) and declared[1].startswith(prefixes):
            chains.append(declared[1])
        elif line.startswith("-A ") and not line.split(" ", 2)[1].startswith(prefixes):
            target = _TARGET.search(line)
            if target is not None and target[1].startswith(prefixes):
                table.append(f"-D {line.removeprefix('-A ')}")
        elif line == "COMMIT" and chains:
            emptied = [f"-F {chain}" for chain in chains]
            lines += [*table, *emptied, *(f"-X {chain}" for chain in chains), line]
    return "".join(f"{line}\n" for line in lines)


def chains(saved: str, prefixes: tuple[str, ...] = PREFIXES) -> list[str]:
    """The names of the chains in what iptables-save tells that are ours or Istio's, or have other
    `prefixes`."""
    found = (_DECLARED.match(line) for line in saved.splitlines())
    return [declared[1] for declared in found if declared and declared[1].startswith(prefixes)]


def name_servers(resolv_conf: str) -> list[str]:
    """The name servers in a resolv.conf, as addresses without zones."""
    found = []
    for line in resolv_conf.splitlines():
        keyword, *words = line.split() or ("",)
        if keyword == "nameserver" and words:
            try:
                found.append(str(ipaddress.ip_address(words[0].partition("%")[0])))
            except ValueError:
                continue
    return list(dict.fromkeys(found))
