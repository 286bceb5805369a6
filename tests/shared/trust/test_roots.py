"""Roots from all places, each once."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from shared.credentials.certificates.authority import Authority
from shared.errors import ConfigError, UnavailableError
from shared.net.tls.root_files import ISTIO_ROOT_FILE, RootSources
from shared.trust import roots
from shared.trust.roots import bundle_map, merge, parse, trust_domain
from shared.trust.spiffe import SpiffeId
from tests.support.bundles import bundles

ONE, TWO, THREE = (Authority.create(f"{name}.example") for name in ("one", "two", "three"))


def test_all_places_are_merged_in_order_and_each_root_counts_once(tmp_path: Path) -> None:
    pem, bundle, mounted = tmp_path / "roots.pem", tmp_path / "trust_bundles.json", tmp_path / "root-cert.pem"
    pem.write_bytes(TWO.root_pem + ONE.root_pem)
    bundle.write_bytes(bundles({"three.example": [THREE], "two.example": [TWO]}))
    mounted.write_bytes(THREE.root_pem)
    sources = RootSources(
        texts={"CAROOT_ISTIOD": ONE.root_pem.decode()}, files=(pem, bundle), optional_files=(mounted,)
    )
    assert parse(sources.read()) == [ONE.root, TWO.root, THREE.root]


def test_maps_of_bundles_are_put_together(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.json", "b.json", "roots.pem", "missing.json")]
    files[0].write_bytes(bundles({"one.example": [ONE], "two.example": [TWO]}))
    files[1].write_bytes(bundles({"two.example": [THREE]}))
    files[2].write_bytes(ONE.root_pem)
    found = RootSources(files=tuple(files[:3]), optional_files=(files[3],)).read_bundles()
    assert bundle_map(found, "x") == {"one.example": [ONE.root], "two.example": [TWO.root, THREE.root]}
    assert RootSources(files=(files[2],), optional_files=()).read_bundles() == b""
    files[1].write_text("oops")
    with pytest.raises(ConfigError, match=f"{files[1]}: no map of SPIFFE bundles"):
        RootSources(files=tuple(files[:3]), optional_files=()).read_bundles()


def test_a_text_on_one_line_has_its_ends_written_out() -> None:
    text = ONE.root_pem.decode().replace("\n", "\\n")
    assert parse(RootSources(texts={"CAROOT_CAS": text}, optional_files=()).read()) == [ONE.root]


def test_none_at_all(tmp_path: Path) -> None:
    assert RootSources(optional_files=(tmp_path / "missing",)).read() == b""


def test_the_config_map_is_looked_for_where_istio_mounts_it() -> None:
    assert RootSources().optional_files == (ISTIO_ROOT_FILE,)
    assert str(ISTIO_ROOT_FILE) == "/var/run/secrets/istio/root-cert.pem"


def test_an_optional_file_that_is_there_has_to_be_good(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=f"{tmp_path}: it is a directory"):
        RootSources(optional_files=(tmp_path,)).read()


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=f"root certificates: {tmp_path}/x: No such file or directory"):
        RootSources(files=(tmp_path / "x",)).read()


@pytest.mark.parametrize("content", [b"", b"oops", ONE.root_pem[:200], b"-----BEGIN CERTIFICATE-----\n"])
def test_what_is_no_root_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "roots.pem"
    file.write_bytes(content)
    told = "no usable root certificates: no certificates in PEM, or broken ones"
    with pytest.raises(ConfigError, match=f"{file}: {told}"):
        RootSources(optional_files=(file,)).read()
    with pytest.raises(ConfigError, match=f"CAROOT_CAS: {told}"):
        RootSources(texts={"CAROOT_CAS": content.decode() + "x"}).read()


def test_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots, "MAX_ROOTS", 2)
    with pytest.raises(ValueError, match="more than 2 certificates"):
        parse(ONE.root_pem * 3)
    file = tmp_path / "roots.pem"
    file.write_bytes(TWO.root_pem + THREE.root_pem)
    sources = RootSources({"CAROOT_CAS": ONE.root_pem.decode()}, (file,), ())
    with pytest.raises(ConfigError, match="root certificates: more than 2"):
        sources.read()


def test_too_long(tmp_path: Path) -> None:
    file = tmp_path / "roots.pem"
    with file.open("wb") as opened:
        opened.truncate(1 << 30)
    with pytest.raises(UnavailableError, match="longer than 4194304 bytes"):
        RootSources(files=(file,)).read()


def test_texts_are_merged() -> None:
    both = merge(ONE.root_pem, b"", b"\n", b"# a comment\n" + TWO.root_pem + ONE.root_pem)
    assert both == ONE.root_pem + TWO.root_pem
    with pytest.raises(ValueError, match="no certificates"):
        merge(ONE.root_pem, b"oops")


def test_a_root_may_name_its_trust_domain() -> None:
    assert trust_domain(ONE.root) == "one.example"
    nameless = x509.load_pem_x509_certificate(ONE.issue(dns_names=["x"]).certificate_pem)
    assert trust_domain(nameless) == ""
    workload = x509.load_pem_x509_certificate(ONE.issue(SpiffeId("one.example", "/x")).certificate_pem)
    assert trust_domain(workload) == "", "it names a workload"


def test_the_map_of_bundles_has_roots_by_trust_domain() -> None:
    assert bundle_map(bundles({"one.example": [ONE, TWO], "three.example": []}), "x") == {
        "one.example": [ONE.root, TWO.root],
        "three.example": [],
    }


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"trust_domains": []}',
        b'{"trust_domains": {"UPPER": {"keys": []}}}',
        b'{"trust_domains": {"a": {}}}',
        b'{"trust_domains": {"a": {"keys": [{"use": "x509-svid"}]}}}',
        b'{"trust_domains": {"a": {"keys": [{"use": "x509-svid", "x5c": []}]}}}',
        b'{"trust_domains": {"a": {"keys": [{"use": "x509-svid", "x5c": ["?"]}]}}}',
        b'{"trust_domains": {"a": {"keys": [{"use": "x509-svid", "x5c": ["AAAA"]}]}}}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_map(content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"bundles\.json: no map of SPIFFE bundles"):
        bundle_map(content, "bundles.json")


@given(
    st.recursive(
        st.none() | st.text() | st.integers(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["trust_domains", "keys", "use", "x5c", "a", "x509-svid"]), inner
            )
        ),
        max_leaves=8,
    )
)
def test_any_json_is_a_map_or_an_error(value: object) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(bundle_map(json.dumps({"trust_domains": value}).encode(), "x"), dict)


@given(st.binary(max_size=300), st.integers(0, 700))
def test_any_bytes_are_roots_or_an_error(junk: bytes, cut: int) -> None:
    try:
        parse(ONE.root_pem[:cut] + junk)
    except ValueError as error:
        assert str(error) == "no certificates in PEM, or broken ones"
