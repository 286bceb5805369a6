from __future__ import annotations

from pathlib import Path

import pytest

from bench.subjects import NAMES, TOKEN, World, krun, sni
from bench.tools import BenchError
from shared.tls import client_hello, istio_sni


def test_the_files_of_a_world(tmp_path: Path) -> None:
    world = World.create(tmp_path)
    assert world.token.read_text() == TOKEN
    for name, file in zip(NAMES, world.hellos, strict=True):
        hello = client_hello.parse(file.read_bytes())
        assert hello is not None
        assert hello.server_name == sni(name)
        assert istio_sni.parse(sni(name)).service == name


def test_a_subject_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="HBONE_INBOUND_LISTEN"), krun(World.create(tmp_path), "nowhere"):
        pass
