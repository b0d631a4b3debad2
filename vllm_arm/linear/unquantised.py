# SPDX-License-Identifier: Apache-2.0
"""vLLM's unquantised linear layers, LM head and embeddings, on weights packed while the model loads.

The packed weight takes the plain one's place as the layer's ``weight``, so that there is no other copy, and
torch.compile and LoRA find a parameter where they look for one. Tied embeddings are looked up in the packed weight of
the LM head.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from vllm_arm import envs
from vllm_arm.linear import engines
from vllm_arm.logs import get_logger, info_once, warning_once

logger = get_logger(__name__)

Dispatch = Callable[..., None]

# On a plain embedding: the packed one that has taken its place, which a tied LM head shares, and what multiplies by it.
_REPLACEMENT = "_vllm_arm_replacement"


def install() -> None:
    """Put our choice of engine before vLLM's. Does nothing the second time, or with ``VLLM_ARM_LINEAR=0``."""
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm
    if not envs.VLLM_ARM_LINEAR or hasattr(original, "_vllm_arm"):
        return

    @functools.wraps(original)
    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        if not pack_layer(layer, remove_weight):
            original(layer, remove_weight)

    dispatch._vllm_arm = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch


def pack_layer(layer: Any, remove_weight: bool) -> bool:
    """Pack the weight of ``layer`` and set its ``cpu_linear``; False where vLLM should do as it does without us.

    ``remove_weight`` is vLLM's way to tell linear layers, which it sets it for, from embeddings and LM heads.
    """
    weight = layer.weight
    if weight.is_meta or weight.ndim != 2 or getattr(layer, "_cpu_skip_gemm_dispatch", False):
        return False
    if not remove_weight:
        return _pack_embedding(layer)
    return _pack(layer) != "vllm"


def _pack(layer: Any) -> engines.Engine:
    """Prepare ``layer`` for the engine that the table names, and return that."""
    n, k = layer.weight.shape
    scheme = engines.scheme_of(layer.weight.dtype)
    if scheme is None:
        return "vllm"
    choice = engines.choose(scheme, n, k)
    if choice.engine == "vllm":
        message = f"linear layers in {scheme}: vLLM's own, not packed by vllm-arm: {choice.reason}"
        warning_once(logger, message)
        return "vllm"
    info_once(logger, f"linear layers in {scheme}: {choice.engine}, {choice.implementation} ({choice.reason})")
    if choice.engine == "torch":
        layer.cpu_linear = functional.linear
        return "torch"
    engine = engines.PACKED[choice.engine]
    packed = engine.pack(layer.weight.detach())
    engine.prepare(n, k, layer.weight.dtype, getattr(layer, "bias", None) is not None)
    layer.weight = torch.nn.Parameter(packed, requires_grad=False)
    layer.cpu_linear = functools.partial(_multiply, engine.linear, n)
    return choice.engine


def _multiply(
    linear: Callable[..., torch.Tensor], n: int, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return linear(x, packed, n, bias)


def _pack_embedding(layer: Any) -> bool:
    """Pack an LM head, or an embedding that a tied LM head shares."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    plain = layer.weight
    if (replacement := getattr(plain, _REPLACEMENT, None)) is not None:
        layer.weight, layer.cpu_linear = replacement
        return True
    is_head = isinstance(layer, ParallelLMHead)
    if _casts_the_head(plain.dtype) or not (is_head or _ties_embeddings()):
        # Looked up and, at most, multiplied by in plain form.
        layer.cpu_linear = functional.linear
        return True
    engine = _pack(layer)
    if engine in engines.PACKED and not is_head:
        setattr(plain, _REPLACEMENT, (layer.weight, layer.cpu_linear))
        layer.quant_method = _packed_embedding_method()(engines.PACKED[engine].unpack_rows, *plain.shape)
    return engine != "vllm"


@functools.cache
def _packed_embedding_method() -> type:
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    class PackedEmbeddingMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]  # vLLM is not typed for mypy
        """Looks embeddings up in a packed weight of ``[n, k]``."""

        def __init__(self, unpack_rows: Callable[..., torch.Tensor], n: int, k: int) -> None:
            super().__init__()
            self.unpack_rows, self.shape = unpack_rows, (n, k)

        def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
            return self.unpack_rows(layer.weight, input_, *self.shape)

    return PackedEmbeddingMethod


def _model_config() -> Any:
    from vllm.config import get_current_vllm_config_or_none

    vllm_config = get_current_vllm_config_or_none()
    return vllm_config and vllm_config.model_config


def _ties_embeddings() -> bool:
    model_config = _model_config()
    return model_config is not None and bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))


def _casts_the_head(dtype: torch.dtype) -> bool:
    """Whether the logits are computed in another dtype, for which vLLM casts the plain weight of the head."""
    model_config = _model_config()
    return model_config is not None and model_config.head_dtype not in (None, dtype)
