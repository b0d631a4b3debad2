# SPDX-License-Identifier: Apache-2.0
"""``torch.distributed`` as a transport, alone or between hosts that each reduce in shared memory."""

import datetime
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist

from vllm_arm import envs
from vllm_arm.distributed.hosts import HostLayout
from vllm_arm.distributed.transport import SUM_DTYPES, SharedMemory, Transport

# Sums are rounded once, when they are complete.
_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}

# torch.compile cannot pass an object to an op; a number it can.
_TRANSPORTS: list["MessageTransport"] = []


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor``, of any dtype; a view of it where it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


@torch.library.custom_op("vllm_arm::message_all_reduce", mutates_args=("tensor",))  # type: ignore[untyped-decorator]  # torch is not typed
def _all_reduce(tensor: torch.Tensor, number: int) -> None:
    _TRANSPORTS[number].sum_in_place(tensor)


@torch.library.custom_op("vllm_arm::message_all_gather", mutates_args=("output",))  # type: ignore[untyped-decorator]  # torch is not typed
def _all_gather(output: torch.Tensor, input: torch.Tensor, number: int) -> None:
    _TRANSPORTS[number].gather_into(output, input)


@torch.library.custom_op("vllm_arm::message_broadcast", mutates_args=("tensor",))  # type: ignore[untyped-decorator]  # torch is not typed
def _broadcast(tensor: torch.Tensor, source: int, number: int) -> None:
    _TRANSPORTS[number].overwrite(tensor, source)


class MessageTransport(Transport):
    """``torch.distributed`` over ``group``, whose members have the global ranks ``ranks``."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int, description: str) -> None:
        super().__init__(rank, len(ranks), description)
        self._group = group
        self._ranks = tuple(ranks)
        self._number = len(_TRANSPORTS)
        _TRANSPORTS.append(self)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        _all_reduce(tensor, self._number)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        _all_gather(output, input, self._number)

    def all_gatherv(self, output: torch.Tensor, input: torch.Tensor, sizes: Sequence[int]) -> None:
        most = max(sizes)
        if most == 0:
            return
        padded = input.new_empty((most, *input.shape[1:]))
        padded[: input.shape[0]].copy_(input)
        gathered = input.new_empty((self.world_size * most, *input.shape[1:]))
        self.all_gather(gathered, padded)
        parts = [gathered[index * most : index * most + size] for index, size in enumerate(sizes)]
        torch.cat(parts, out=output)

    def reduce_scatterv(self, output: torch.Tensor, input: torch.Tensor, sizes: Sequence[int]) -> None:
        summed = input.clone(memory_format=torch.contiguous_format)
        self.all_reduce(summed)
        begin = sum(sizes[: self.rank])
        output.copy_(summed[begin : begin + sizes[self.rank]])

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        _broadcast(tensor, source, self._number)

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        dist.send(_as_bytes(tensor), self._ranks[destination], self._group)

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        dense = tensor.contiguous()
        dist.recv(_as_bytes(dense), self._ranks[source], self._group)
        if dense is not tensor:
            tensor.copy_(dense)

    def sum_in_place(self, tensor: torch.Tensor) -> None:
        """What :meth:`all_reduce` does, behind the op."""
        dense = tensor.contiguous()
        dist.all_reduce(dense, group=self._group)
        if dense is not tensor:
            tensor.copy_(dense)

    def gather_into(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """What :meth:`all_gather` does, behind the op."""
        parts = _as_bytes(output).view(self.world_size, -1).unbind()
        dist.all_gather(list(parts), _as_bytes(input), group=self._group)

    def overwrite(self, tensor: torch.Tensor, source: int) -> None:
        """What :meth:`broadcast` does, behind the op."""
        dense = tensor.contiguous()
        dist.broadcast(_as_bytes(dense), self._ranks[source], self._group)
        if dense is not tensor:
            tensor.copy_(dense)


class SpanningTransport(MessageTransport):
    """Shared memory inside each host, ``torch.distributed`` between them.

    Rank ``i`` of each host exchanges the ``i``-th part with rank ``i`` of the others, so that all of them use the
    network at once and each part crosses it once. Hosts have the same number of ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        rank: int,
        layout: HostLayout,
        local: SharedMemory,
    ) -> None:
        hosts = len(layout.hosts)
        super().__init__(group, ranks, rank, f"shared memory on each of {hosts} hosts, gloo between them")
        self._layout = layout
        self._local = local
        peers = [ranks[host[local.rank]] for host in layout.hosts]
        self._peers = cast(
            dist.ProcessGroup,
            dist.new_group(
                peers,
                backend="gloo",
                timeout=datetime.timedelta(seconds=envs.VLLM_ARM_COLLECTIVE_TIMEOUT),
                use_local_synchronization=True,
            ),
        )
        order = [layout.hosts[host][member] for member in range(local.world_size) for host in range(hosts)]
        # Where the rows of each rank are after they were gathered over hosts, then over the ranks of one.
        self._position_of_rank = torch.tensor(order).argsort()

    def sum_in_place(self, tensor: torch.Tensor) -> None:
        if tensor.dtype not in SUM_DTYPES or tensor.numel() == 0:
            super().sum_in_place(tensor)
            return
        members = self._local.world_size
        count = tensor.numel()
        length = -(-count // members)
        wide = _WIDE.get(tensor.dtype, tensor.dtype)
        padded = tensor.new_zeros(length * members, dtype=wide)
        padded[:count].copy_(tensor.reshape(-1))
        part = padded.new_empty(length)
        self._local.reduce_scatter(part, padded)
        dist.all_reduce(part, group=self._peers)
        total = tensor.new_empty(length * members)
        self._local.all_gather(total, part.to(tensor.dtype))
        tensor.copy_(total[:count].view(tensor.shape))

    def gather_into(self, output: torch.Tensor, input: torch.Tensor) -> None:
        dense = input.contiguous()
        hosts = len(self._layout.hosts)
        column = dense.new_empty((hosts, *dense.shape))
        dist.all_gather(list(_as_bytes(column).view(hosts, -1).unbind()), _as_bytes(dense), group=self._peers)
        everything = dense.new_empty((self.world_size, *dense.shape))
        self._local.all_gather(everything, column)
        torch.index_select(everything, 0, self._position_of_rank, out=output.view(everything.shape))

    def close(self) -> None:
        self._local.close()
