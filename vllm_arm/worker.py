# SPDX-License-Identifier: Apache-2.0
"""The worker process: vLLM's own, with memory from the NUMA nodes that the binding plan gives it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_pp_group
from vllm.utils import cpu_resource_utils
from vllm.utils.cpu_resource_utils import MemoryNodeInfo
from vllm.v1.worker import cpu_worker

from vllm_arm.attention import connectors
from vllm_arm.logs import get_logger
from vllm_arm.runtime import placement
from vllm_arm.runtime.cgroup import format_cpu_list

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

_LITTLE_REMOTE_MEMORY = 0.05
"""Part of a worker's memory that may lie elsewhere: what was there before it was bound, and could not be moved."""


def _memory_share(nodes: Sequence[int], sharers: int, ranks: int) -> MemoryNodeInfo:
    total, available = placement.memory_share(
        [(info.total_memory, info.available_memory) for info in map(cpu_resource_utils.get_memory_node_info, nodes)],
        sharers,
        ranks,
        cpu_resource_utils.get_cgroup_memory_limit(),
        cpu_resource_utils.get_cgroup_memory_usage(),
    )
    return MemoryNodeInfo(total_memory=total, available_memory=available)


class ArmCpuWorker(cpu_worker.CPUWorker):  # type: ignore[misc]  # vLLM is not typed for mypy
    """vLLM's worker, which takes its memory from the one node of its first CPU, and all that this node has."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        connectors.compare_layouts(vllm_config)
        parallel_config = vllm_config.parallel_config
        index = placement.index_of_rank(
            local_rank, parallel_config.local_world_size, parallel_config.data_parallel_rank_local
        )
        bound = placement.inherited_rank(index)
        self._memory_nodes: tuple[int, ...] = ()
        if bound is not None and bound[1].memory_nodes:
            plan, binding = bound
            self._memory_nodes = binding.memory_nodes
            share = (binding.memory_nodes, plan.sharers(index), len(plan.ranks))
            # vLLM asks for one node, and only for the budget of this worker.
            cpu_worker.get_memory_node_info = lambda _: _memory_share(*share)
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=is_driver_worker)
        if bound is not None and self._memory_nodes and self._memory_nodes != bound[1].nodes[:1]:
            torch.ops._C.init_cpu_memory_env(list(self._memory_nodes))

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load as vLLM does, then make what a later stage of a pipeline receives its input in.

        vLLM makes it in the warm-up, which eager execution leaves out.
        """
        super().load_model(load_dummy_weights=load_dummy_weights)
        runner = self.model_runner
        if self.use_v2_model_runner or get_pp_group().is_first_rank or runner.intermediate_tensors is not None:
            return
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=self.model_config.dtype, device=self.device
        )

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as vLLM does, then tell where the memory has come to lie."""
        times = super().compile_or_warm_up_model()
        self._report_memory()
        return times

    def _report_memory(self) -> None:
        if not self._memory_nodes:
            return
        found = placement.read_memory_placement(None, self._memory_nodes)
        if found is None:
            logger.info("rank %d: /proc/self/numa_maps cannot be read, memory placement is unknown", self.rank)
            return
        wanted = format_cpu_list(self._memory_nodes)
        message = "rank %d: %.1f %% of its memory (%.0f MiB) is on NUMA node %s"
        arguments = (self.rank, 100 * found.share, found.total / 2**20, wanted)
        if found.share >= 1 - _LITTLE_REMOTE_MEMORY:
            logger.info(message, *arguments)
        else:
            logger.warning(
                message + "; in a container it can be bound there with docker run --cap-add SYS_NICE", *arguments
            )
