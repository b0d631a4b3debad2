# SPDX-License-Identifier: Apache-2.0
"""Runs a function as every rank of a communicator, each in a process forked from this one."""

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from vllm_arm.ops import collectives

IN_STRESS = pytest.mark.skipif(os.environ.get("VLLM_ARM_STRESS") != "1", reason="takes minutes: make stress")
"""Marks what is too long for every run of the tests."""

_FORK = multiprocessing.get_context("fork")
Body = Callable[[int, int], Any]


class Exchange:
    """Gives every rank's text to every rank, by way of the parent."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __call__(self, text: str) -> list[str]:
        self._pipe.send(("exchange", text))
        answer: list[str] = self._pipe.recv()
        return answer


def _run(rank: int, world_size: int, pipe: Connection, body: Body, threads: int, options: dict[str, Any]) -> None:
    try:
        torch.set_num_threads(threads)
        handle = collectives.open_communicator(rank, world_size, Exchange(pipe), **options)
        result = ("result", body(rank, handle))
    except BaseException as error:
        result = ("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    pipe.send(result)
    pipe.recv()  # until the others are done too
    os._exit(0)


def _run_in_thread(*arguments: Any) -> None:
    # A thread makes OpenMP threads of its own, where this one has those of the parent, which were not forked with it.
    thread = threading.Thread(target=_run, args=arguments)
    thread.start()
    thread.join()


def run_ranks(
    world_size: int,
    body: Body,
    *,
    threads: int | list[int] = 1,
    started: Callable[[list[int]], None] = lambda _: None,
    may_die: bool = False,
    **options: Any,
) -> list[Any]:
    """The results of ``body(rank, handle)`` on each rank; None for a rank that died.

    ``options`` are those of ``open_communicator``; ``started`` is given the process ids when all have connected. Raises
    ``RuntimeError`` with a rank's traceback if it raised or, unless it ``may_die``, ended.
    """
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = _FORK.Pipe()
        count = threads if isinstance(threads, int) else threads[rank]
        process = _FORK.Process(
            target=_run_in_thread, args=(rank, world_size, theirs, body, count, options), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        outcomes: list[Any] = [None] * world_size
        for _ in range(2):
            texts = []
            for rank, pipe in enumerate(pipes):
                kind, text = pipe.recv()
                assert kind == "exchange", f"rank {rank}: {text}"
                texts.append(text)
            for pipe in pipes:
                pipe.send(texts)
        started([process.pid or 0 for process in processes])
        for rank, pipe in enumerate(pipes):
            try:
                kind, outcomes[rank] = pipe.recv()
            except (EOFError, ConnectionResetError):
                if not may_die:
                    raise RuntimeError(f"rank {rank} ended") from None
                continue
            if kind == "error":
                raise RuntimeError(f"rank {rank}: {outcomes[rank]}")
        return outcomes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether ``condition`` comes true in that time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()
