# SPDX-License-Identifier: Apache-2.0
"""Every collective operation, between processes, against what each rank can work out by itself."""

import random
from typing import Any

import pytest
import torch

from tests.collectives.ranks import IN_STRESS, run_ranks
from vllm_arm.ops import collectives

WORLD_SIZES = (2, 3, 4, 5, 8)
# One element, odd ones, what fills a line or a batch of them and one more, the first that go in blocks, and large.
COUNTS = (1, 3, 28, 29, 447, 448, 449, 4095, 16384, 16385, 33333, 200001)


def given(rank: int, seed: int, shape: tuple[int, ...] | int, dtype: torch.dtype) -> torch.Tensor:
    """What ``rank`` gives in the operation of that seed: any bits of an integer, floats of different magnitudes."""
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    size = (shape,) if isinstance(shape, int) else shape
    if dtype.is_floating_point:
        exponents = torch.randint(-4, 5, size, generator=generator)
        return (torch.randn(size, generator=generator) * 2.0**exponents).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, size, generator=generator, dtype=dtype)


def total(world_size: int, seed: int, shape: tuple[int, ...] | int, dtype: torch.dtype) -> torch.Tensor:
    """The sum in fp32, in the order of ranks, rounded once."""
    wide = torch.float32 if dtype.is_floating_point else dtype
    result = given(0, seed, shape, dtype).to(wide)
    for rank in range(1, world_size):
        result += given(rank, seed, shape, dtype).to(wide)
    return result.to(dtype)


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit by bit."""
    return actual.shape == expected.shape and bool(
        torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
    )


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_reduce_gives_the_same_bits_on_every_rank(world_size: int) -> None:
    def body(rank: int, handle: int) -> list[str]:
        wrong = []
        for seed, count in enumerate(COUNTS):
            dtype = collectives.SUM_DTYPES[seed % len(collectives.SUM_DTYPES)]
            for each in {dtype, torch.bfloat16}:
                tensor = given(rank, seed, count, each)
                assert collectives.all_reduce(handle, tensor) is tensor
                if not same(tensor, total(world_size, seed, count, each)):
                    wrong.append(f"{count} {each}")
        return wrong

    assert run_ranks(world_size, body) == [[]] * world_size


def test_64_mib_by_different_numbers_of_threads() -> None:
    count = 32 << 20

    def body(rank: int, handle: int) -> bool:
        tensor = torch.full((count,), float(rank + 1)).bfloat16()
        tensor[count // 3] = rank
        collectives.all_reduce(handle, tensor)
        right = tensor[count // 3].item() == 1
        tensor[count // 3] = 3
        return right and bool((tensor == 3).all())

    assert run_ranks(2, body, threads=[2, 3]) == [True, True]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gathers(world_size: int) -> None:
    def body(rank: int, handle: int) -> list[str]:
        wrong = []
        for seed, count in enumerate((1, 57, 3000, 70001)):
            dtype = (torch.uint8, torch.bfloat16, torch.int64, torch.float16)[seed]
            expected = torch.cat([given(source, seed, (count, 2), dtype) for source in range(world_size)])
            own = given(rank, seed, (count, 2), dtype)
            output = torch.empty_like(expected)
            collectives.all_gather(handle, output, own)
            if not same(output, expected):
                wrong.append(f"all_gather {count}")
            destination = seed % world_size
            output.zero_()
            collectives.gather(handle, output if rank == destination else None, own, destination)
            if rank == destination and not same(output, expected):
                wrong.append(f"gather {count}")
            sizes = [(count * (source % 3)) // 2 for source in range(world_size)]
            rows = [given(source, seed, (sizes[source], 2), dtype) for source in range(world_size)]
            output = torch.empty(sum(sizes), 2, dtype=dtype)
            collectives.all_gatherv(handle, output, rows[rank], sizes)
            if not same(output, torch.cat(rows)):
                wrong.append(f"all_gatherv {count}")
        return wrong

    assert run_ranks(world_size, body) == [[]] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_reduce_scatters_and_broadcasts(world_size: int) -> None:
    def body(rank: int, handle: int) -> list[str]:
        wrong = []
        for seed, count in enumerate((1, 57, 3000, 70001)):
            dtype = (torch.bfloat16, torch.float32, torch.int32, torch.bfloat16)[seed]
            shape = (world_size * count, 2)
            output = torch.empty(count, 2, dtype=dtype)
            collectives.reduce_scatter(handle, output, given(rank, seed, shape, dtype))
            if not same(output, total(world_size, seed, shape, dtype)[rank * count : (rank + 1) * count]):
                wrong.append(f"reduce_scatter {count}")
            sizes = [(count * (part % 3)) // 2 for part in range(world_size)]
            shape = (sum(sizes), 2)
            output = torch.empty(sizes[rank], 2, dtype=dtype)
            collectives.reduce_scatterv(handle, output, given(rank, seed, shape, dtype), sizes)
            if not same(output, total(world_size, seed, shape, dtype).split(sizes)[rank]):
                wrong.append(f"reduce_scatterv {count}")
            source = (seed + 1) % world_size
            tensor = given(rank, seed, count, torch.float64)
            collectives.broadcast(handle, tensor, source)
            if not same(tensor, given(source, seed, count, torch.float64)):
                wrong.append(f"broadcast {count}")
        return wrong

    assert run_ranks(world_size, body) == [[]] * world_size


def test_send_and_recv_in_a_ring_and_more_than_the_memory_holds() -> None:
    def body(rank: int, handle: int) -> list[str]:
        wrong = []
        for seed, count in enumerate((0, 1, 1000, 20_000_001)):
            before, after = (rank - 1) % 3, (rank + 1) % 3
            tensor = torch.empty(count, dtype=torch.uint8)
            if rank == 0:
                collectives.send(handle, given(rank, seed, count, torch.uint8), after)
                collectives.recv(handle, tensor, before)
            else:
                collectives.recv(handle, tensor, before)
                collectives.send(handle, given(rank, seed, count, torch.uint8), after)
            if not same(tensor, given(before, seed, count, torch.uint8)):
                wrong.append(str(count))
        collectives.barrier(handle)
        return wrong

    assert run_ranks(3, body) == [[]] * 3


def test_tensors_that_are_not_contiguous() -> None:
    def body(rank: int, handle: int) -> list[bool]:
        wide = given(rank, 1, (40, 60), torch.bfloat16)
        collectives.all_reduce(handle, wide[:, 10:20])
        sums = total(2, 1, (40, 60), torch.bfloat16)[:, 10:20]
        right = [same(wide[:, 10:20], sums), same(wide[:, 20:], given(rank, 1, (40, 60), torch.bfloat16)[:, 20:])]
        output = torch.zeros(6, 10).t()
        collectives.all_gather(handle, output, given(rank, 2, (3, 10), torch.float32).t())
        parts = [given(source, 2, (3, 10), torch.float32).t().reshape(5, 6) for source in range(2)]
        return [*right, same(output, torch.cat(parts))]

    assert run_ranks(2, body) == [[True] * 3] * 2


def test_two_groups_at_once_do_not_meet() -> None:
    def body(rank: int, handle: int) -> list[bool]:
        tensors = [given(rank, seed, 5000, torch.bfloat16) for seed in range(200)]
        for tensor in tensors:
            collectives.all_reduce(handle, tensor)
        return [same(tensor, total(2, seed, 5000, torch.bfloat16)) for seed, tensor in enumerate(tensors)]

    second: list[Any] = []
    first = run_ranks(2, body, started=lambda _: second.extend(run_ranks(2, body)))
    assert first == second == [[True] * 200] * 2


def test_under_torch_compile() -> None:
    def body(rank: int, handle: int) -> list[bool]:
        def layer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x * 2
            collectives.all_reduce(handle, y)
            z = y + 1
            gathered = torch.empty(2 * z.shape[0], dtype=z.dtype)
            collectives.all_gather(handle, gathered, z)
            return y, gathered

        x = given(rank, 3, 1000, torch.float32)
        # One rank compiles, which takes seconds; the other shows that it makes no difference.
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager") if rank == 0 else layer
        y, gathered = compiled(x)
        expected = total(2, 3, 1000, torch.float32) * 2
        return [same(y, expected), same(gathered, torch.cat([expected + 1] * 2))]

    assert run_ranks(2, body) == [[True, True]] * 2


class Mixed:
    """Random operations that all ranks draw alike from one seed."""

    def __init__(self, rank: int, world_size: int, handle: int, seed: int) -> None:
        self.rank, self.world_size, self.handle = rank, world_size, handle
        self.random = random.Random(seed)

    def next(self, number: int) -> bool:
        """Run one, and say whether its result is right, bit by bit."""
        count = int(2 ** self.random.uniform(0, 14))
        seed = number % 50
        root = self.random.randrange(self.world_size)
        kind = self.random.choice(("all_reduce", "all_gather", "gather", "reduce_scatter", "broadcast", "direct"))
        result: bool = getattr(self, f"_{kind}")(count, seed, root)
        return result

    def _own(self, count: int, seed: int) -> torch.Tensor:
        return given(self.rank, seed, count, torch.bfloat16)

    def _all_reduce(self, count: int, seed: int, _: int) -> bool:
        tensor = collectives.all_reduce(self.handle, self._own(count, seed))
        return same(tensor, total(self.world_size, seed, count, torch.bfloat16))

    def _gathered(self, count: int, seed: int) -> torch.Tensor:
        return torch.cat([given(source, seed, count, torch.bfloat16) for source in range(self.world_size)])

    def _all_gather(self, count: int, seed: int, _: int) -> bool:
        output = torch.empty(count * self.world_size, dtype=torch.bfloat16)
        collectives.all_gather(self.handle, output, self._own(count, seed))
        return same(output, self._gathered(count, seed))

    def _gather(self, count: int, seed: int, root: int) -> bool:
        output = torch.empty(count * self.world_size, dtype=torch.bfloat16)
        collectives.gather(self.handle, output, self._own(count, seed), root)
        return self.rank != root or same(output, self._gathered(count, seed))

    def _reduce_scatter(self, count: int, seed: int, _: int) -> bool:
        whole = count * self.world_size
        output = torch.empty(count, dtype=torch.bfloat16)
        collectives.reduce_scatter(self.handle, output, self._own(whole, seed))
        parts = total(self.world_size, seed, whole, torch.bfloat16).split(count)
        return same(output, parts[self.rank])

    def _broadcast(self, count: int, seed: int, root: int) -> bool:
        tensor = collectives.broadcast(self.handle, self._own(count, seed), root)
        return same(tensor, given(root, seed, count, torch.bfloat16))

    def _direct(self, count: int, seed: int, root: int) -> bool:
        destination = (root + 1) % self.world_size
        if self.rank == root:
            collectives.send(self.handle, self._own(count, seed), destination)
        if self.rank != destination:
            return True
        tensor = torch.empty(count, dtype=torch.bfloat16)
        return same(collectives.recv(self.handle, tensor, root), given(root, seed, count, torch.bfloat16))


@pytest.mark.parametrize(
    ("world_size", "operations"),
    [(2, 1500), (3, 700), pytest.param(3, 100_000, marks=IN_STRESS)],
)
def test_mixed_operations_in_random_order(world_size: int, operations: int) -> None:
    def body(rank: int, handle: int) -> list[int]:
        mixed = Mixed(rank, world_size, handle, operations)
        return [number for number in range(operations) if not mixed.next(number)]

    assert run_ranks(world_size, body) == [[]] * world_size
