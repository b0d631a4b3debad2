# SPDX-License-Identifier: Apache-2.0
"""Loads the library of ops into torch."""

import functools
from pathlib import Path

import torch

_LIBRARY = Path(__file__).parent.with_name("_C.so")


@functools.cache
def load() -> None:
    """Make ``torch.ops.vllm_arm`` available. Raises ``ImportError`` where the extension is missing."""
    if not _LIBRARY.exists():
        raise ImportError(f"{_LIBRARY} is missing: this vllm-arm was installed without its extension")
    torch.ops.load_library(str(_LIBRARY))


def register_mutating_fakes(*names: str) -> None:
    """Tell torch.compile that these ops only write into their arguments: on fake tensors there is nothing to do."""
    load()
    for name in names:
        torch.library.register_fake(f"vllm_arm::{name}", lambda *_: None)
