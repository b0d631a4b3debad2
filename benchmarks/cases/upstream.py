# SPDX-License-Identifier: Apache-2.0
"""vLLM's own operators, loaded without importing vLLM, which takes half a minute under emulation."""

from __future__ import annotations

import functools
import platform
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch


def _library_name() -> str:
    """The build of the library that vLLM itself picks on this CPU."""
    if platform.machine() == "x86_64":
        if not torch.cpu._is_avx512_supported():
            return "_C_AVX2.abi3.so"
        if not torch.cpu._is_avx512_bf16_supported():
            return "_C_AVX512.abi3.so"
    return "_C.abi3.so"


@functools.cache
def operators() -> Any:
    """``torch.ops._C`` with vLLM's operators in it. Raises ``ImportError`` where vLLM is not installed."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("vllm is not installed")
    library = Path(spec.submodule_search_locations[0]) / _library_name()
    torch.ops.load_library(str(library))
    return torch.ops._C


def attention_isa() -> str:
    """The kernels that vLLM's attention uses on this CPU for bf16, a head size of 32 n and blocks of 128 tokens."""
    if platform.machine() == "aarch64":
        return "neon"
    return "amx" if torch.cpu._is_amx_tile_supported() else "vec"
