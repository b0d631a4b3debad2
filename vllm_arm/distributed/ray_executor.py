# SPDX-License-Identifier: Apache-2.0
"""Workers that Ray starts, on one machine or several: vLLM's executor for Ray, which knows of no CPUs.

Ray starts a worker anywhere, in the environment of its own daemon there. So what must be there when a process starts
(the libraries to preload, our switches) goes along with the worker, and its CPUs are found by the worker itself.
"""

import os
from typing import Any

import ray
import torch
import vllm.envs
from vllm.v1.executor import ray_executor_v2

from vllm_arm import envs
from vllm_arm.runtime import environment, placement
from vllm_arm.runtime.process import RAY_WORKER

_AT_START = ("LD_PRELOAD", "LD_LIBRARY_PATH", "VLLM_PLUGINS")
_AT_START_PREFIXES = ("VLLM_ARM_", "MIMALLOC_")


def variables_at_start(environ: dict[str, str]) -> dict[str, str]:
    """What of ``environ`` a worker needs before vLLM gives it the rest, which is after vLLM has been imported."""
    chosen = {
        name: value for name, value in environ.items() if name in _AT_START or name.startswith(_AT_START_PREFIXES)
    }
    return {**chosen, RAY_WORKER: "1"}


class ArmRayWorker(ray_executor_v2.RayWorkerProc):  # type: ignore[misc]  # vLLM is not typed for mypy
    """vLLM's worker in a Ray actor, which binds itself to its CPUs."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """The node that this worker is on, and in place of a device the worker's rank.

        The executor gives every worker those of all workers on its node, and so their number.
        """
        return ray.get_runtime_context().get_node_id(), [self._init_kwargs["rank"]]

    def initialize_worker(
        self,
        local_rank: int,
        env_vars: dict[str, str],
        distributed_init_method: str,
        driver_env_vars: dict[str, str] | None = None,
        assigned_physical_gpu_ids: list[int] | None = None,
    ) -> None:
        """As vLLM's, on the CPUs that the binding plan of this machine gives to worker ``local_rank``."""
        local_workers = len(assigned_physical_gpu_ids or (0,))
        threads = environment.bind_own_threads(self._init_kwargs["vllm_config"], local_rank, local_workers)
        if threads is not None:
            # Ray has set OMP_NUM_THREADS to 1 before torch was loaded.
            torch.set_num_threads(threads)
        # Else vLLM would look for an address by which to reach the internet.
        os.environ.setdefault("VLLM_HOST_IP", ray.util.get_node_ip_address())
        super().initialize_worker(
            local_rank,
            {**env_vars, environment.LOCAL_WORKERS: str(local_workers)},
            distributed_init_method,
            driver_env_vars,
        )


class ArmRayExecutor(ray_executor_v2.RayExecutorV2):  # type: ignore[misc]  # vLLM is not typed for mypy
    """vLLM's executor, with our workers."""

    def _init_executor(self) -> None:
        ray_executor_v2.RayWorkerProc = ArmRayWorker
        super()._init_executor()
        here = ray.get_runtime_context().get_node_id()
        local_workers = sum(handle.node_id == here for handle in self.ray_worker_handles)
        if envs.VLLM_ARM_BINDING and local_workers:
            placement.bind_process(environment.plan_threads(local_workers).engine_cpus, "EngineCore")

    def _build_runtime_env(self) -> dict[str, Any]:
        runtime_env: dict[str, Any] = super()._build_runtime_env()
        runtime_env["env_vars"] = {**variables_at_start(dict(os.environ)), **runtime_env["env_vars"]}
        return runtime_env

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        # The worker's CPU is reserved by its bundle, and vLLM gives num_cpus itself.
        return {"num_gpus": 0}


def choose_executor() -> type[ArmRayExecutor]:
    """The executor for ``--distributed-executor-backend ray``. Raises ``ValueError`` where the older one is wanted."""
    if not vllm.envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND:
        raise ValueError("VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0: expected 1, for vLLM's older executor has no CPU workers")
    return ArmRayExecutor
