from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shared.net.relay import pipes as pipes_module
from shared.net.relay.pipes import (
    LEAST_BYTES,
    PIPE_BYTES,
    SPARE_PIPES,
    Pipe,
    Pipes,
)
from tests.support.few_files import most_open_files


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    before = open_files()
    pipes = Pipes(SPARE_PIPES + 4)
    yield pipes
    pipes.close()
    assert pipes.lent == 0
    assert open_files() == before


def take(pipes: Pipes) -> Pipe:
    pipe = pipes.lend()
    assert pipe is not None
    return pipe


def largest_pipe() -> int:
    with open("/proc/sys/fs/pipe-max-size") as file:
        return int(file.read())


def test_a_pipe_is_as_large_as_it_may_be(pipes: Pipes) -> None:
    pipe = take(pipes)
    assert pipe.size == min(PIPE_BYTES, largest_pipe())
    pipes.give_back(pipe)


def test_an_emptied_pipe_is_lent_again(pipes: Pipes) -> None:
    pipe = take(pipes)
    assert pipes.lent == 1
    pipes.give_back(pipe)
    assert pipes.lent == 0
    assert take(pipes) is pipe
    pipes.give_back(pipe)


def test_a_pipe_with_bytes_in_it_is_not_lent_again(pipes: Pipes) -> None:
    pipe = take(pipes)
    pipe.bytes = os.write(pipe.write_end, b"somebody's secret")
    pipes.give_back(pipe)
    other = take(pipes)
    with pytest.raises(BlockingIOError):
        os.read(other.read_end, 1)
    pipes.give_back(other)


def test_no_more_than_the_bound(pipes: Pipes) -> None:
    lent = [take(pipes) for _ in range(pipes.most)]
    assert pipes.lend() is None
    pipes.give_back(lent.pop())
    lent.append(take(pipes))
    before = open_files()
    for pipe in lent:
        pipes.give_back(pipe)
    assert before - open_files() == 2 * (pipes.most - SPARE_PIPES), "the rest is not kept"


def test_none_at_all() -> None:
    assert Pipes(0).lend() is None


def test_no_descriptor_left(pipes: Pipes) -> None:
    with most_open_files(0):
        assert pipes.lend() is None
    pipes.give_back(take(pipes))


def test_a_machine_that_allows_less(monkeypatch: pytest.MonkeyPatch, pipes: Pipes) -> None:
    """More than pipe-max-size is EPERM; for root it is not, but so large a one is ENOMEM."""
    monkeypatch.setattr(pipes_module, "PIPE_BYTES", (1 << 31) - 1)
    pipe = take(pipes)
    assert LEAST_BYTES <= pipe.size < 1 << 31
    pipes.give_back(pipe)


def test_a_pipe_that_is_too_small_to_be_of_use(monkeypatch: pytest.MonkeyPatch, pipes: Pipes) -> None:
    """What the kernel gives a user who has used up pipe-user-pages-soft."""
    monkeypatch.setattr(pipes_module, "LEAST_BYTES", 2 * PIPE_BYTES)
    assert pipes.lend() is None
