"""What `hbone ssh` makes of its command line; what ssh makes of it is in tests/path/test_ssh.py."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbone import arguments, cli
from hbone.ssh_command import WITH_VALUE, split
from shared.errors import EXIT_OK, EXIT_UNAVAILABLE, EXIT_USAGE
from tests.hbone.commands import running
from tests.support.world import find_program

SERVICE = "https://hello-123456789012.us-central1.run.app"
HOST = "hello-123456789012.us-central1.run.app"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The words of the line that `hbone ssh --print WORDS` prints."""
    assert cli.run(["ssh", "--print", *words], {}) == EXIT_OK
    out, err = capsys.readouterr()
    assert err == ""
    (line,) = out.splitlines()
    return shlex.split(line)


def settings(words: list[str]) -> dict[str, str]:
    """The first value of each setting: ssh goes by that."""
    found: dict[str, str] = {}
    for flag, word in pairwise(words):
        if flag == "-o":
            name, _, value = word.partition("=")
            found.setdefault(name, value)
    return found


def test_a_shell_by_the_system_s_ssh(capsys: pytest.CaptureFixture[str]) -> None:
    words = printed(capsys, SERVICE)
    assert words[0] == "ssh"
    assert words[-2:] == ["--", HOST]
    told = settings(words)
    assert told.pop("ProxyCommand").endswith(f" connect {SERVICE}")
    assert told == {
        "HostKeyAlias": HOST,
        "ServerAliveInterval": "30",
        "ServerAliveCountMax": "3",
        "StrictHostKeyChecking": "accept-new",
    }


def test_flags_of_a_letter_are_ssh_s_and_all_others_hbone_s(capsys: pytest.CaptureFixture[str]) -> None:
    words = printed(
        capsys,
        *("-N", "-L", "1:127.0.0.1:2", "--no-token", f"app@{SERVICE}", "-i", "key", "--keepalive=60", "-tt"),
        *("ls", "-l", "--all"),
    )
    assert words[:7] == ["ssh", "-N", "-L", "1:127.0.0.1:2", "-i", "key", "-tt"]
    assert words[-5:] == ["--", f"app@{HOST}", "ls", "-l", "--all"]
    assert settings(words)["ProxyCommand"].endswith(f" connect --no-token --keepalive 60 {SERVICE}")


def test_behind_two_hyphens_nothing_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, SERVICE, "--", "-x", "--ca")[-4:] == ["--", HOST, "-x", "--ca"]
    assert printed(capsys, "-t", "--", SERVICE, "--ca")[-3:] == ["--", HOST, "--ca"]


def test_the_user_s_own_settings_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    words = printed(capsys, SERVICE, "-o", "ServerAliveInterval=5", "-o", "StrictHostKeyChecking=ask")
    told = settings(words)
    assert (told["ServerAliveInterval"], told["StrictHostKeyChecking"]) == ("5", "ask")


@pytest.mark.parametrize("flags", [["-v"], ["-v", "-v"], ["-vvv"]])
def test_a_fault_is_looked_for_in_ssh_and_in_the_tunnel(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = printed(capsys, *flags, SERVICE)
    assert words[1 : 1 + len(flags)] == flags
    line = settings(words)["ProxyCommand"]
    assert line.endswith(
        f" connect {' '.join(['-v'] * min(2, len(''.join(flags).replace('-', ''))))} {SERVICE}"
    )


def test_any_host_key(capsys: pytest.CaptureFixture[str]) -> None:
    told = settings(printed(capsys, "--any-host-key", SERVICE))
    assert (told["StrictHostKeyChecking"], told["UserKnownHostsFile"]) == ("no", "/dev/null")


def test_the_proxy_command_survives_ssh_and_the_shell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """ssh replaces %-tokens; then a shell takes the line apart."""
    folder = tmp_path / "it's 100% mine"
    folder.mkdir()
    monkeypatch.chdir(folder)
    line = settings(printed(capsys, "--ca", "ca.pem", "--audience", "a%20b", SERVICE))["ProxyCommand"]
    expanded = re.sub("%(.)", lambda found: {"%": "%"}[found[1]], line)
    shown = subprocess.run(["/bin/sh", "-c", f"printf '%s\\n' {expanded}"], capture_output=True, text=True)
    words = shown.stdout.splitlines()
    assert words[words.index("connect") :] == [
        *("connect", "--audience", "a%20b", "--ca", str(folder / "ca.pem"), SERVICE)
    ]


@pytest.mark.parametrize("name", ["hbone", "not-hbone"])
def test_the_proxy_command_is_this_hbone(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / name
    program.touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "ssh"])
    line = settings(printed(capsys, SERVICE))["ProxyCommand"]
    expected = [str(program)] if name == "hbone" else [sys.executable, "-P", "-m", "hbone"]
    assert shlex.split(line) == [*expected, "connect", SERVICE]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "hbone: no SERVICE; see hbone ssh --help"),
        (["-N"], "hbone: no SERVICE; see hbone ssh --help"),
        (["--unknown", SERVICE], "unrecognized arguments: --unknown"),
        (["--keepalive", "soon", SERVICE], "'soon' is no number"),
        (["app@"], "hbone: '': write a URL, HOST:PORT or SERVICE.NAMESPACE, and USER@ before it"),
        (["a b"], "hbone: 'a b': write a URL"),
        (["h\u00e4user.demo"], "hbone: 'h\\xe4user.demo': write a URL"),
        (["https:///_hbone/22"], "hbone: 'https:///_hbone/22': write a URL"),
        (["--", "-oProxyCommand=x"], "hbone: '-oProxyCommand=x': write a URL"),
        (["--audience", "a\nb", SERVICE], "a character that no line of ssh's settings can have"),
    ],
)
def test_usage_errors(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["ssh", *words], {}) == EXIT_USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err
    assert len(err.splitlines()) == 1


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["ssh", "--help"], {}) == EXIT_OK
    assert capsys.readouterr().out.startswith("usage: hbone ssh [flags] [ssh's flags] [USER@]SERVICE")


@pytest.mark.parametrize(
    ("service", "host"),
    [
        ("https://hello.example:8443/_hbone/DB", "hello.example"),
        ("http://127.0.0.1:15009/_hbone/22", "127.0.0.1"),
        ("https://[::1]:15009/_hbone/22", "::1"),
        ("HELLO.example:22", "hello.example"),
        ("hello.demo", "hello.demo"),
        ("hello.demo:2222", "hello.demo"),
        ("hello.demo.svc", "hello.demo"),
        ("hello.demo.svc.cluster.local:22", "hello.demo"),
    ],
)
def test_known_hosts_has_one_name_for_a_service(
    service: str, host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = printed(capsys, service)
    assert words[-1] == settings(words)["HostKeyAlias"] == host


async def test_without_ssh_there_is_one_line(tmp_path: Path) -> None:
    async with running("ssh", SERVICE, environ={"PATH": str(tmp_path)}) as command:
        ended = await command.ended()
    assert (ended.code, ended.stdout) == (EXIT_UNAVAILABLE, b"")
    assert ended.stderr == (
        "hbone: no ssh on PATH: install OpenSSH's client (Debian: apt-get install openssh-client)\n"
    )


async def test_ssh_takes_the_place_of_hbone(tmp_path: Path) -> None:
    """Its process, its exit code, and signals as a shell would have given them to it."""
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho $$\nkill -PIPE $$\n")
    ssh.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    async with running("ssh", SERVICE, environ={"PATH": path}) as command:
        assert await command.line() == str(command.pid)
        assert (await command.ended()).code == -13


async def test_the_user_s_own_file_may_have_what_this_ssh_does_not_know(tmp_path: Path) -> None:
    """UseKeychain is macOS's; IgnoreUnknown lets one file serve everywhere. A first value counts."""
    config = tmp_path / "config"
    config.write_text("IgnoreUnknown UseKeychain\nUseKeychain yes\n")
    path = os.environ["PATH"]
    async with running("ssh", "-T", "-F", str(config), "-G", SERVICE, environ={"PATH": path}) as command:
        ended = await command.ended()
    assert (ended.code, ended.stderr) == (EXIT_OK, "")
    assert b"\nknownhostscommand /bin/sh " in ended.stdout


async def test_an_ssh_without_known_hosts_command_is_told_none(tmp_path: Path) -> None:
    """OpenSSH before 8.5 refuses what it does not know."""
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\ncase $* in *KnownHostsCommand*) exit 255;; esac\necho here\n")
    ssh.chmod(0o755)
    async with running("ssh", SERVICE, environ={"PATH": f"{tmp_path}:{os.environ['PATH']}"}) as command:
        assert await command.line() == "here"
        assert (await command.ended()).code == EXIT_OK


def test_ssh_has_these_flags_with_a_value() -> None:
    """In its own words, which name each flag that has one by itself: [-b bind_address]."""
    said = subprocess.run([find_program("ssh")], capture_output=True, text=True).stderr
    assert set(re.findall(r"\[-([A-Za-z]) ", said)) <= WITH_VALUE
    without = re.search(r"\[-([A-Za-z0-9]{5,})\]", said)
    assert without and not set(without[1]) & WITH_VALUE


FLAG = st.sampled_from(["-N", "-t", "-tt", "-NfL1:a:2", "-L=1", "-oUser=x", "-4", "-Ap22"])
FLAG_AND_VALUE = st.sampled_from(
    [("-L", "1:a:2"), ("-o", "User=x"), ("-NL", "1:a:2"), ("-i", "--key"), ("-p", "-")]
)
OURS = st.sampled_from([("--no-token",), ("--ca", "-x"), ("--ca=x",), ("--keepalive", "5"), ("-h",)])
ANY = st.one_of(
    FLAG.map(lambda flag: ("ssh", (flag,))), FLAG_AND_VALUE.map(lambda two: ("ssh", two))
) | OURS.map(lambda words: ("ours", words))
WORD = st.text("ab-/", min_size=1, max_size=3)


@given(before=st.lists(ANY), behind=st.lists(ANY), command=st.lists(WORD), hyphens=st.booleans())
def test_each_word_goes_to_one_place(
    before: list[tuple[str, tuple[str, ...]]],
    behind: list[tuple[str, tuple[str, ...]]],
    command: list[str],
    hyphens: bool,
) -> None:
    flags = [words for _, words in (*before, *behind)]
    command = command if hyphens or not command else ["run", *command]
    line = [
        *(word for _, words in before for word in words),
        "service",
        *(word for _, words in behind for word in words),
        *(["--"] if hyphens else []),
        *command,
    ]
    found = split(line, arguments.command_parser("ssh"))
    assert found.ours == [word for kind, words in (*before, *behind) if kind == "ours" for word in words]
    assert found.sshs == [word for kind, words in (*before, *behind) if kind == "ssh" for word in words]
    assert (found.service, found.command) == ("service", command)
    assert len(found.ours) + len(found.sshs) == sum(map(len, flags))


@given(st.lists(st.text(max_size=6)))
def test_no_line_has_it_fail(words: list[str]) -> None:
    found = split(words, arguments.command_parser("ssh"))
    hyphens = "--" in words
    taken = [*found.ours, *found.sshs, *([found.service] if found.service else []), *found.command]
    assert len(words) - len(taken) <= words.count("") + hyphens
