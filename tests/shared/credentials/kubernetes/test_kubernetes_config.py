"""Kubeconfig files: what is taken from them, and what each mistake says, never with a secret in it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shared.credentials.kubernetes.kubernetes_config import read_config
from shared.errors import ConfigError, TokenError, UnavailableError

SECRET = "S3cret-Token"


def config(
    *, cluster: dict[str, Any] | None = None, user: dict[str, Any] | None = None, **others: Any
) -> dict[str, Any]:
    """A kubeconfig with one of everything."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://k8s.example:6443/"} | (cluster or {})}],
        "users": [{"name": "u", "user": {"token": SECRET} if user is None else user}],
        **others,
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config"


def write(file: Path, content: object) -> Path:
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return file


def refused(file: Path, content: object) -> str:
    """What reading it says."""
    with pytest.raises(ConfigError) as error:
        read_config([write(file, content)])
    assert SECRET not in str(error.value)
    return str(error.value).removeprefix(str(file))


# What is taken.


async def test_a_token(file: Path) -> None:
    found = read_config([write(file, config())])
    assert (found.server, found.namespace, found.authority) == ("https://k8s.example:6443", "default", None)
    assert await found.bearer.token() == SECRET


async def test_a_token_file_beside_it_which_comes_before_a_token(file: Path) -> None:
    (file.parent / "sub").mkdir()
    (file.parent / "sub" / "token").write_text("fr0m-file\n")
    found = read_config([write(file, config(user={"tokenFile": "sub/token", "token": SECRET}))])
    assert await found.bearer.token() == "fr0m-file"
    (file.parent / "sub" / "token").unlink()
    with pytest.raises(TokenError, match="cannot read token file"):
        await found.bearer.token()


async def test_certificates_in_the_file_and_beside_it(file: Path) -> None:
    data = {name: base64.b64encode(name.encode()).decode() for name in ("ca", "crt", "key")}
    found = read_config(
        [
            write(
                file,
                config(
                    cluster={"certificate-authority-data": data["ca"], "certificate-authority": "not/me"},
                    user={"client-certificate-data": data["crt"], "client-key": "own.key"},
                ),
            )
        ]
    )
    assert found.authority is not None and found.authority.read() == b"ca"
    assert found.certificate is not None and found.certificate[0].read() == b"crt"
    assert found.certificate[1].file == file.parent / "own.key"
    assert await found.bearer.token() is None


def test_several_files_count_as_one(tmp_path: Path) -> None:
    first = {"current-context": "two", "users": [{"name": "u", "user": {"token": "fr0m-first"}}]}
    second = config(contexts=[{"name": "two", "context": {"cluster": "c", "user": "u", "namespace": "ns"}}])
    second["current-context"] = "here"
    files = [write(tmp_path / "a", first), tmp_path / "missing", write(tmp_path / "b", second)]
    found = read_config(files)
    assert found.namespace == "ns"
    assert "fr0m-first" not in repr(found)


# What is not.


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("a: [", ":1: no valid YAML"),
        (f"token: {SECRET}\n  x: 'unclosed {SECRET}", ":2: no valid YAML"),
        ("a: !python/object:os.system {}", ":1: no valid YAML"),
        ("a: \x00", ": no valid YAML"),
        ("just text", ": no kubeconfig: it is no mapping"),
        ("", ": no kubeconfig: it is no mapping"),
        ({}, ": current-context: not set: which context is meant?"),
        ({"current-context": 7}, ": current-context: not set: which context is meant?"),
        (config(contexts=[]), ": contexts: no context 'here'"),
        (config(contexts={"here": 1}), ": contexts: no context 'here'"),
        (config(contexts=[7, {"name": "here"}]), ": contexts[here].cluster: not set"),
        (config(clusters=None), ": clusters: no cluster 'c'"),
        (config(users=[]), ": users: no user 'u'"),
        (config(cluster={"server": 7}), ": clusters[c].server: has to be a text"),
        (
            config(cluster={"server": "http://k8s"}),
            ": clusters[c].server: has to begin with https://, or all",
        ),
        (
            config(cluster={"insecure-skip-tls-verify": True}),
            ": clusters[c].insecure-skip-tls-verify: not supported",
        ),
        (config(cluster={"proxy-url": "http://p"}), ": clusters[c].proxy-url: not supported"),
        (
            config(cluster={"certificate-authority-data": SECRET}),
            ": clusters[c].certificate-authority-data: no base64",
        ),
        (
            config(user={}),
            ": users[u]: no token, tokenFile, exec or client-certificate: we would be anonymous",
        ),
        (config(user={"as": "admin", "token": SECRET}), ": users[u].as: not supported"),
        (config(user={"username": "u", "password": SECRET}), ": users[u].username: not supported"),
        (config(user={"auth-provider": {"name": "gcp"}}), ": users[u].auth-provider: not supported"),
        (config(user={"token": f"{SECRET} x"}), ": users[u].token: has characters that no header can carry"),
        (
            config(user={"client-certificate": "a"}),
            ": users[u].client-certificate: a client certificate and its key",
        ),
    ],
)
def test_mistakes(file: Path, content: object, reason: str) -> None:
    assert refused(file, content).startswith(reason)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"no kubeconfig: .*/a, .*/b: no such file"):
        read_config([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(UnavailableError, match=r"cannot read .*: it is a directory"):
        read_config([tmp_path])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "cluster", "user", "context", "token", "exec", "server"]), inner
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["current-context", "contexts", "clusters", "users"]), VALUES))
def test_any_content_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any]
) -> None:
    file = tmp_path_factory.mktemp("any") / "config"
    for key, value in config().items():
        content.setdefault(key, value)
    try:
        read_config([write(file, content)])
    except (ConfigError, UnavailableError) as error:
        assert "\n" not in str(error)
