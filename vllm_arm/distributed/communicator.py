# SPDX-License-Identifier: Apache-2.0
"""The communicator that vLLM gives each of its groups of ranks: tensor, pipeline, data and expert parallel."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.utils.network_utils import get_ip

from vllm_arm.distributed import tensor_dict
from vllm_arm.distributed.messages import MessageTransport
from vllm_arm.distributed.opening import open_transport
from vllm_arm.distributed.transport import SUM_DTYPES, SharedMemory, Transport
from vllm_arm.logs import get_logger

logger = get_logger(__name__)

_ALL_TO_ALL_BACKENDS = ("naive", "allgather_reducescatter")


class ArmCommunicator(DeviceCommunicatorBase):  # type: ignore[misc]  # vLLM is not typed for mypy
    """vLLM's interface on one side, a :class:`~vllm_arm.distributed.transport.Transport` on the other.

    torch.compile traces through the methods. ``src``, ``dst`` and the order of ``sizes`` are ranks in the group.
    """

    def __init__(
        self,
        cpu_group: ProcessGroup,
        device: torch.device | None = None,
        device_group: ProcessGroup | None = None,
        unique_name: str = "",
        use_all2all: bool = False,
    ) -> None:
        super().__init__(cpu_group, device, device_group, unique_name, use_all2all=use_all2all)
        self.transport = open_transport(cpu_group, self.ranks, self.rank_in_group, unique_name, get_ip)
        # For the dtypes that shared memory does not sum.
        self._messages = MessageTransport(cpu_group, self.ranks, self.rank_in_group, "torch.distributed")
        # Otherwise vLLM sends them by torch.distributed itself.
        self.supports_tensor_dict = isinstance(self.transport, SharedMemory)
        if self.use_all2all:
            self._prepare_experts()

    def _prepare_experts(self) -> None:
        from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

        if self.all2all_backend not in _ALL_TO_ALL_BACKENDS:
            logger.warning(
                "expert parallelism: all2all backend %s is not for CPUs, %s is used",
                self.all2all_backend,
                _ALL_TO_ALL_BACKENDS[-1],
            )
        self.all2all_manager = AgRsAll2AllManager(self.cpu_group)

    def _summing(self, dtype: torch.dtype) -> Transport:
        return self.transport if dtype in SUM_DTYPES else self._messages

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sum ``input_`` over the ranks, in place; the same bits on every rank."""
        self._summing(input_.dtype).all_reduce(input_)
        return input_

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Every rank's ``input_``, concatenated along ``dim``."""
        dim %= input_.dim()
        gathered = input_.new_empty((self.world_size, *input_.shape))
        self.transport.all_gather(gathered, input_)
        return _join(gathered, dim)

    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """Every rank's rows, of which rank ``i`` has ``sizes[i]`` (None: all the same); of each tensor of a list.

        Raises ``ValueError`` on another ``dim`` than 0, and where ``sizes`` do not fit.
        """
        if dim != 0:
            raise ValueError(f"all_gatherv: dim={dim}: expected 0")
        if isinstance(input_, list):
            return [self._all_gatherv(tensor, sizes) for tensor in input_]
        return self._all_gatherv(input_, sizes)

    def _all_gatherv(self, input_: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
        if sizes is None:
            return self.all_gather(input_, 0)
        self._check_count("all_gatherv", sizes)
        _check_rows("all_gatherv", input_.shape[0], sizes[self.rank_in_group], sizes)
        output = input_.new_empty((sum(sizes), *input_.shape[1:]))
        self.transport.all_gatherv(output, input_, sizes)
        return output

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The sum over the ranks, of which each keeps its equal part of ``dim``."""
        return self.reduce_scatterv(input_, dim)

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """The sum over the ranks, of which rank ``i`` keeps ``sizes[i]`` of ``dim`` (None: all the same).

        Raises ``ValueError`` where they do not fit.
        """
        dim %= input_.dim()
        rows = input_.movedim(dim, 0)
        length, rest = divmod(rows.shape[0], self.world_size)
        if sizes is None and rest:
            raise ValueError(f"reduce_scatter: {rows.shape[0]} rows: expected a multiple of {self.world_size} ranks")
        if sizes is not None:
            self._check_count("reduce_scatterv", sizes)
            _check_rows("reduce_scatterv", rows.shape[0], sum(sizes), sizes)
            length = sizes[self.rank_in_group]
        output = input_.new_empty((length, *rows.shape[1:]))
        transport = self._summing(input_.dtype)
        if sizes is None:
            transport.reduce_scatter(output, rows)
        else:
            transport.reduce_scatterv(output, rows, sizes)
        return output.movedim(0, dim).contiguous()

    def _check_count(self, operation: str, sizes: Sequence[int]) -> None:
        if len(sizes) != self.world_size:
            raise ValueError(f"{operation}: {len(sizes)} sizes: expected one for each of {self.world_size} ranks")

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """As :meth:`all_gather`, on rank ``dst`` alone; None on the others."""
        dim %= input_.dim()
        gathered = None
        if self.rank_in_group == dst:
            gathered = input_.new_empty((self.world_size, *input_.shape))
        self.transport.gather(gathered, input_, dst)
        return None if gathered is None else _join(gathered, dim)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite ``tensor`` by that of rank ``src``."""
        self.transport.broadcast(tensor, src)
        return tensor

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        """Give ``tensor`` to rank ``dst``, the next one by default."""
        self.transport.send(tensor, (self.rank_in_group + 1) % self.world_size if dst is None else dst)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        """A tensor from rank ``src``, the one before by default."""
        tensor = torch.empty(size, dtype=dtype, device=self.device)
        self.transport.recv(tensor, (self.rank_in_group - 1) % self.world_size if src is None else src)
        return tensor

    def send_tensor_dict(self, tensors: dict[str, Any], dst: int) -> None:
        """Give ``tensors`` to rank ``dst``; the values that are no tensors are pickled."""
        tensor_dict.send(self.transport, tensors, dst)

    def recv_tensor_dict(self, src: int) -> dict[str, Any]:
        """What rank ``src`` gave to :meth:`send_tensor_dict`."""
        return tensor_dict.recv(self.transport, src)

    def dispatch_router_logits(self, *arguments: Any, **options: Any) -> Any:
        """Give every expert-parallel rank all tokens with their router logits."""
        assert self.all2all_manager is not None
        return self.all2all_manager.dispatch_router_logits(*arguments, **options)

    def dispatch(self, *arguments: Any, **options: Any) -> Any:
        """Give every expert-parallel rank all tokens with their experts and weights."""
        assert self.all2all_manager is not None
        return self.all2all_manager.dispatch(*arguments, **options)

    def combine(self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False) -> torch.Tensor:
        """Sum what the experts of all ranks made of this rank's tokens."""
        assert self.all2all_manager is not None
        return self.all2all_manager.combine(hidden_states, is_sequence_parallel)

    def destroy(self) -> None:
        """Let go of the shared memory."""
        self.transport.close()


def _join(gathered: torch.Tensor, dim: int) -> torch.Tensor:
    """``[world_size, ...]`` as one tensor that is ``world_size`` times as long in ``dim``."""
    world_size, *shape = gathered.shape
    shape[dim] *= world_size
    return gathered.movedim(0, dim).reshape(shape)


def _check_rows(operation: str, rows: int, expected: int, sizes: Sequence[int]) -> None:
    if rows != expected:
        raise ValueError(f"{operation}: input of {rows} rows: expected {expected} by sizes {list(sizes)}")
