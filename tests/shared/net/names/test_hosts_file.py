from __future__ import annotations

import os
from pathlib import Path

from shared.net.names.hosts_file import LOOPBACK, HostsFile

TEXT = """
# The kubelet's.
127.0.0.1\tlocalhost
::1 localhost ip6-localhost   # and more
10.0.0.7 DB.example db
10.0.0.8 db.example
not-an-address x.example
10.0.0.9
fe00::0 ip6-localnet
10.0.0.10 dotted.example.
"""


def test_names_and_their_addresses(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(TEXT)
    hosts = HostsFile(file)
    assert hosts.addresses("localhost") == ("127.0.0.1", "::1")
    assert hosts.addresses("ip6-localhost") == ("::1",)
    assert hosts.addresses("db") == ("10.0.0.7",)
    assert hosts.addresses("db.example") == ("10.0.0.7", "10.0.0.8")
    assert hosts.addresses("dotted.example") == ("10.0.0.10",)
    for unknown in ("x.example", "example", "#", "", "10.0.0.9"):
        assert hosts.addresses(unknown) == ()


def test_localhost_is_loopback_without_any_file(tmp_path: Path) -> None:
    hosts = HostsFile(tmp_path / "none")
    assert hosts.addresses("localhost") == LOOPBACK
    assert hosts.addresses("app.localhost") == LOOPBACK
    assert hosts.addresses("notlocalhost") == ()


def test_a_change_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("10.0.0.1 a\n")
    hosts = HostsFile(file)
    assert hosts.addresses("a") == ("10.0.0.1",)
    other = tmp_path / "other"
    other.write_text("10.0.0.2 a\n")
    os.replace(other, file)
    assert hosts.addresses("a") == ("10.0.0.2",)
    file.unlink()
    assert hosts.addresses("a") == ()


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(b"\xff\xfe\n10.0.0.1 a \xe9\n")
    assert HostsFile(file).addresses("a") == ("10.0.0.1",)
