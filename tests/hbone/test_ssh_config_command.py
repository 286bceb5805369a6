"""What `hbone ssh-config` prints, by what ssh makes of it (`ssh -G`)."""

from __future__ import annotations

import shlex
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from hbone import cli
from shared.errors import EXIT_OK, EXIT_USAGE
from tests.support.world import find_program

URL = "https://hello-123456789012.us-central1.run.app/_hbone/22"
HOST = "hello-123456789012.us-central1.run.app"
HBONE = f"{sys.executable} -P -m hbone connect"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config"


def write(config: Path, capsys: pytest.CaptureFixture[str], *words: str) -> None:
    """`hbone ssh-config WORDS >CONFIG`."""
    assert cli.run(["ssh-config", *words], {}) == EXIT_OK
    out, err = capsys.readouterr()
    assert err == ""
    config.write_text(out)


def told(config: Path, host: str) -> dict[str, str]:
    """What ssh goes by for `host`, in lower case's names."""
    shown = subprocess.run(
        [find_program("ssh"), "-F", config, "-G", host], capture_output=True, text=True, check=True
    )
    return {name: value for name, _, value in (line.partition(" ") for line in shown.stdout.splitlines())}


@pytest.mark.parametrize("name", ["hello", HOST])
def test_a_service(config: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    write(config, capsys, "--ca", "/etc/ca.pem", f"app@{URL}")
    ssh = told(config, name)
    assert ssh["proxycommand"] == f"{HBONE} --ca /etc/ca.pem {URL}"
    assert (ssh["user"], ssh["hostkeyalias"]) == ("app", HOST)
    assert (ssh["serveraliveinterval"], ssh["serveralivecountmax"]) == ("30", "3")
    assert ssh["stricthostkeychecking"] == "accept-new"


def test_another_host_is_left_alone(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(config, capsys, URL)
    assert "proxycommand" not in told(config, "another")


def test_two_services_of_one_name(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(config, capsys, "hello.demo:22", "hello.prod:22", "web.prod:22")
    assert told(config, "hello")["proxycommand"].endswith(" hello.demo:22")
    assert told(config, "hello.prod")["proxycommand"].endswith(" hello.prod:22")
    assert told(config, "web")["proxycommand"].endswith(" web.prod:22")


def test_all_services(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(config, capsys, "--any-host-key", "--keepalive", "60", "--audience", "50%")
    ssh = told(config, HOST)
    assert ssh["proxycommand"] == f"{HBONE} --audience 50%% --keepalive 60 '%h:%p'"
    assert (ssh["userknownhostsfile"], ssh["stricthostkeychecking"]) == ("/dev/null", "false")
    assert told(config, "hello.demo.svc")["proxycommand"] == ssh["proxycommand"]
    assert "proxycommand" not in told(config, "hello.example")


@pytest.mark.parametrize("host", ["$(touch owned).run.app", "`touch owned`.svc", "a';touch owned;'.run.app"])
def test_no_host_s_name_is_run(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, host: str
) -> None:
    """ssh before 9.6 hands names to the shell as they are, from wherever they come: a submodule's URL. Here
    a newer one may be, which refuses them, so its part is done by hand."""
    write(config, capsys)
    hosts, command, *_ = (line.strip().partition(" ")[2] for line in config.read_text().splitlines())
    patterns = shlex.split(hosts)
    refused = any(fnmatchcase(host, one[1:]) for one in patterns if one.startswith("!"))
    assert any(fnmatchcase(host, one) for one in patterns)
    assert refused == ("'" in host)
    if not refused:
        words = command[command.index("connect") :].replace("%h", host).replace("%p", "22")
        line = f"printf '%s\\n' {words}"
        said = subprocess.run(["/bin/sh", "-c", line], cwd=tmp_path, capture_output=True, text=True)
        assert said.stdout.splitlines()[-1] == f"{host}:22"
        assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["a\\", "a\\'b", "it's", '"', "a b\\\\", "$(id)", "#", "%h", "ü"])
def test_any_file_s_name_comes_through_ssh_and_the_shell(
    name: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line that ssh cannot read would end every ssh of the user's."""
    write(config, capsys, "--ca", f"/{name}", URL)
    line = told(config, HOST)["proxycommand"]
    words = line[line.index("connect") :].replace("%%", "%")
    said = subprocess.run(["/bin/sh", "-c", f"printf '%s\\n' {words}"], capture_output=True, text=True)
    assert said.stdout.splitlines() == ["connect", "--ca", f"/{name}", URL]


@pytest.mark.parametrize("user", ["a b", "a\nHost *", "a\tb", 'a"b', "#a", "-a", "%u", "a\\"])
def test_a_user_that_ssh_would_take_apart_is_refused(user: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["ssh-config", f"{user}@hello.demo"], {}) == EXIT_USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("user", ["app", "a.b_c-d", "DOMAIN+user", "me@corp.example", "x$"])
def test_any_other_user_is_that_to_ssh(user: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(config, capsys, f"{user}@hello.demo")
    assert told(config, "hello")["user"] == user


def test_what_would_be_a_line_of_its_own_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["ssh-config", "--audience", "a\nHost *", URL], {}) == EXIT_USAGE
    assert cli.run(["ssh-config", "https://h.example/x\nHost *"], {}) == EXIT_USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert "a character that no line of ssh's settings can have" in err
