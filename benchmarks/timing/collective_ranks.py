# SPDX-License-Identifier: Apache-2.0
"""Times collective operations in a group of processes: ours, vLLM's in shared memory and gloo's, taking turns."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

# What vLLM's operators are written for.
UPSTREAM_WORLD_SIZES = (2, 3, 4, 8)
WARM_UPS = 5
DTYPE = torch.bfloat16
Run = Callable[[], object]


@dataclass(frozen=True)
class Plan:
    """What every rank does: for each op and size, ``rounds`` turns of ``iterations`` calls of each implementation.

    ``sizes`` are bytes that a rank gives, ``threads`` those of each rank.
    """

    ranks: int
    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    threads: int
    rounds: int
    iterations: int

    def calls(self, size: int, implementation: str) -> int:
        """Calls in a turn: fewer of large messages, and of gloo, which is slow."""
        most = max(10, min(self.iterations, (128 << 20) // size))
        return max(5, most // 10) if implementation == "gloo" else most


def measure(plan: Plan) -> list[dict[str, Any]]:
    """A row for each op, size and implementation: percentiles in microseconds, of the calls of all ranks.

    Raises ``RuntimeError`` where a result is wrong.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    torch.multiprocessing.spawn(_rank, (plan, port, results), plan.ranks)
    rows: list[dict[str, Any]] = results.get()
    return rows


def _rank(rank: int, plan: Plan, port: int, results: Any) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    first = rank * plan.threads
    os.sched_setaffinity(0, {cpus[(first + thread) % len(cpus)] for thread in range(plan.threads)})
    torch.set_num_threads(plan.threads)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=plan.ranks)
    from vllm_arm.ops import collectives

    handle = collectives.open_communicator(rank, plan.ranks, _exchange)
    upstream = _upstream(rank, plan) if plan.ranks in UPSTREAM_WORLD_SIZES else None
    rows = []
    for op in plan.ops:
        for size in plan.sizes:
            runs = _runs(op, size, plan.ranks, handle, upstream)
            times = _take_turns(plan, size, runs, handle)
            everything: list[Any] = [None] * plan.ranks
            torch.distributed.all_gather_object(everything, times)
            rows += [_row(op, size, plan.ranks, name, [t for of in everything for t in of[name]]) for name in times]
    if rank == 0:
        results.put(rows)
    torch.distributed.barrier()
    collectives.close(handle)
    torch.distributed.destroy_process_group()


def _exchange(text: str) -> list[str]:
    texts = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(texts, text)
    return texts


def _upstream(rank: int, plan: Plan) -> tuple[Any, int] | None:
    """vLLM's operators and the handle of their group; None where vLLM is not installed."""
    from benchmarks.cases.upstream import operators

    try:
        vllm = operators()
    except ImportError:
        return None
    name = f"vllm_arm_benchmark_{os.getppid()}"
    handle = vllm.init_shm_manager(name, plan.ranks, rank, plan.threads)
    torch.distributed.barrier()
    vllm.join_shm_manager(handle, name)
    torch.distributed.barrier()
    return vllm, handle


def _runs(op: str, size: int, ranks: int, handle: int, upstream: tuple[Any, int] | None) -> dict[str, Run]:
    """One call of each implementation, whose results have been compared."""
    tensor = torch.zeros(max(1, size // DTYPE.itemsize), dtype=DTYPE)
    output = torch.zeros(ranks * tensor.numel(), dtype=DTYPE)
    ours, distributed = torch.ops.vllm_arm, torch.distributed
    runs: dict[str, Run] = {}
    if op == "all_reduce":
        runs["ours"] = lambda: ours.collective_all_reduce(tensor, handle)
        if upstream is not None:
            vllm, group = upstream
            runs["vllm_shm"] = lambda: vllm.shm_allreduce(group, tensor)
        runs["gloo"] = lambda: distributed.all_reduce(tensor)
    else:
        runs["ours"] = lambda: ours.collective_all_gather(output, tensor, handle, None)
        if upstream is not None:
            vllm, group = upstream
            runs["vllm_shm"] = lambda: vllm.shm_all_gather(group, tensor, output)
        runs["gloo"] = lambda: distributed.all_gather_into_tensor(output, tensor)
    for name, run in runs.items():
        tensor.fill_(torch.distributed.get_rank() + 1)
        run()
        result = tensor if op == "all_reduce" else output.view(ranks, -1).sum(0)
        if not bool((result == ranks * (ranks + 1) // 2).all()):
            raise RuntimeError(f"{name}: {op} of {size} bytes gave a wrong result")
    # Zeros, which stay what they are however often they are added.
    tensor.zero_()
    return runs


def _take_turns(plan: Plan, size: int, runs: dict[str, Run], handle: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(plan.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            run = runs[name]
            for _ in range(WARM_UPS):
                run()
            torch.ops.vllm_arm.collective_barrier(handle)
            for _ in range(plan.calls(size, name)):
                begin = time.perf_counter_ns()
                run()
                times[name].append((time.perf_counter_ns() - begin) / 1e3)
    return times


def _row(op: str, size: int, ranks: int, implementation: str, times: list[float]) -> dict[str, Any]:
    times.sort()
    return {
        "op": op,
        "dtype": str(DTYPE).removeprefix("torch."),
        "bytes": size,
        "ranks": ranks,
        "impl": implementation,
        **{f"p{percent}_us": round(times[len(times) * percent // 100], 3) for percent in (50, 90, 99)},
    }
