# SPDX-License-Identifier: Apache-2.0
"""Linear layers with int4 weights: our kernel before vLLM's in its list for AWQ, GPTQ and compressed-tensors.

Activations are quantised to int8 for each token (W4A8), also where the checkpoint leaves them as they are (W4A16). What
the op cannot take, and weights of 8 bits with activations that the checkpoint does not quantise, run in int8.
"""

import functools
from typing import Any

import torch

from vllm_arm import envs, ops
from vllm_arm.linear import int4_formats, requantise
from vllm_arm.linear.int4_formats import IntegerWeight
from vllm_arm.logs import get_logger, info_once, warning_once

logger = get_logger(__name__)


def install() -> None:
    """Put our kernel first among those that vLLM tries. Does nothing the second time, or with ``VLLM_ARM_LINEAR=0``."""
    if not envs.VLLM_ARM_LINEAR:
        return
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    kernels = linear._POSSIBLE_KERNELS[PlatformEnum.CPU]
    if kernel_class() not in kernels:
        # vLLM's own way to add one appends it, after kernels that take everything.
        kernels.insert(0, kernel_class())


def groups_of(k: int, group_size: int) -> int:
    """The size of the groups in which the op computes, for ``k`` inputs that are quantised in groups of ``group_size``.

    It may be -1, for all inputs. Larger groups than the op has are cut. Raises ``ValueError`` with the
    reason where the op cannot take the layer.
    """
    sizes = ops.int4_group_sizes(k)
    if not sizes:
        raise ValueError(f"the number of its inputs, {k}, is no multiple of 32 that int4 has")
    if group_size in (-1, k):
        return k
    if k % group_size:
        raise ValueError(f"groups of {group_size} do not divide its {k} inputs")
    fitting = [size for size in sizes if group_size % size == 0]
    if not fitting:
        raise ValueError(f"the size of its groups, {group_size}, is no multiple of 32")
    return max(fitting)


def size_or_warning(name: str, k: int, group_size: int) -> int | None:
    """As :func:`groups_of`; where the op cannot take the layer, None, and a warning that it runs in int8."""
    try:
        return groups_of(k, group_size)
    except ValueError as reason:
        warning_once(logger, f"{name}: int8 in place of int4, for {reason}")
        return None


def check_shard(name: str, inputs: int, inputs_of_rank: int, group_size: int) -> None:
    """Raise ``ValueError`` where tensor parallelism cuts groups of ``group_size`` (-1: all) inputs of the layer."""
    if group_size != -1 and inputs % group_size == 0 and inputs_of_rank % group_size:
        raise ValueError(
            f"{name}: groups of {group_size} do not divide the {inputs_of_rank} inputs that each rank has: "
            "expected a tensor parallel size that cuts no group"
        )


def quantise(weight: torch.Tensor, group_size: int) -> IntegerWeight:
    """A floating-point ``weight`` (``[n, k]``) in groups of ``group_size``, which :func:`groups_of` gave."""
    n, k = weight.shape
    codes = torch.empty(n, k, dtype=torch.int8)
    scales = torch.empty(n, k // group_size, dtype=torch.float32)
    for rows in requantise.row_blocks(n, k):
        codes[rows], scales[rows] = ops.quantise_int4(weight[rows], group_size)
    return IntegerWeight(codes, scales, None)


def pack(weight: IntegerWeight, group_size: int) -> torch.Tensor:
    """``weight`` as :func:`ops.linear_int4` takes it, in groups of ``group_size``, which :func:`groups_of` gave."""
    k = weight.codes.shape[1]
    repeats = k // group_size // weight.scales.shape[1]
    scales, points = weight.scales, weight.zero_points
    if repeats > 1:
        scales = scales.repeat_interleave(repeats, 1)
        points = None if points is None else points.repeat_interleave(repeats, 1)
    size = "all" if group_size == k else str(group_size)
    info_once(logger, f"linear layers in int4: a scale for {size} inputs, activations in int8")
    return ops.pack_int4(weight.codes, scales, points)


@functools.cache
def kernel_class() -> type:
    """Our kernel, as a class for vLLM's list."""
    from vllm.model_executor.kernels.linear.mixed_precision import MPLinearKernel
    from vllm.scalar_type import scalar_types

    bits_of = {
        scalar_types.int4: 4,
        scalar_types.uint4: 4,
        scalar_types.uint4b8: 4,
        scalar_types.uint8: 8,
        scalar_types.uint8b128: 8,
    }

    class ArmInt4LinearKernel(MPLinearKernel):  # type: ignore[misc]  # vLLM is not typed for mypy
        """Int4 weights with scales for groups or channels, symmetric or with zero points."""

        # Set by the patch that lets GPTQ have zero points.
        zero_points_less_one = False

        @classmethod
        def get_min_capability(cls) -> int:
            return -1

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            if c.weight_type not in bits_of:
                return False, f"weights of type {c.weight_type}: expected one of {', '.join(map(str, bits_of))}"
            inputs, outputs = c.full_weight_shape
            check_shard(f"a linear layer of {outputs} outputs", inputs, c.partition_weight_shape[0], c.group_size)
            return True, None

        def process_weights_after_loading(self, layer: Any) -> None:
            k, n = self.config.partition_weight_shape
            bits = bits_of[self.config.weight_type]
            zero_points = getattr(layer, self.w_zp_name) if self.config.zero_points else None
            codes, scales = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
            less_one = self.zero_points_less_one
            weight = int4_formats.read(codes, scales, zero_points, bits, (k, n), points_less_one=less_one)
            del codes, scales, zero_points
            # W4A8 layers have the codes under two names.
            requantise.drop(layer, self.w_q_name, self.w_s_name, self.w_zp_name, "weight", "weight_shape")
            self.int8_kernel = None
            group_size = size_or_warning(layer.prefix, k, self.config.group_size) if bits == 4 else None
            if group_size is None:
                info_once(logger, "integer weights that int4 does not take: int8 with a scale for each output")
                self.int8_kernel = requantise.to_int8(layer, n, k, weight.dequantise)
                return
            self.group_size = group_size
            packed = torch.nn.Parameter(pack(weight, group_size), requires_grad=False)
            layer.register_parameter(self.w_q_name, packed)

        def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            if self.int8_kernel is not None:
                return self.int8_kernel.apply_weights(layer, x, bias)
            n = self.config.partition_weight_shape[1]
            packed = getattr(layer, self.w_q_name)
            return ops.linear_int4(x, packed, n, self.group_size, self.config.zero_points, bias)

    return ArmInt4LinearKernel
