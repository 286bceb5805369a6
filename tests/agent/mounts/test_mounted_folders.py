"""Folders that follow their Secrets and ConfigMaps."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.config.mount_settings import Mount, ObjectName
from agent.mounts.cluster_objects import ClusterObjects
from agent.mounts.mounted_folders import MAX_REQUESTS, MountedFolders
from shared.errors import UnavailableError
from shared.tasks import spawn
from tests.agent.mounts.test_cluster_objects import APP, DB, b64
from tests.support.api_server import LocalApiServer, access


@pytest.fixture
async def server() -> AsyncIterator[LocalApiServer]:
    async with LocalApiServer() as server:
        await server.put("secrets", DB.name, data={"user": b64(b"me"), "password": b64(b"one")})
        await server.put("configmaps", APP.name, data={"mode": "fast"}, binaryData={"logo": b64(b"\0")})
        yield server


@asynccontextmanager
async def mounted(
    server: LocalApiServer, *mounts: Mount, refresh_s: float = 0.01, owner: tuple[int, int] | None = None
) -> AsyncIterator[MountedFolders]:
    it = MountedFolders(mounts, ClusterObjects(access(server)), refresh_s=refresh_s, owner=owner)
    try:
        await it.start()
        yield it
    finally:
        it.close()


async def rounds(server: LocalApiServer, count: int = 2) -> None:
    """Returns when so many comparisons more of one object have begun: all but the last one are over."""
    await server.seen(len(server.requests) + count)


def files_in(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and mode of what a reader sees."""
    return {
        entry.name: (entry.read_bytes(), stat.S_IMODE(entry.stat().st_mode))
        for entry in folder.iterdir()
        if not entry.name.startswith("..")
    }


def counts(it: MountedFolders) -> dict[tuple[str, str], float]:
    (family,) = it.families()
    return {(one.labels["mount"], one.labels["result"]): one.value for one in family.samples}


async def test_files_are_as_kubelet_writes_them(server: LocalApiServer, tmp_path: Path) -> None:
    db, app = tmp_path / "etc" / "db", tmp_path / "etc" / "app"
    async with mounted(server, Mount(DB, db, False), Mount(APP, app, False), refresh_s=60):
        assert files_in(db) == {"user": (b"me", 0o600), "password": (b"one", 0o600)}
        assert files_in(app) == {"mode": (b"fast", 0o644), "logo": (b"\0", 0o644)}
        assert os.readlink(db / "user") == "..data/user"
        assert os.readlink(db / "..data").startswith("..1")


async def test_a_change_turns_all_files_at_once(server: LocalApiServer, tmp_path: Path) -> None:
    async with mounted(server, Mount(DB, tmp_path / "a", False), Mount(DB, tmp_path / "b", False)):
        before = os.readlink(tmp_path / "a" / "..data")
        await rounds(server, 3)
        assert os.readlink(tmp_path / "a" / "..data") == before, "what has not changed is not written"
        await server.put("secrets", DB.name, data={"password": b64(b"two"), "port": b64(b"1")})
        await rounds(server)
        for folder in (tmp_path / "a", tmp_path / "b"):
            assert files_in(folder) == {"password": (b"two", 0o600), "port": (b"1", 0o600)}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
async def test_files_are_given_away(server: LocalApiServer, tmp_path: Path) -> None:
    async with mounted(server, Mount(DB, tmp_path / "a", False), owner=(1234, 1235)):
        status = (tmp_path / "a" / "user").stat()
        assert (status.st_uid, status.st_gid) == (1234, 1235)


async def test_while_it_cannot_be_read_the_files_stay(
    server: LocalApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hbone.mounts")
    async with mounted(server, Mount(DB, tmp_path / "a", False)) as it:
        server.answer = lambda _: (503, b"{}")
        await rounds(server, 4)
        assert counts(it)["secret/db-credentials", "failure"] > 1
        assert files_in(tmp_path / "a")["password"] == (b"one", 0o600)
        await server.delete("secrets", DB.name)
        server.answer = lambda _: None
        await rounds(server)
        assert files_in(tmp_path / "a")["password"] == (b"one", 0o600), "nor does one that is gone take them"
        await server.put("secrets", DB.name, data={"password": b64(b"two")})
        await rounds(server)
        assert files_in(tmp_path / "a")["password"] == (b"two", 0o600)
        assert counts(it)["secret/db-credentials", "success"] > 0
    lines = [line for line in caplog.messages if "written to" not in line]
    assert len(lines) == 2, lines
    assert lines[0].startswith(
        "secret/db-credentials: the files stay as they are until it can be read again: "
    )
    assert lines[1] == "secret/db-credentials: it can be read again"


async def test_one_that_may_be_missing_comes_and_goes(server: LocalApiServer, tmp_path: Path) -> None:
    absent = ObjectName("configmap", "absent")
    async with mounted(server, Mount(absent, tmp_path / "a", True)):
        assert files_in(tmp_path / "a") == {}
        await server.put("configmaps", "absent", data={"k": "v"})
        await rounds(server)
        assert files_in(tmp_path / "a") == {"k": (b"v", 0o644)}
        await server.delete("configmaps", "absent")
        await rounds(server)
        assert files_in(tmp_path / "a") == {}


async def test_one_that_is_missing_at_the_start(server: LocalApiServer, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="there is no configmap/absent of namespace demo"):
        async with mounted(server, Mount(ObjectName("configmap", "absent"), tmp_path / "a", False)):
            pass
    assert not (tmp_path / "a").exists()


async def test_a_folder_that_cannot_be_written(server: LocalApiServer, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    with pytest.raises(UnavailableError, match=f"^cannot write {tmp_path}/a: File exists$"):
        async with mounted(server, Mount(DB, tmp_path / "a", False)):
            pass


async def test_few_are_asked_for_at_once(server: LocalApiServer, tmp_path: Path) -> None:
    names = [ObjectName("secret", f"s{number}") for number in range(10)]
    server.answer = lambda _: (200, b"{}")
    server.gate.clear()
    it = MountedFolders(
        [Mount(name, tmp_path / name.name, False) for name in names],
        ClusterObjects(access(server)),
        refresh_s=60,
    )
    starting = spawn(it.start(), name="start")
    await server.seen(MAX_REQUESTS)
    assert len(server.requests) == MAX_REQUESTS
    server.gate.set()
    await starting
    it.close()
    assert len(server.requests) == 10
