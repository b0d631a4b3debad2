# SPDX-License-Identifier: Apache-2.0
"""What ranks are told when another dies, leaves, is silent or cannot be reached, and that nothing is left behind."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.collectives.ranks import IN_STRESS, run_ranks
from vllm_arm.ops import collectives


def reduce_without_end(rank: int, handle: int) -> tuple[str, float]:
    """The error that ends it, and when it came."""
    sizes = random.Random(7)
    try:
        while True:
            collectives.all_reduce(handle, torch.ones(sizes.choice((1, 4096, 100_000))))
    except RuntimeError as error:
        return str(error), time.monotonic()


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=IN_STRESS)])
def test_every_rank_names_the_one_that_was_killed(kills: int) -> None:
    memory_files = set(Path("/dev/shm").iterdir())
    for number in range(kills):
        victim = number % 3
        killed: list[tuple[int, float]] = []

        def kill(pids: list[int], victim: int = victim, killed: list[tuple[int, float]] = killed) -> None:
            time.sleep(random.uniform(0, 0.1))
            killed.append((pids[victim], time.monotonic()))
            os.kill(pids[victim], signal.SIGKILL)

        outcomes = run_ranks(3, reduce_without_end, started=kill, may_die=True)
        assert outcomes[victim] is None
        (pid, moment) = killed[0]
        for rank in {0, 1, 2} - {victim}:
            message, noticed = outcomes[rank]
            assert message.startswith(f"all_reduce: rank {victim} (process {pid}) has died")
            assert noticed - moment < 5
    assert set(Path("/dev/shm").iterdir()) <= memory_files


def test_silence_is_an_error_that_names_the_silent_rank() -> None:
    def body(rank: int, handle: int) -> str:
        if rank == 2:
            time.sleep(3)
        try:
            for _ in range(2):
                collectives.all_reduce(handle, torch.ones(8))
        except RuntimeError as error:
            return str(error)
        return ""

    messages = run_ranks(3, body, timeout_seconds=0.5)
    for message in messages:
        assert message.startswith("all_reduce: rank 2 (process ")
        assert "has been silent for 0.5 s (VLLM_ARM_COLLECTIVE_TIMEOUT)" in message


def test_a_rank_that_closes_is_named_and_its_handle_is_gone() -> None:
    def body(rank: int, handle: int) -> tuple[str, bool]:
        if rank == 1:
            collectives.close(handle)
            collectives.close(handle)
        try:
            collectives.barrier(handle)
        except RuntimeError as error:
            return str(error), collectives.is_open(handle)
        return "", True

    (first, still_open), (second, reopened) = run_ranks(2, body)
    assert "rank 1" in first
    assert "has closed the communicator" in first
    assert still_open
    assert second == "barrier: no communicator has the handle 0"
    assert not reopened


def test_one_rank_without_memory_fails_all_and_names_it() -> None:
    # The other rank gave no address and said why.
    answers = iter([["", ""], ["no 8388608 bytes of shared memory: No space left on device", ""]])
    with pytest.raises(RuntimeError, match="open_communicator: rank 0: no 8388608 bytes of shared memory"):
        collectives.open_communicator(1, 2, lambda _: next(answers))


def test_a_rank_on_another_host_is_named() -> None:
    failures: list[str] = []

    def exchange(text: str) -> list[str]:
        if text and not failures:
            host, _, rest = text.partition(" ")
            failures.append("once")
            return [text, f"{host}-other {rest}"]
        return [text, ""]

    with pytest.raises(RuntimeError, match="rank 1 cannot be reached: it is on another host or in another PID"):
        collectives.open_communicator(0, 2, exchange)
    assert not collectives.is_open(0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda h: collectives.all_reduce(h, torch.zeros(4, dtype=torch.float64)),
            "tensor has dtype Double",
        ),
        (lambda h: collectives.all_gather(h, torch.zeros(5), torch.zeros(4)), "output has 5 elements, expected 4"),
        (lambda h: collectives.all_gather(h, torch.zeros(4).int(), torch.zeros(4)), "output has another dtype"),
        (lambda h: collectives.all_gatherv(h, torch.zeros(4), torch.zeros(4), [4, 4]), "sizes has 2 entries"),
        (lambda h: collectives.all_gatherv(h, torch.zeros(4), torch.zeros(4), [3]), "input has 4 rows, expected"),
        (lambda h: collectives.gather(h, None, torch.zeros(4), 0), "output is missing on the destination"),
        (lambda h: collectives.broadcast(h, torch.zeros(4), 3), "source is 3, expected 0 to 0"),
        (lambda h: collectives.send(h, torch.zeros(4), 0), "destination is this rank itself"),
        (lambda _: collectives.barrier(77), "barrier: no communicator has the handle 77"),
        (lambda _: collectives.open_communicator(0, 65, lambda t: [t] * 65), "world_size is 65, expected 1 to 64"),
        (
            lambda _: collectives.open_communicator(0, 2, lambda t: [t, t], bytes_per_rank=4096),
            "bytes_per_rank is 4096, too few",
        ),
    ],
)
def test_a_bad_argument_is_named(call, message: str) -> None:  # type: ignore[no-untyped-def]
    handle = collectives.open_communicator(0, 1, lambda text: [text])
    try:
        with pytest.raises(RuntimeError, match=message):
            call(handle)
    finally:
        collectives.close(handle)


def test_a_group_of_one_needs_nobody() -> None:
    handle = collectives.open_communicator(0, 1, lambda text: [text])
    tensor = torch.arange(100_000, dtype=torch.float32)
    expected = tensor.clone()
    output = torch.empty_like(tensor)
    collectives.all_reduce(handle, tensor)
    collectives.broadcast(handle, tensor, 0)
    collectives.all_gather(handle, output, tensor)
    assert torch.equal(output, expected)
    collectives.reduce_scatter(handle, output.zero_(), tensor)
    assert torch.equal(output, expected)
    collectives.barrier(handle)
    collectives.close(handle)
