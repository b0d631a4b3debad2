# SPDX-License-Identifier: Apache-2.0
"""The only door to the kernels: loads the library, documents each op, and gives torch.compile what it needs.

Importing this package loads the library into torch, and raises ``ImportError`` where it is missing. Each family of ops
has a module here; its functions run the kernel variant that ``_host.select_isa`` picks for this CPU (see
``VLLM_ARM_ISA``).
"""

import torch

from vllm_arm.ops import collectives
from vllm_arm.ops.attention import paged_attention, schedule_attention, write_kv_cache
from vllm_arm.ops.linear import (
    linear,
    linear_implementation,
    linear_int8,
    onednn_version,
    pack_linear,
    prepare_linear,
    quantise,
    unpack_rows,
)
from vllm_arm.ops.linear_int4 import INT4_GROUP_SIZES, int4_group_sizes, linear_int4, pack_int4, quantise_int4
from vllm_arm.ops.norm import MAXIMUM_DIMENSIONS, fused_add_rms_norm, rms_norm
from vllm_arm.ops.panel_linear import pack_panels, panel_linear, panel_linear_int8, unpack_panel_rows

__all__ = [
    "INT4_GROUP_SIZES",
    "MAXIMUM_DIMENSIONS",
    "active_isa",
    "collectives",
    "fused_add_rms_norm",
    "int4_group_sizes",
    "linear",
    "linear_implementation",
    "linear_int4",
    "linear_int8",
    "onednn_version",
    "pack_int4",
    "pack_linear",
    "pack_panels",
    "paged_attention",
    "panel_linear",
    "panel_linear_int8",
    "prepare_linear",
    "quantise",
    "quantise_int4",
    "rms_norm",
    "schedule_attention",
    "unpack_panel_rows",
    "unpack_rows",
    "write_kv_cache",
]


def active_isa(operation: str) -> str:
    """The kernel variant that ``operation`` runs on this CPU, for instance ``"neon"``.

    Raises ``RuntimeError`` on an unknown op, and where ``VLLM_ARM_ISA`` names a variant that this CPU cannot run.
    """
    return str(torch.ops.vllm_arm.active_isa(operation))
