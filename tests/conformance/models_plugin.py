# SPDX-License-Identifier: Apache-2.0
"""Becomes the ``conftest.py`` beside vLLM's ``test_cpu_wna16.py`` and ``test_cpu_w8a8.py``: gives them models of ours.

It runs in a folder of its own, so it imports nothing of this project's tests. VLLM_ARM_CONFORMANCE_MODELS are the
folders of the models, by comma. Each is served in a process of its own: vLLM leaves too much behind for two in one.
"""

import multiprocessing
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm._custom_ops
from sampling import calls, count_calls  # noqa: F401  # a fixture
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_arm import ops

MODELS = os.environ["VLLM_ARM_CONFORMANCE_MODELS"].split(",")


class CountOps(TorchDispatchMode):
    """Counts the ops of ours that this thread calls."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "vllm_arm":
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def generate(model: str, dtype: str, prompts: list[str], max_tokens: int) -> tuple[list[Any], Counter[str]]:
    """The tokens and text that follow each prompt, and how often each op of ours ran for them."""
    # Here, for it takes long, and the tests themselves need no engine.
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, max_model_len=1024, enforce_eager=True)
    with CountOps() as ran:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return [(list(output.outputs[0].token_ids), output.outputs[0].text) for output in outputs], ran.counts


class Runner:
    """As much of the runner of vLLM's tests as these use."""

    def __init__(self, model: str, dtype: str) -> None:
        self.model, self.dtype = model, dtype

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate_greedy(self, prompts: list[str], max_tokens: int) -> list[Any]:
        """The tokens and text that follow each prompt."""
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            outputs, counts = process.submit(generate, self.model, self.dtype, prompts, max_tokens).result()
        counts["tokens"] = sum(len(tokens) for tokens, _ in outputs)
        for name, count in counts.items():
            calls[f"{Path(self.model).name} {name}"] += count
        return outputs


@pytest.fixture
def vllm_runner() -> type[Runner]:
    """vLLM's fixture."""
    return Runner


def cpu_gemm_wna16(
    input: torch.Tensor,
    q_weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    pack_factor: int,
    isa_hint: str,
) -> torch.Tensor:
    """vLLM's op, done by ours, for the weight that its test has: all zeros, so that their order means nothing."""
    assert pack_factor == 8
    assert zeros is None
    assert not q_weight.any()
    groups, n = scales.shape
    k = input.shape[-1]
    # Stored from 0 to 15, of which 8 stands for 0.
    packed = ops.pack_int4(torch.full((n, k), -8, dtype=torch.int8), scales.float().t().contiguous())
    calls["linear_int4"] += 1
    return ops.linear_int4(input, packed, n, k // groups, bias=bias)


assert hasattr(vllm._custom_ops, "cpu_gemm_wna16"), "vLLM has no cpu_gemm_wna16"
vllm._custom_ops.cpu_gemm_wna16 = cpu_gemm_wna16


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Put our models into the list that the test's decorators refer to, before it is read."""
    metafunc.module.MODELS[:] = MODELS
