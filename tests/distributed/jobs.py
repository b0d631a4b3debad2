# SPDX-License-Identifier: Apache-2.0
"""What the ranks do: each job returns plain data, or raises where a result is wrong."""

import contextlib
import io
import os

import torch
import torch.distributed as dist

from vllm_arm.distributed.communicator import ArmCommunicator

SIZES = (1, 3, 64, 1000)


def communicator(group: dist.ProcessGroup, name: str = "tp:0") -> ArmCommunicator:
    return ArmCommunicator(cpu_group=group, device_group=group, unique_name=name)


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The input of ``rank``, the same wherever it is asked for."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def all_values(world_size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [values(rank, shape, dtype) for rank in range(world_size)]


def close_to_sum(found: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Within two roundings of the sum in float64 for floating point; equal for integers."""
    exact = torch.stack(inputs).double().sum(0)
    if not found.dtype.is_floating_point:
        assert torch.equal(found.double(), exact)
        return
    largest = torch.stack(inputs).double().abs().sum(0)
    assert bool(((found.double() - exact).abs() <= 2 * torch.finfo(found.dtype).eps * largest).all())


def describe(group: dist.ProcessGroup) -> tuple[str, bool]:
    device_communicator = communicator(group)
    return device_communicator.transport.description, device_communicator.supports_tensor_dict


def sums(group: dist.ProcessGroup) -> list[bytes]:
    """Every sum; returns their bytes, which are to be the same on every rank."""
    device_communicator = communicator(group)
    world_size, rank = device_communicator.world_size, device_communicator.rank_in_group
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.float64):
        for size in SIZES:
            inputs = all_values(world_size, (size, 3), dtype)
            tensor = inputs[rank].clone()
            assert device_communicator.all_reduce(tensor) is tensor
            close_to_sum(tensor, inputs)
            found.append(tensor.view(torch.uint8).numpy().tobytes())
    strided = all_values(world_size, (8, 6), torch.float32)
    tensor = strided[rank].clone().t()
    device_communicator.all_reduce(tensor)
    close_to_sum(tensor, [other.t() for other in strided])
    return found


def gathers(group: dist.ProcessGroup) -> None:
    device_communicator = communicator(group)
    world_size, rank = device_communicator.world_size, device_communicator.rank_in_group
    for dtype in (torch.bfloat16, torch.int64, torch.bool):
        inputs = [other > 0 if dtype is torch.bool else other for other in all_values(world_size, (4, 5, 3), dtype)]
        for dim in (0, 1, -1):
            expected = torch.cat(inputs, dim)
            assert torch.equal(device_communicator.all_gather(inputs[rank], dim), expected)
            gathered = device_communicator.gather(inputs[rank], dst=world_size - 1, dim=dim)
            assert (gathered is None) == (rank != world_size - 1)
            assert gathered is None or torch.equal(gathered, expected)


def uneven_parts(group: dist.ProcessGroup) -> None:
    device_communicator = communicator(group, "ep:0")
    world_size, rank = device_communicator.world_size, device_communicator.rank_in_group
    for sizes in ([2 * other + 1 for other in range(world_size)], [0] * (world_size - 1) + [4], [3] * world_size):
        parts = [values(other, (sizes[other], 6), torch.float32) for other in range(world_size)]
        experts = [part[:, 0].to(torch.int32) for part in parts]
        found = device_communicator.all_gatherv([parts[rank], experts[rank]], 0, sizes)
        assert torch.equal(found[0], torch.cat(parts))
        assert torch.equal(found[1], torch.cat(experts))
        inputs = all_values(world_size, (sum(sizes), 6), torch.bfloat16)
        part = device_communicator.reduce_scatterv(inputs[rank], 0, sizes)
        begin = sum(sizes[:rank])
        assert part.shape == (sizes[rank], 6)
        close_to_sum(part, [other[begin : begin + sizes[rank]] for other in inputs])
        output = torch.empty_like(part)
        device_communicator.reduce_scatterv_into_output(inputs[rank], output, 0, sizes)
        assert torch.equal(output, part)
    inputs = all_values(world_size, (3, 2 * world_size), torch.float32)
    part = device_communicator.reduce_scatter(inputs[rank], -1)
    close_to_sum(part, [other[:, 2 * rank : 2 * rank + 2] for other in inputs])
    assert torch.equal(device_communicator.all_gatherv(inputs[rank]), torch.cat(inputs))


def mistakes(group: dist.ProcessGroup) -> list[str]:
    """The messages of calls that cannot be; no rank may wait for another in one of them."""
    device_communicator = communicator(group)
    tensor = torch.zeros(5, 2)
    calls = [
        lambda: device_communicator.all_gatherv(tensor, 1),
        lambda: device_communicator.all_gatherv(tensor, 0, [5]),
        lambda: device_communicator.all_gatherv(tensor, 0, [4, 4]),
        lambda: device_communicator.reduce_scatterv(tensor, 0, [4, 4]),
        lambda: device_communicator.reduce_scatter(tensor, 0),
    ]
    messages = []
    for call in calls:
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def point_to_point(group: dist.ProcessGroup) -> None:
    """A ring: each rank sends to the next; dictionaries, tensors, then a broadcast from each."""
    device_communicator = communicator(group, "pp:0")
    world_size, rank = device_communicator.world_size, device_communicator.rank_in_group
    source, destination = (rank - 1) % world_size, (rank + 1) % world_size

    def message(sender: int, rows: int) -> dict[str, object]:
        hidden = values(sender, (rows, 96), torch.bfloat16)
        return {"hidden": hidden, "empty": torch.zeros(0, 3), "step": sender, "strided": hidden.t()}

    for rows in (1, 7, 500):
        if rank % 2 == 0:
            device_communicator.send_tensor_dict(message(rank, rows), destination)
        received = device_communicator.recv_tensor_dict(source)
        if rank % 2 == 1:
            device_communicator.send_tensor_dict(message(rank, rows), destination)
        expected = message(source, rows)
        assert list(received) == list(expected)
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(received[key], value), key
            else:
                assert received[key] == value
    tensor = values(rank, (50,), torch.float32)
    if rank % 2 == 0:
        device_communicator.send(tensor)
        found = device_communicator.recv(torch.Size([50]), torch.float32)
    else:
        found = device_communicator.recv(torch.Size([50]), torch.float32)
        device_communicator.send(tensor)
    assert torch.equal(found, values(source, (50,), torch.float32))
    for sender in range(world_size):
        found = device_communicator.broadcast(values(rank, (9, 3), torch.float16), sender)
        assert torch.equal(found, values(sender, (9, 3), torch.float16))


def compiled(group: dist.ProcessGroup) -> None:
    """What a layer does, in one graph: a sum in place whose input is used again, then a gather."""
    device_communicator = communicator(group)
    world_size, rank = device_communicator.world_size, device_communicator.rank_in_group

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        partial = x @ weight
        total = device_communicator.all_reduce(partial.clone())
        part = device_communicator.reduce_scatter(total, 0)
        return device_communicator.all_gather(part + 1, 0) + partial.mean()

    x, weight = values(rank, (2 * world_size, 8), torch.float32), values(7, (8, 4), torch.float32)
    expected = layer(x, weight)
    with contextlib.redirect_stdout(io.StringIO()):
        found = torch.compile(layer, backend="aot_eager", fullgraph=True)(x, weight)
    assert torch.equal(found, expected)


def queue_readers(group: dist.ProcessGroup) -> int:
    """How many readers in its host's memory this rank's queue to rank 0 has, of two ranks a host."""
    from vllm.distributed.device_communicators import shm_broadcast

    from vllm_arm import platform
    from vllm_arm.runtime import environment

    os.environ[environment.LOCAL_WORKERS] = "2"
    shm_broadcast.current_platform = platform.ArmCpuPlatform
    queue, _ = shm_broadcast.MessageQueue.create_from_process_group_single_reader(group, 1 << 16, 2)
    return len(queue.export_handle().local_reader_ranks)
