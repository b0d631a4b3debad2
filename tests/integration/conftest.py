# SPDX-License-Identifier: Apache-2.0
"""What tests in this folder share."""

import importlib

import pytest


@pytest.fixture
def patched_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that import vLLM into this process: with vllm-arm active, so that it is patched as it is imported."""
    monkeypatch.setenv("VLLM_ARM_FORCE", "1")
    importlib.import_module("vllm.platforms")
