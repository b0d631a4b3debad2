# SPDX-License-Identifier: Apache-2.0
"""Becomes the ``conftest.py`` beside vLLM's ``test_onednn.py``: points its ops at ours and shrinks its weights.

It runs in a folder of its own, so it imports nothing of this project's tests. VLLM_ARM_CONFORMANCE_ENGINE names the
engine of ours; of each test it runs a sample, and all cases where VLLM_ARM_CONFORMANCE=all.
"""

import os
import sys
import types
from typing import NamedTuple

import pytest
import torch
import vllm._custom_ops
from sampling import calls, count_calls, leave_out_repetitions  # noqa: F401  # a fixture

from vllm_arm.linear import engines

# The test's own weights [n, k] with fewer elements: large, small, and of odd sizes.
SMALLER = [(256, 128), (1024, 1024), (2048, 512), (4008, 512), (1023, 491), (1001, 15)]

engine = engines.PACKED[os.environ["VLLM_ARM_CONFORMANCE_ENGINE"]]  # type: ignore[index]


class Weight(NamedTuple):
    """What stands for vLLM's handler of a weight of ``n`` outputs."""

    packed: torch.Tensor
    n: int
    scales: torch.Tensor | None = None
    sums: torch.Tensor | None = None


def create_onednn_mm(weight: torch.Tensor, primitive_cache_size: int = 128) -> Weight:
    """vLLM's op, done by ours. ``weight`` is ``[k, n]``."""
    return Weight(engine.pack(weight.t().contiguous()), weight.shape[1])


def onednn_mm(handler: Weight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """vLLM's op, done by ours."""
    calls["linear"] += 1
    return engine.linear(x, handler.packed, handler.n, bias)


def create_onednn_scaled_mm(
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    output_type: torch.dtype,
    dynamic_quant: bool,
    use_azp: bool,
    primitive_cache_size: int = 128,
) -> Weight:
    """vLLM's op, done by ours. ``weight`` is int8 ``[k, n]``."""
    n = weight.shape[1]
    scales = weight_scales.flatten().expand(n).contiguous()
    sums = weight.sum(0, dtype=torch.int32) if use_azp else None
    return Weight(engine.pack(weight.t().contiguous()), n, scales, sums)


def onednn_scaled_mm(
    handler: Weight,
    x: torch.Tensor,
    output: torch.Tensor,
    input_scale: torch.Tensor | None,
    input_zp: torch.Tensor | None,
    input_zp_adj: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """vLLM's op, done by ours, which quantises by itself: it gets what the integers of ``x`` stand for.

    With a scale for each token, each is given alone: ours chooses such scales by itself.
    """
    calls["linear_int8"] += 1
    assert input_scale is not None
    values = x.double() if input_zp is None else x.double() - input_zp.double()
    values = (values * input_scale.double()).float()
    rows = len(x) if len(input_scale) == 1 else 1
    for row in range(0, len(x), rows):
        part = slice(row, row + rows)
        of_scale = part if len(input_scale) > 1 else slice(None)
        output[part] = engine.linear_int8(
            *(values[part], handler.packed, handler.scales, handler.sums, None if bias is None else bias.float()),
            *(input_scale[of_scale].flatten(), None if input_zp is None else input_zp[of_scale].flatten()),
        )
    return output


for function in (create_onednn_mm, onednn_mm, create_onednn_scaled_mm, onednn_scaled_mm):
    assert hasattr(vllm._custom_ops, function.__name__), f"vLLM has no {function.__name__}"
    setattr(vllm._custom_ops, function.__name__, function)


def to_int8(tensor: torch.Tensor) -> torch.Tensor:
    """The one function that the test takes from vLLM's other tests."""
    return tensor.clamp(-128, 127).round().to(torch.int8)


for name in ("tests", "tests.kernels", "tests.kernels.utils"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["tests.kernels.utils"].to_int8 = to_int8  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Shrink the list that the test's decorators refer to, before it is read."""
    metafunc.module.NK_FACTORS[:] = SMALLER


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Leave out repetitions unless all is asked for."""
    leave_out_repetitions(config, items)
