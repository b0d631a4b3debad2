# SPDX-License-Identifier: Apache-2.0
"""Collective operations of processes that share memory.

A communicator is a handle, a small integer. All of its ranks call the same operations in the same order (``send`` and
``recv`` concern two of them), one thread of a rank at a time. Ranks are those in the group, from 0 to world_size - 1.

An operation that cannot be completed raises ``RuntimeError`` naming the rank that has died, left, been silent for
longer than ``VLLM_ARM_COLLECTIVE_TIMEOUT`` or called something else: on every rank, in that operation or in the next.
Arguments that do not fit raise ``RuntimeError`` naming the argument. Tensors that are not contiguous are copied.

Messages of up to 4 or 8 KiB go by cache lines that carry data and flag together; larger ones in blocks, by as many
threads as the rank with the fewest has. Which of the two sizes, and on x86 which kind of stores, is measured when a
communicator is opened, and again from time to time: the CPUs of a virtual machine move. Sums are in fp32, in the order
of ranks, and rounded once: every rank has the same bits, whatever the number of threads.
"""

from collections.abc import Callable

import torch

from vllm_arm import envs
from vllm_arm.ops.library import register_mutating_fakes

MAXIMUM_WORLD_SIZE = 64
DEFAULT_BYTES_PER_RANK = 8 << 20
"""Of shared memory. It is in no file system: the size of /dev/shm does not limit it, and nothing is left of it."""

SUM_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64)
"""What ``all_reduce`` and ``reduce_scatter`` add; everything else moves any dtype."""

register_mutating_fakes(
    "collective_all_reduce",
    "collective_all_gather",
    "collective_gather",
    "collective_reduce_scatter",
    "collective_broadcast",
    "collective_send",
    "collective_recv",
    "collective_barrier",
)


def open_communicator(
    rank: int,
    world_size: int,
    exchange: Callable[[str], list[str]],
    *,
    bytes_per_rank: int = DEFAULT_BYTES_PER_RANK,
    timeout_seconds: float | None = None,
) -> int:
    """Open a communicator together with all other ranks, and return its handle, the lowest that is free.

    ``exchange(text)`` returns every rank's text in the order of ranks. It is called twice on every rank, even where
    this one has failed. ``bytes_per_rank`` of shared memory are taken at once, on the memory node of the calling
    thread; ``torch.get_num_threads()`` then, the least over ranks, is the number of stripes of large messages.
    ``timeout_seconds`` is that of ``VLLM_ARM_COLLECTIVE_TIMEOUT`` if None.

    Raises ``RuntimeError`` on every rank, naming the first that failed and why, if any of them does.
    """
    handle, failure, address = None, "", ""
    timeout = envs.VLLM_ARM_COLLECTIVE_TIMEOUT if timeout_seconds is None else timeout_seconds
    try:
        handle = torch.ops.vllm_arm.collective_create(rank, world_size, bytes_per_rank, timeout)
        address = torch.ops.vllm_arm.collective_address(handle)
    except RuntimeError as error:
        failure = _first_line(error)
    addresses = exchange(address)
    if not failure and all(addresses):
        try:
            torch.ops.vllm_arm.collective_connect(handle, addresses)
        except RuntimeError as error:
            failure = _first_line(error)
    failures = exchange(failure)
    if any(failures):
        if handle is not None:
            close(handle)
        first = next(each for each, reason in enumerate(failures) if reason)
        raise RuntimeError(f"open_communicator: rank {first}: {failures[first]}")
    assert isinstance(handle, int)
    try:
        torch.ops.vllm_arm.collective_seal(handle)
    except RuntimeError:
        close(handle)
        raise
    return handle


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def close(handle: int) -> None:
    """Leave the communicator: other ranks that wait for this one get an error. Does nothing the second time."""
    torch.ops.vllm_arm.collective_close(handle)


def is_open(handle: int) -> bool:
    """Whether ``handle`` is that of a communicator."""
    return bool(torch.ops.vllm_arm.collective_is_open(handle))


def all_reduce(handle: int, tensor: torch.Tensor) -> torch.Tensor:
    """Replace ``tensor`` by its sum over ranks and return it. Any shape, the same on each rank, in ``SUM_DTYPES``."""
    if tensor.is_contiguous():
        torch.ops.vllm_arm.collective_all_reduce(tensor, handle)
        return tensor
    dense = tensor.contiguous()
    torch.ops.vllm_arm.collective_all_reduce(dense, handle)
    return tensor.copy_(dense)


def all_gather(handle: int, output: torch.Tensor, input: torch.Tensor) -> None:
    """``output`` = the inputs of all ranks, one after the other.

    ``input`` has one shape on all ranks; ``output`` any shape of world_size times as many elements.
    """
    all_gatherv(handle, output, input, None)


def all_gatherv(handle: int, output: torch.Tensor, input: torch.Tensor, sizes: list[int] | None) -> None:
    """As ``all_gather`` with ``sizes[r]`` rows from rank r.

    ``input`` is ``[sizes[rank], ...]``, ``output`` ``[sum(sizes), ...]``.
    """
    dense = output.contiguous()
    torch.ops.vllm_arm.collective_all_gather(dense, input.contiguous(), handle, sizes)
    _copy_back(output, dense)


def gather(handle: int, output: torch.Tensor | None, input: torch.Tensor, destination: int) -> None:
    """As ``all_gather``, for rank ``destination`` alone; the others need no ``output``."""
    dense = None if output is None else output.contiguous()
    torch.ops.vllm_arm.collective_gather(dense, input.contiguous(), handle, destination)
    if output is not None and dense is not None:
        _copy_back(output, dense)


def reduce_scatter(handle: int, output: torch.Tensor, input: torch.Tensor) -> None:
    """``output`` = this rank's part of the sum of ``input`` over ranks, in ``SUM_DTYPES``.

    ``output`` has one shape on all ranks; ``input`` any shape of world_size times as many elements.
    """
    reduce_scatterv(handle, output, input, None)


def reduce_scatterv(handle: int, output: torch.Tensor, input: torch.Tensor, sizes: list[int] | None) -> None:
    """As ``reduce_scatter`` with ``sizes[r]`` rows for rank r.

    ``output`` is ``[sizes[rank], ...]``, ``input`` ``[sum(sizes), ...]``.
    """
    dense = output.contiguous()
    torch.ops.vllm_arm.collective_reduce_scatter(dense, input.contiguous(), handle, sizes)
    _copy_back(output, dense)


def broadcast(handle: int, tensor: torch.Tensor, source: int) -> torch.Tensor:
    """Replace ``tensor`` by that of rank ``source``, of the same shape and dtype, and return it."""
    dense = tensor.contiguous()
    torch.ops.vllm_arm.collective_broadcast(dense, handle, source)
    return _copy_back(tensor, dense)


def send(handle: int, tensor: torch.Tensor, destination: int) -> None:
    """Send ``tensor`` to rank ``destination``.

    Returns when it is in shared memory, which for what does not fit there is when most of it has been received. Not for
    torch.compile, which drops an op that writes to nothing.
    """
    torch.ops.vllm_arm.collective_send(tensor.contiguous(), handle, destination)


def recv(handle: int, tensor: torch.Tensor, source: int) -> torch.Tensor:
    """Replace ``tensor`` by what rank ``source`` sends, of as many bytes, and return it."""
    dense = tensor.contiguous()
    torch.ops.vllm_arm.collective_recv(dense, handle, source)
    return _copy_back(tensor, dense)


def barrier(handle: int) -> None:
    """Return when every rank has called this. Not for torch.compile, which drops an op that writes to nothing."""
    torch.ops.vllm_arm.collective_barrier(handle)


def _copy_back(tensor: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    # contiguous() gives the tensor itself where it is contiguous.
    return tensor if dense is tensor or tensor.is_contiguous() else tensor.copy_(dense)
