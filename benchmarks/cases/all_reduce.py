# SPDX-License-Identifier: Apache-2.0
"""The sum of tensors over ranks through shared memory, as one rank computes it.

All ranks are in this process. Before each run the others give what they give in an all_reduce, so that the run finds
it there and never waits: what is counted is the work of a rank, not the time that it spends on others.
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.cases.case import Call, Case, Implementation, Work
from benchmarks.cases.upstream import operators

# Half a unit in the last place of bf16.
TOLERANCE = 2**-8
SEGMENT_BYTES = 4 << 20
TIMEOUT_SECONDS = 60.0
# What a segment begins with is the owner's identity and state, which a copy must leave alone.
CONTROL_BYTES = 4 * 64
SHARED_MEMORY = Path("/dev/shm")
_numbers = itertools.count()


def reference(parts: torch.Tensor) -> torch.Tensor:
    """The sum in float64 of ``parts``, ``[ranks, elements]``."""
    return parts.double().sum(0)


class _Ranks:
    """A communicator of ours for each of ``count`` ranks, and the files of their shared memory."""

    def __init__(self, count: int) -> None:
        ops = torch.ops.vllm_arm
        self.handles = [ops.collective_create(rank, count, SEGMENT_BYTES, TIMEOUT_SECONDS) for rank in range(count)]
        addresses = [ops.collective_address(handle) for handle in self.handles]
        for handle in self.handles:
            ops.collective_connect(handle, addresses)
        self.files = [int(address.split()[3]) for address in addresses]

    def all_reduce(self, parts: torch.Tensor) -> None:
        """All ranks together, each in a thread."""
        tensors = list(parts.clone())
        with ThreadPoolExecutor(len(tensors)) as pool:
            list(pool.map(torch.ops.vllm_arm.collective_all_reduce, tensors, self.handles))


def ours(parts: torch.Tensor) -> Call:
    """``torch.ops.vllm_arm.collective_all_reduce`` on rank 0.

    A rehearsal by all ranks goes before it, in memory of its own; what the others have written there is put into
    their shared memory.
    """
    import vllm_arm.ops  # noqa: F401

    ranks = parts.shape[0]
    rehearsal, performance = _Ranks(ranks), _Ranks(ranks)
    tensor = parts[0].clone()

    def reset() -> None:
        rehearsal.all_reduce(parts)
        for source, target in list(zip(rehearsal.files, performance.files, strict=True))[1:]:
            os.pwrite(target, os.pread(source, SEGMENT_BYTES - CONTROL_BYTES, CONTROL_BYTES), CONTROL_BYTES)
        tensor.copy_(parts[0])

    handle = performance.handles[0]
    return Call(
        run=lambda: torch.ops.vllm_arm.collective_all_reduce(tensor, handle), output=lambda: tensor, reset=reset
    )


def upstream(parts: torch.Tensor) -> Call:
    """vLLM's C++ op on rank 0. The others give their parts by the op that gathers, which waits for nobody."""
    vllm = operators()
    ranks = parts.shape[0]
    name = f"vllm_arm_case_{os.getpid()}_{next(_numbers)}"
    handles = [vllm.init_shm_manager(name, ranks, rank, 1) for rank in range(ranks)]
    for handle in handles:
        vllm.join_shm_manager(handle, name)
    for rank in range(ranks):
        (SHARED_MEMORY / f"{name}_{rank}").unlink()
    tensor = parts[0].clone()

    def reset() -> None:
        for part, handle in list(zip(parts, handles, strict=True))[1:]:
            vllm.shm_gather(handle, part, None, 0)
        tensor.copy_(parts[0])

    return Call(run=lambda: vllm.shm_allreduce(handles[0], tensor), output=lambda: tensor, reset=reset)


IMPLEMENTATIONS = (
    Implementation("vllm_arm", ours, operation="reduce_sum"),
    Implementation("upstream", upstream),
)


def _case(name: str, words: str, ranks: int, tokens: int, hidden_size: int) -> Case:
    tensor = 2 * tokens * hidden_size
    # What a rank gives, and the result: each once from its own memory into shared memory, or the other way.
    work = Work(bytes_read=2 * tensor, bytes_written=2 * tensor)
    return Case(
        "all_reduce",
        name,
        words,
        work,
        TOLERANCE,
        lambda: torch.randn(ranks, tokens * hidden_size).bfloat16(),
        reference,
        IMPLEMENTATIONS,
        is_repeatable=False,
    )


CASES = (
    _case("decode_1_of_2", "Llama-3.1-8B, 1 token of 4096 over 2 ranks: 8 KiB, in lines that carry flags", 2, 1, 4096),
    _case(
        "prefill_32_of_2", "Llama-3.1-8B, 32 tokens of 4096 over 2 ranks: 256 KiB (longer ones repeat it)", 2, 32, 4096
    ),
    _case(
        "prefill_32_of_4", "Llama-3.1-8B, 32 tokens of 4096 over 4 ranks: 256 KiB (longer ones repeat it)", 4, 32, 4096
    ),
)
