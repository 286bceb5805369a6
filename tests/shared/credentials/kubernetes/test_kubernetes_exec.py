"""Exec plugins: real programs that print a token, or something else, or nothing, or never end."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.credentials.kubernetes.kubernetes_config import read_config
from shared.credentials.kubernetes.kubernetes_exec import ExecToken
from shared.errors import ConfigError, TokenError
from tests.shared.credentials.kubernetes.test_kubernetes_config import config, write
from tests.shared.net.loopback import until

VERSION = "client.authentication.k8s.io/v1"
NOW_S = 1_800_000_000.0
SECRET = "S3cret-Token"


def plugin(code: str, **settings: Any) -> ExecToken:
    """One whose program is `code`."""
    return ExecToken([sys.executable, "-c", code], {}, now=lambda: NOW_S, **settings)


def printing(status: dict[str, Any]) -> str:
    credential = {"apiVersion": VERSION, "kind": "ExecCredential", "status": status}
    return f"print({json.dumps(json.dumps(credential))})"


async def test_a_token_is_kept_until_shortly_before_its_end(tmp_path: Path) -> None:
    count = tmp_path / "count"
    code = f"open({str(count)!r}, 'a').write('.')\n" + printing(
        {"token": SECRET, "expirationTimestamp": "2027-01-15T09:00:00Z"}  # NOW_S + 3600
    )
    now_s = NOW_S
    token = ExecToken([sys.executable, "-c", code], {}, now=lambda: now_s)
    assert await asyncio.gather(token.token(), token.token()) == [SECRET, SECRET]
    now_s = NOW_S + 3539
    await token.token()
    assert count.read_text() == "."
    now_s = NOW_S + 3541
    await token.token()
    assert count.read_text() == ".."


async def test_one_without_an_end_is_kept_until_the_server_rejects_it(tmp_path: Path) -> None:
    count = tmp_path / "count"
    token = plugin(f"open({str(count)!r}, 'a').write('.')\n" + printing({"token": SECRET}))
    await token.token()
    token.invalidate("another one")
    await token.token()
    assert count.read_text() == "."
    token.invalidate(SECRET)
    await token.token()
    assert count.read_text() == ".."


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            f"import sys; print('{SECRET}', file=sys.stderr); sys.exit(3)",
            "ended with exit code 3; run it by hand",
        ),
        (f"print('{SECRET}')", "printed no ExecCredential"),
        ("print('{}')", "printed no ExecCredential"),
        ("print('[' * 60000)", "printed no ExecCredential"),
        (printing({}), "gave no token"),
        (printing({"token": 7}), "gave no token"),
        (printing({"token": f"{SECRET}\r\nx: y"}), "gave no token that a header can carry"),
        (printing({"token": SECRET, "expirationTimestamp": "soon"}), "printed no ExecCredential"),
        (printing({"token": SECRET, "expirationTimestamp": 7}), "printed no ExecCredential"),
        (
            printing({"token": SECRET, "expirationTimestamp": "2020-01-01T00:00:00Z"}),
            "has expired; is the clock right",
        ),
        (printing({"clientCertificateData": "x"}), "gives a client certificate, which is not supported"),
        ("while True: print('x' * 9999)", "printed more than 65536 bytes"),
    ],
)
async def test_what_is_no_good(code: str, reason: str) -> None:
    with pytest.raises(TokenError, match=reason) as error:
        await plugin(code).token()
    assert SECRET not in str(error.value)


async def test_one_that_never_ends_is_ended_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, time\n"
        "os.fork()\n"
        f"with open({str(pids)!r}, 'a') as file: file.write(f'{{os.getpid()}} ')\n"
        "time.sleep(1000)"
    )
    token = plugin(code, timeout_s=1.0)
    with pytest.raises(TokenError, match="has not ended within 1 s"):
        await token.token()
    for pid in pids.read_text().split() if pids.exists() else ():  # they had come so far
        await until(functools.partial(is_dead, pid))  # the kernel takes its time with a signal


def is_dead(pid: str) -> bool:
    """Gone, or a zombie that whoever inherited it has yet to collect."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def test_one_that_is_not_there() -> None:
    with pytest.raises(TokenError, match="cannot run exec plugin no-such-plugin: No such file"):
        await ExecToken(["no-such-plugin"], {}).token()


# In a kubeconfig.


async def test_the_program_is_found_beside_the_file_and_told_what_it_asks_for(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "plugin"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\n"
        "import base64, json, os, sys\n"
        "info = json.loads(os.environ['KUBERNETES_EXEC_INFO'])\n"
        "cluster = info['spec']['cluster']\n"
        "assert base64.b64decode(cluster['certificate-authority-data']) == b'the CA'\n"
        "token = '-'.join([sys.argv[1], os.environ['EXTRA'], cluster['server'][8:]])\n"
        "print(json.dumps({'apiVersion': info['apiVersion'], 'status': {'token': token}}))\n"
    )
    program.chmod(0o755)
    told = {
        "apiVersion": VERSION,
        "command": "./bin/plugin",
        "args": ["argument"],
        "env": [{"name": "EXTRA", "value": "extra"}],
        "provideClusterInfo": True,
        "interactiveMode": "IfAvailable",
    }
    authority = {"certificate-authority-data": base64.b64encode(b"the CA").decode()}
    found = read_config([write(tmp_path / "config", config(user={"exec": told}, cluster=authority))])
    assert await found.bearer.token() == "argument-extra-k8s.example:6443"


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("gke-gcloud-auth-plugin", "exec: has to be a mapping"),
        ({"apiVersion": VERSION}, "exec.command: not set"),
        (
            {"command": "a", "apiVersion": "client.authentication.k8s.io/v1alpha1"},
            "exec.apiVersion: not supported",
        ),
        ({"command": "a", "apiVersion": VERSION, "interactiveMode": "Always"}, "nobody is there to be asked"),
        ({"command": "a", "apiVersion": VERSION, "args": "x"}, "exec.args: has to be a list of texts"),
        (
            {"command": "a", "apiVersion": VERSION, "env": ["A=B"]},
            "exec.env: has to be a list of name and value",
        ),
        ({"command": "a", "apiVersion": VERSION, "env": 7}, "exec.env: has to be a list of name and value"),
    ],
)
def test_what_a_kubeconfig_can_have_wrong(tmp_path: Path, told: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_config([write(tmp_path / "config", config(user={"exec": told}))])
