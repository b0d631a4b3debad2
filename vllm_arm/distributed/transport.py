# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group exchange tensors: what every way offers, and the one through shared memory."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from vllm_arm.ops import collectives

SUM_DTYPES = collectives.SUM_DTYPES
"""The dtypes that are summed in shared memory."""


class Transport(ABC):
    """Collectives of a group; ranks are ranks in the group, outputs contiguous tensors that the caller allocates."""

    def __init__(self, rank: int, world_size: int, description: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.description = description

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over the ranks, in place."""

    @abstractmethod
    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """``output`` ``[world_size * n, ...]`` from each rank's ``input`` ``[n, ...]``, in rank order."""

    @abstractmethod
    def all_gatherv(self, output: torch.Tensor, input: torch.Tensor, sizes: Sequence[int]) -> None:
        """As :meth:`all_gather`, where rank ``i`` gives ``sizes[i]`` rows."""

    @abstractmethod
    def reduce_scatterv(self, output: torch.Tensor, input: torch.Tensor, sizes: Sequence[int]) -> None:
        """Sum ``input`` ``[sum(sizes), ...]`` over the ranks and keep this rank's ``sizes[rank]`` rows."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite ``tensor`` by that of rank ``source``."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """Give ``tensor`` to rank ``destination``."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite ``tensor`` by what rank ``source`` sends."""

    def gather(self, output: torch.Tensor | None, input: torch.Tensor, destination: int) -> None:
        """As :meth:`all_gather`, for rank ``destination`` alone; ``output`` is None on the others."""
        if output is None:
            output = torch.empty((self.world_size * input.shape[0], *input.shape[1:]), dtype=input.dtype)
        self.all_gather(output, input)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Sum ``input`` ``[world_size * n, ...]`` over the ranks and keep this rank's ``n`` rows."""
        self.reduce_scatterv(output, input, [output.shape[0]] * self.world_size)

    def close(self) -> None:  # noqa: B027 - not every way has something to close
        """Let go; ranks that wait for this one get an error."""


class SharedMemory(Transport):
    """Through memory that the ranks of one host share."""

    def __init__(self, rank: int, world_size: int, handle: int) -> None:
        super().__init__(rank, world_size, "shared memory")
        self.handle = handle

    def all_reduce(self, tensor: torch.Tensor) -> None:
        collectives.all_reduce(self.handle, tensor)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        collectives.all_gather(self.handle, output, input)

    def all_gatherv(self, output: torch.Tensor, input: torch.Tensor, sizes: Sequence[int]) -> None:
        collectives.all_gatherv(self.handle, output, input, list(sizes))

    def gather(self, output: torch.Tensor | None, input: torch.Tensor, destination: int) -> None:
        collectives.gather(self.handle, output, input, destination)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> None:
        collectives.reduce_scatter(self.handle, output, input)

    def reduce_scatterv(self, output: torch.Tensor, input: torch.Tensor, sizes: Sequence[int]) -> None:
        collectives.reduce_scatterv(self.handle, output, input, list(sizes))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        collectives.broadcast(self.handle, tensor, source)

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        collectives.send(self.handle, tensor, destination)

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        collectives.recv(self.handle, tensor, source)

    def close(self) -> None:
        collectives.close(self.handle)
