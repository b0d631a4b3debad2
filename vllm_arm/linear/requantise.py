# SPDX-License-Identifier: Apache-2.0
"""Layers whose weights become int8 as they are loaded, whatever they were before."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_arm import ops

_BLOCK_ELEMENTS = 1 << 22


def row_blocks(n: int, k: int) -> Iterator[slice]:
    """The rows of a weight ``[n, k]`` in blocks of some MiB, so that what is computed from each takes little memory."""
    rows = max(1, _BLOCK_ELEMENTS // k)
    return (slice(start, min(start + rows, n)) for start in range(0, n, rows))


def to_int8(layer: Any, n: int, k: int, dequantise: Callable[[slice], torch.Tensor]) -> Any:
    """Give ``layer`` a weight ``[n, k]`` in int8, with one scale for each output.

    ``dequantise`` gives rows of it in floating point. Returns the kernel that runs the layer, as :func:`use_int8`.
    """
    return use_int8(layer, *quantise(n, k, dequantise))


def quantise(n: int, k: int, dequantise: Callable[[slice], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Int8 codes ``[n, k]`` and an fp32 scale for each output of a weight that ``dequantise`` gives rows of."""
    codes, scales = torch.empty(n, k, dtype=torch.int8), torch.empty(n, dtype=torch.float32)
    for rows in row_blocks(n, k):
        codes[rows], scales[rows], _ = ops.quantise(dequantise(rows))
    return codes, scales


def use_int8(layer: Any, codes: torch.Tensor, scales: torch.Tensor) -> Any:
    """Give ``layer`` a weight of int8 ``codes`` (``[n, k]``) and fp32 ``scales`` (``[n]``), in place of any ``weight``.

    Activations are quantised for each token. Returns the kernel that runs the layer by
    ``apply_weights(layer, x, bias)``: the first of vLLM's int8 kernels, which is ours where an engine has int8.
    """
    from vllm.model_executor.kernels.linear import init_int8_linear_kernel
    from vllm.model_executor.utils import replace_parameter

    kernel = init_int8_linear_kernel(
        is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name="vllm-arm"
    )
    drop(layer, "weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj")
    replace_parameter(layer, "weight", codes)
    replace_parameter(layer, "weight_scale", scales[:, None])
    for name in ("input_scale", "input_zero_point", "azp_adj"):
        layer.register_parameter(name, None)
    layer.logical_widths = [codes.shape[0]]
    kernel.process_weights_after_loading(layer)
    return kernel


def drop(layer: Any, *names: str | None) -> None:
    """Free those of ``layer``'s parameters that it has."""
    for name in names:
        if name is not None and hasattr(layer, name):
            delattr(layer, name)
