"""A file of revocation lists that changes, over time, and the numbers about it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from shared import regular_files
from shared.credentials.certificates.authority import Authority, KeyPair
from shared.errors import ConfigError, RevokedError, UnavailableError
from shared.net.tls import revocation_watch
from shared.net.tls.certificate_folder import ROOTS_FILE
from shared.net.tls.contexts import proved_chain
from shared.net.tls.revocation_watch import RevocationWatch, families
from shared.trust.revocation_lists import RevocationList
from shared.trust.spiffe import SpiffeId
from tests.support.revocation import HOUR_S, Hierarchy, put, revocation_list, serial, trust
from tests.support.tcp_peer import PATIENCE_S

HELLO = SpiffeId("demo.local", "/ns/demo/sa/hello")


class House:
    """A watch, and who distributes its files."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority.create("demo.local")
        self.leaf = self.authority.issue(HELLO)
        self.file, self.roots = folder / "crl.pem", folder / ROOTS_FILE
        self.authority.write(folder, self.leaf)
        self.now = time.time()
        self.watch = RevocationWatch(
            self.file, self.roots, purpose="test", look_every_s=0.01, clock=lambda: self.now
        )

    def revoke(self, *leaves: KeyPair, due_s: float = HOUR_S) -> None:
        put(self.file, revocation_list(self.authority, *map(serial, leaves), due_s=due_s))

    def chain(self) -> list[bytes]:
        leaf = x509.load_pem_x509_certificate(self.leaf.certificate_pem)
        return [one.public_bytes(Encoding.DER) for one in (leaf, self.authority.root)]


@pytest.fixture
def house(tmp_path: Path) -> House:
    house = House(tmp_path)
    house.revoke()
    house.watch.read()
    return house


async def test_a_change_is_seen(house: House) -> None:
    proof = house.watch.check(house.chain())
    calls: list[int] = []

    def end_revoked() -> int:
        calls.append(1)
        return 3

    house.watch.follow(end_revoked)
    await house.watch.check_files()
    assert not calls, "nothing has changed"
    house.revoke(house.leaf)
    await house.watch.check_files()
    assert calls == [1] and house.watch.ended == 3
    assert isinstance(house.watch.verdict(proof), RevokedError)
    with pytest.raises(RevokedError):
        house.watch.check(house.chain())
    assert house.watch.rejected == 1
    house.revoke()
    await house.watch.check_files()
    assert calls == [1, 1] and house.watch.verdict(proof) is None


async def test_it_looks_by_itself(house: House) -> None:
    seen = asyncio.Event()
    house.watch.follow(lambda: seen.set() or 0)
    house.watch.start()
    house.watch.start()  # once is enough
    try:
        house.revoke(house.leaf)
        async with asyncio.timeout(PATIENCE_S):
            await seen.wait()
    finally:
        house.watch.close()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no usable revocation lists"),
        (b"garbage", "no usable revocation lists"),
        (
            revocation_list(Authority.create("demo.local")).replace(b"X509", b"X508"),
            "no usable revocation lists",
        ),
        (None, "No such file or directory"),
    ],
    ids=["empty", "garbage", "label", "gone"],
)
async def test_a_bad_file_changes_nothing(
    house: House, content: bytes | None, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    house.revoke(house.leaf)
    await house.watch.check_files()
    if content is None:
        house.file.unlink()
    else:
        put(house.file, content)
    await house.watch.check_files()
    await house.watch.check_files()
    with pytest.raises(RevokedError):
        house.watch.check(house.chain())
    assert house.watch.failed == 1, "told once"
    assert f"test: keeping the revocation lists in use: {house.file}: {told}" in caplog.text


async def test_a_list_of_an_impostor_changes_nothing(house: House, caplog: pytest.LogCaptureFixture) -> None:
    put(house.file, revocation_list(Authority.create("demo.local"), serial(house.leaf)))
    await house.watch.check_files()
    house.watch.check(house.chain())
    assert "is not signed by the root of that name" in caplog.text


async def test_what_could_not_be_read_is_read_again_without_a_change(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every descriptor was taken at the moment; the revoked must not stay until the list after this one."""

    def too_many(path: Path, most_bytes: int) -> None:
        raise OSError(24, "Too many open files")

    proof = house.watch.check(house.chain())
    house.revoke(house.leaf)
    with monkeypatch.context() as patched:
        patched.setattr(regular_files, "_open", too_many)
        for _ in range(3):
            await house.watch.check_files()
    assert house.watch.verdict(proof) is None
    assert house.watch.failed == caplog.text.count("Too many open files") == 1
    await house.watch.check_files()
    assert isinstance(house.watch.verdict(proof), RevokedError)


async def test_signatures_are_checked_beside_the_event_loop(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a list with 150,000 entries takes 0.1 s."""
    mesh = Hierarchy("demo.local")
    leaf = mesh.issue(HELLO)
    trust(house.roots.parent, house.authority.root_pem, mesh.root_pem)
    proof = [*x509.load_pem_x509_certificates(leaf.certificate_pem), mesh.root.root]
    house.watch.check([one.public_bytes(Encoding.DER) for one in proof])
    threads: list[int] = []
    checked = RevocationList._is_signed_by

    def noted(self: RevocationList, issuer: x509.Certificate) -> bool:
        threads.append(threading.get_ident())
        return checked(self, issuer)

    monkeypatch.setattr(RevocationList, "_is_signed_by", noted)
    put(house.file, *map(revocation_list, (house.authority, mesh.root, mesh.intermediate)))
    await house.watch.check_files()
    assert house.watch.uncovered == []
    assert len(threads) == 3 and threading.get_ident() not in threads


async def test_new_roots_are_seen_too(house: House) -> None:
    """The list of a root that was not trusted when it came."""
    other = Authority.create("other.local")
    put(house.file, revocation_list(house.authority), revocation_list(other))
    await house.watch.check_files()
    assert house.watch.uncovered == []
    trust(house.roots.parent, house.authority.root_pem, other.root_pem, Authority.create("x").root_pem)
    await house.watch.check_files()
    assert [name for name in house.watch.uncovered] == ["'CN=throw-away CA of x'"]


async def test_an_overdue_list_is_told_once_and_stays(house: House, caplog: pytest.LogCaptureFixture) -> None:
    house.revoke(house.leaf, due_s=60)
    await house.watch.check_files()
    assert house.now < house.watch.next_update < house.now + 61
    assert "was to be replaced" not in caplog.text
    house.now += 61
    for _ in range(3):
        await house.watch.check_files()
    assert caplog.text.count("was to be replaced") == 1
    with pytest.raises(RevokedError):
        house.watch.check(house.chain())


def test_nothing_to_begin_with(tmp_path: Path) -> None:
    house = House(tmp_path)
    with pytest.raises(UnavailableError, match="No such file"):
        house.watch.read()
    put(house.file, b"garbage")
    with pytest.raises(ConfigError, match="no usable revocation lists"):
        house.watch.read()
    house.revoke()
    put(house.roots, b"garbage")
    with pytest.raises(ConfigError, match="no usable root certificates"):
        house.watch.read()
    assert house.watch.next_update == 0


def test_it_hands_on_what_is_in_use(house: House) -> None:
    assert house.watch.pem.encode() == house.file.read_bytes()


def test_the_numbers(house: House, tmp_path: Path) -> None:
    other = RevocationWatch(house.file, house.roots, purpose="other")
    other.rejected, other.ended, other.failed = 1, 2, 3
    house.watch.rejected = 4
    rows = families([("destination", "hbone", house.watch), ("destination", "reverse", other)])
    found = {
        (sample.name, *sample.labels.values()): sample.value for family in rows for sample in family.samples
    }
    due = found.pop(("hbone_crl_next_update_timestamp_seconds", "hbone"))
    assert abs(due - time.time() - HOUR_S) < 60
    assert found == {
        ("istio_crl_policy_rejections_total", "destination"): 5,
        ("hbone_crl_connections_ended_total", "hbone"): 0,
        ("hbone_crl_connections_ended_total", "reverse"): 2,
        ("hbone_crl_read_failures_total", "hbone"): 0,
        ("hbone_crl_read_failures_total", "reverse"): 3,
    }


def test_the_chain_of_a_handshake(tmp_path: Path) -> None:
    """With what Python has for it, from 3.11 on: leaf, intermediate, root."""
    mesh = Hierarchy()
    ends = []
    for name, make in (("server", ssl.PROTOCOL_TLS_SERVER), ("client", ssl.PROTOCOL_TLS_CLIENT)):
        folder = tmp_path / name
        mesh.write(folder, mesh.issue(HELLO))
        context = ssl.SSLContext(make)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(folder / "certificates.pem", folder / "private_key.pem")
        context.load_verify_locations(folder / ROOTS_FILE)
        ends.append(context)
    there, here = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = ends[0].wrap_bio(here, there, server_side=True)
    client = ends[1].wrap_bio(there, here)
    for _ in range(3):
        for end in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    certificates = (mesh.intermediate.root, mesh.root.root)
    for end in (server, client):
        leaf, *rest = proved_chain(end)
        assert leaf == end.getpeercert(binary_form=True)
        assert rest == [one.public_bytes(Encoding.DER) for one in certificates]


async def test_reading_does_not_hold_others_up(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A list of 100,000 takes a fifth of a second: in a thread."""
    threads = []
    read = revocation_watch._read

    def told(*files: Any) -> object:
        threads.append(threading.current_thread())
        return read(*files)

    monkeypatch.setattr(revocation_watch, "_read", told)
    caplog.set_level(logging.INFO)
    house.revoke(house.leaf)
    await house.watch.check_files()
    assert threads and threads[0] is not threading.main_thread()
    assert "revocation lists read again: 0 open connections ended" in caplog.text
