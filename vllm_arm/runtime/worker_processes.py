# SPDX-License-Identifier: Apache-2.0
"""How EngineCore starts its workers: each on its own CPUs, then EngineCore itself off them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm.utils.ompmultiprocessing import OMPProcessManager
from vllm.v1.executor import multiproc_executor

from vllm_arm.runtime import placement

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class BindingProcessManager(OMPProcessManager):  # type: ignore[misc]  # vLLM is not typed for mypy
    """vLLM's manager, which sets the OpenMP variables of a worker while it is started."""

    def __init__(self, config: "VllmConfig") -> None:
        super().__init__(config)
        self._plan = placement.inherited_plan()
        parallel_config = config.parallel_config
        self._first = placement.index_of_rank(
            0, parallel_config.local_world_size, parallel_config.data_parallel_rank_local
        )

    @contextmanager
    def configure_omp_envs(self, rank: int, local_rank: int) -> Iterator[None]:
        """The environment and the CPUs in which to start worker ``local_rank`` of this machine."""
        index = self._first + local_rank
        if self._plan is None or index >= len(self._plan.ranks):
            with super().configure_omp_envs(rank, local_rank):
                yield
            return
        with super().configure_omp_envs(rank, local_rank), placement.children_on(self._plan.ranks[index].cpus):
            yield
        if local_rank == self.local_world_size - 1:
            placement.bind_process(self._plan.engine_cpus, "EngineCore")


def install() -> None:
    """Make vLLM's executor of worker processes use the manager. Does nothing the second time."""
    multiproc_executor.OMPProcessManager = BindingProcessManager
