# SPDX-License-Identifier: Apache-2.0
"""Whether attention runs on our kernels, and what they cannot do. Kept free of vLLM's backends, which load much."""

from typing import TYPE_CHECKING

import torch

from vllm_arm import _host, activation, envs
from vllm_arm.logs import get_logger, info_once, warning_once
from vllm_arm.ops import attention

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

BACKEND = "vllm_arm.attention.backend.ArmAttentionBackend"

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head")
HEAD_SIZES = range(attention.HEAD_SIZE_STEP, attention.MAXIMUM_HEAD_SIZE + 1, attention.HEAD_SIZE_STEP)

logger = get_logger(__name__)


def choice() -> tuple[bool, str]:
    """Whether attention runs on our kernels, and why. Off Arm it does where ``VLLM_ARM_ISA=portable`` asks for it."""
    if not envs.VLLM_ARM_ATTENTION:
        return False, "VLLM_ARM_ATTENTION=0"
    if not activation.is_arm() and envs.VLLM_ARM_ISA is None:
        return False, "vLLM's kernels are made for this CPU, ours is the portable one (VLLM_ARM_ISA=portable runs it)"
    variants = _host.operations()["paged_attention"]
    return True, f"{_host.select_isa(variants, _host.host_features(), envs.VLLM_ARM_ISA)} kernel"


def register() -> None:
    """Put our backend in the place of vLLM's ``CPU_ATTN``. Does nothing where it is switched off."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if choice()[0]:
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)


def check_model(vllm_config: "VllmConfig") -> None:
    """Refuse in the front end, before anything is loaded, what no layer of the model could run.

    Raises ``ValueError`` naming the setting and what was expected.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    # Models with latent attention, and those without any, have other backends.
    if not choice()[0] or model is None or model.use_mla or model.is_attention_free:
        return
    block_size = cache.block_size if cache.user_specified_block_size else None
    _refuse(_limits(model.get_head_size(), model.dtype, cache.cache_dtype, block_size))


def check_layer(config: "AttentionSelectorConfig") -> None:
    """Refuse a layer that our backend cannot run; ``config`` is vLLM's description of it.

    Nothing is refused here that vLLM's own CPU attention computes rightly, so there is nothing to fall back to. Raises
    ``ValueError`` naming the setting and what was expected.
    """
    from vllm_arm.attention.backend import ArmAttentionBackend

    limits = _limits(config.head_size, config.dtype, config.kv_cache_dtype, config.block_size)
    if config.use_mm_prefix:
        message = (
            "attention: the tokens of an image attend to those before them only, as in vLLM's own CPU attention, "
            "though this model was trained with attention to the whole image"
        )
        warning_once(logger, message)
    settings = config._asdict() | {"use_mm_prefix": False, "device_capability": None}
    named = {"head_size", "dtype", "kv_cache_dtype", "block_size"}
    limits += [
        reason for reason in ArmAttentionBackend.validate_configuration(**settings) if reason.split(" ")[0] not in named
    ]
    _refuse(limits)
    info_once(logger, f"attention runs on vllm-arm's {choice()[1]}")


def _limits(head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, block_size: int | None) -> list[str]:
    """What of these our backend cannot run, one line each, with what was expected."""
    limits = []
    if head_size not in HEAD_SIZES:
        limits.append(f"head size {head_size}: expected a multiple of {HEAD_SIZES.step} up to {HEAD_SIZES[-1]}")
    if dtype not in DTYPES:
        limits.append(f"dtype {dtype}: expected bfloat16, float16 or float32")
    if kv_cache_dtype is not None and kv_cache_dtype not in KV_CACHE_DTYPES:
        limits.append(f"--kv-cache-dtype {kv_cache_dtype}: expected one of {', '.join(KV_CACHE_DTYPES)}")
    elif kv_cache_dtype in ("float16", "bfloat16") and dtype != getattr(torch, kv_cache_dtype):
        limits.append(f"--kv-cache-dtype {kv_cache_dtype}: expected auto, a quantised one, or the model's {dtype}")
    if block_size is not None and block_size % attention.PANEL_TOKENS:
        limits.append(f"--block-size {block_size}: expected a multiple of {attention.PANEL_TOKENS}")
    return limits


def _refuse(limits: list[str]) -> None:
    if limits:
        raise ValueError(f"attention on CPU: {'; '.join(limits)}")
