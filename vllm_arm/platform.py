# SPDX-License-Identifier: Apache-2.0
"""The platform that vLLM runs on where vllm-arm is active: its own CPU platform, with our choices."""

import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import vllm
from vllm.platforms.cpu import CpuPlatform

import vllm_arm
from vllm_arm import custom_ops, envs, norm
from vllm_arm.attention import connectors, selection
from vllm_arm.logs import get_logger
from vllm_arm.runtime import environment

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig


logger = get_logger(__name__)


class ArmCpuPlatform(CpuPlatform):  # type: ignore[misc]  # vLLM is not typed for mypy
    """vLLM's CPU platform on Arm Neoverse.

    It keeps ``_enum = PlatformEnum.CPU``, so that all of vLLM's CPU path stays as it is where we do not override it.
    """

    # One of a Ray node's CPUs stands for each worker: `ray start --num-cpus` says how many workers a machine takes.
    ray_device_key = "CPU"

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Set the defaults of the CPU path, and what EngineCore and the workers inherit.

        vLLM calls this in the front end and again in EngineCore. Raises ``BindingError`` on a
        ``VLLM_CPU_OMP_THREADS_BIND`` that this machine cannot do, and ``ValueError`` on what attention cannot do.
        """
        if multiprocessing.parent_process() is None:
            logger.info("vllm-arm %s is active; 'vllm-arm doctor' shows what it does", vllm_arm.__version__)
        os.environ[environment.LOCAL_WORKERS] = str(vllm_config.parallel_config.local_world_size)
        environment.bind_threads(vllm_config)
        environment.preload_libraries(Path(torch.__file__).parent)
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "vllm_arm.worker.ArmCpuWorker"
        if vllm_config.parallel_config.distributed_executor_backend == "ray":
            from vllm_arm.distributed.ray_executor import choose_executor

            vllm_config.parallel_config.distributed_executor_backend = choose_executor()
        super().check_and_update_config(vllm_config)
        custom_ops.leave_out(vllm_config)
        environment.drop_bundled_allocator(Path(vllm.__file__).parent)
        selection.check_model(vllm_config)
        connectors.check(vllm_config.kv_transfer_config)

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: "AttentionBackendEnum",
        attn_selector_config: "AttentionSelectorConfig",
        num_heads: int | None = None,
    ) -> str:
        """The attention backend of a layer. Raises ``ValueError`` on a layer that ours cannot run."""
        chosen: str = super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        if chosen == selection.BACKEND:
            selection.check_layer(attn_selector_config)
        return chosen

    @classmethod
    def pack_kv_cache(cls, kv_cache: torch.Tensor, indices: torch.Tensor) -> None:
        """Bring blocks that another engine computed into the layout of this platform's attention."""
        # A cache of latent attention has three dimensions, and is not ours.
        if kv_cache.dim() != 4 or not selection.choice()[0]:
            super().pack_kv_cache(kv_cache, indices)
            return
        from vllm_arm.attention import transfer

        transfer.pack_kv_cache(kv_cache, indices)

    @classmethod
    def device_count(cls) -> int:
        """How many workers a replica has on this host: vLLM's message queues tell by it which ranks share one."""
        return int(os.environ.get(environment.LOCAL_WORKERS, "1"))

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """The class of the communicators of groups of ranks."""
        if not envs.VLLM_ARM_COLLECTIVES:
            return str(super().get_device_communicator_cls())
        return "vllm_arm.distributed.communicator.ArmCommunicator"

    @classmethod
    def import_ir_kernels(cls) -> None:
        """Register our implementations of vLLM's IR ops beside its own."""
        super().import_ir_kernels()
        norm.register()

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: "VllmConfig") -> "IrOpPriorityConfig":
        """Which implementation of each IR op is tried first."""
        from vllm.config.kernel import IrOpPriorityConfig

        providers = norm.providers(vllm_config)
        return IrOpPriorityConfig.with_default(["native"], rms_norm=providers, fused_add_rms_norm=list(providers))


selection.register()
