"""What the files of the Secret say."""

from __future__ import annotations

from pathlib import Path

from agent.ssh import host_keys
from agent.ssh.key_material import KeyMaterial, of_files, of_folder, of_variable
from tests.support.ssh_clients import keygen, new_key

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIABX1TL3Kd0qjPfNcm6VNlEdGiUnle7XRhWSDdeYpMa8"


def test_keys_of_all_names_and_places(tmp_path: Path) -> None:
    folder = tmp_path / "secret"
    folder.mkdir()
    (folder / "authorized_keys").write_text(f"{KEY} one\n{KEY} two\n")
    (folder / "authorized_key_bob").write_text(f"{KEY} bob")
    (folder / "trusted_user_ca_keys").write_text(f"{KEY} ca")
    (folder / "..data").mkdir()
    found = of_variable(f"{KEY} me").beside(of_folder(folder))
    assert [key.comment for key in found.keys] == ["me", "bob", "one", "two", "ca"]
    assert [key.is_authority for key in found.keys] == [False, False, False, False, True]
    assert found.origins == ("SSH_AUTH", str(folder))
    assert found.enables and not found.warnings
    assert not of_folder(tmp_path / "none").enables


def test_a_mistake_is_a_warning_and_the_rest_counts() -> None:
    found = of_files(
        {
            "authorized_keys": b"hello",
            "authorized_key_a": KEY.encode(),
            "id_ecdsa-cert.pub": KEY.encode(),
            "SSHCA_ADDR": b"ca:8080",
            "readme": b"",
            "id_ecdsa.pub": b"ignored",
        },
        "Secret sshdebug",
    )
    assert len(found.keys) == 1
    authority, readme, keys, certificate = sorted(found.warnings)
    assert authority.startswith("SSHCA_ADDR of Secret sshdebug is not used")
    assert "trusted_user_ca_keys" in authority
    assert keys.startswith("id_ecdsa-cert.pub of Secret sshdebug is not used") or keys.startswith(
        "authorized_keys"
    )
    assert "no name that an sshd's files have" in certificate or "no name" in readme


def test_each_change_has_another_digest() -> None:
    one, two = of_variable(KEY), of_variable(f"{KEY} me")
    assert one.digest != two.digest
    assert one.digest == of_variable(KEY).digest
    assert KeyMaterial(host_keys={"id_rsa": b"x"}).digest != KeyMaterial().digest
    assert "x" not in repr(KeyMaterial(host_keys={"id_rsa": b"x"}))


def test_host_keys_of_all_forms(tmp_path: Path) -> None:
    keygen("-t", "ecdsa", "-m", "PEM", "-N", "", "-f", tmp_path / "id_ecdsa")
    new_key(tmp_path, "ssh_host_ed25519_key")
    keygen("-t", "ed25519", "-N", "a passphrase", "-f", tmp_path / "id_ed25519")
    names = ("id_ecdsa", "ssh_host_ed25519_key", "id_ed25519")
    files = {name: (tmp_path / name).read_bytes() for name in names}
    found, warnings = host_keys.read({**files, "id_rsa": b"hello"}, {"id_none": "a line"})
    assert {key.name for key in found} == {"id_ecdsa", "ssh_host_ed25519_key"}
    assert sorted(warnings) == [
        "host certificate id_none-cert.pub is not used: there is no id_none",
        "host key id_ed25519 is not used: it has a passphrase",
        "host key id_rsa is not used: it is no private key of a type that sshd has",
    ]
    public = (tmp_path / "ssh_host_ed25519_key.pub").read_text()
    assert public.startswith(found[1].public)
