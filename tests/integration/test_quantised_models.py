# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints, and others that are quantised while they load, in whole engines beside bfloat16."""

from typing import Any, NamedTuple

import pytest

from tests.integration.engines import STOCK, Results, ask, engine
from tests.integration.serving import TRAINED_MODEL
from tests.models.quantised import make_quantised_llama, make_untied_llama

pytestmark = pytest.mark.slow

# Of linear layers alone.
LINEAR = STOCK | {"VLLM_ARM_LINEAR": "1", "VLLM_ARM_PATCHES": "1"}
INT4_KERNEL, FP8_KERNEL = "ArmInt4LinearKernel", "ArmFp8ScaledMMLinearKernel"
INT8_BOUND, INT4_BOUND = 1.01, 1.04
"""Of the perplexity over bfloat16's."""


class Checkpoint(NamedTuple):
    """A scheme of :mod:`tests.models.quantised` with its options, the kernel that should run it, and its bound."""

    scheme: str
    options: dict[str, Any]
    kernel: str
    bound: float


CHECKPOINTS = {
    "awq": Checkpoint("awq", {}, INT4_KERNEL, INT4_BOUND),
    "gptq": Checkpoint("gptq", {}, INT4_KERNEL, INT4_BOUND),
    "gptq-asymmetric": Checkpoint("gptq", {"symmetric": False}, INT4_KERNEL, INT4_BOUND),
    "w4a16": Checkpoint("packed", {"group_size": 128}, INT4_KERNEL, INT4_BOUND),
    "w4a16-asymmetric": Checkpoint("packed", {"symmetric": False}, INT4_KERNEL, INT4_BOUND),
    "w8a16-channel": Checkpoint("packed", {"bits": 8, "group_size": None}, INT4_KERNEL, INT8_BOUND),
    "w4a8": Checkpoint("integers", {"bits": 4, "group_size": 32}, INT4_KERNEL, INT4_BOUND),
    "w4a8-packed": Checkpoint("packed", {"activations": True}, INT4_KERNEL, INT4_BOUND),
    "w8a8": Checkpoint("integers", {}, "ArmInt8ScaledMMLinearKernel", INT8_BOUND),
    "fp8-channel": Checkpoint("fp8", {}, FP8_KERNEL, INT8_BOUND),
    "fp8-alone": Checkpoint("fp8", {"strategy": "tensor", "activations": False}, FP8_KERNEL, INT8_BOUND),
    "fp8-tensor": Checkpoint("fp8_plain", {}, FP8_KERNEL, INT8_BOUND),
    "fp8-blocks": Checkpoint("fp8_plain", {"blocks": True}, FP8_KERNEL, INT8_BOUND),
}
ON_LOAD = {"arm_int8": INT8_BOUND, "arm_int4": INT4_BOUND}
CACHED = "arm_int4 from the cache"
LM_HEAD = "arm_int4 with the LM head"
LM_HEAD_CONFIG = {"quant_method": "arm_int4", "group_size": 64, "include": ["lm_head"]}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    models = tmp_path_factory.mktemp("models")
    engines = [engine("bfloat16", TRAINED_MODEL, "short_perplexity", "mixed")]
    for name in ON_LOAD:
        engines.append(engine(name, TRAINED_MODEL, "short_perplexity", "mixed", quantization=name))
    engines.append(engine(CACHED, TRAINED_MODEL, "short_perplexity", "mixed", quantization="arm_int4"))
    overrides = {"quantization_config": LM_HEAD_CONFIG}
    untied = make_untied_llama(models / "untied")
    engines.append(
        engine(LM_HEAD, untied, "short_perplexity", "head_method", quantization="arm_int4", hf_overrides=overrides)
    )
    for name, checkpoint in CHECKPOINTS.items():
        model = make_quantised_llama(models / name, checkpoint.scheme, **checkpoint.options)
        engines.append(engine(name, model, "short_perplexity", "linear_kernels", dtype="bfloat16"))
    cache = tmp_path_factory.mktemp("cache") / "weights"
    return ask(engines, LINEAR | {"VLLM_ARM_WEIGHT_CACHE": str(cache)}, tmp_path_factory.mktemp("engines") / "run")


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(results: Results, name: str) -> None:
    checkpoint = CHECKPOINTS[name]
    ratio = results[name]["short_perplexity"] / results["bfloat16"]["short_perplexity"]
    print(f"{name}: perplexity {ratio:.4f} times bfloat16's")
    assert 0.98 < ratio < checkpoint.bound
    assert results[name]["linear_kernels"] == [checkpoint.kernel]


@pytest.mark.parametrize("name", ON_LOAD)
def test_quantised_while_loading(results: Results, name: str) -> None:
    ratio = results[name]["short_perplexity"] / results["bfloat16"]["short_perplexity"]
    same = common = 0
    for answer, expected in zip(results[name]["mixed"], results["bfloat16"]["mixed"], strict=True):
        pairs = list(zip(answer["tokens"], expected["tokens"], strict=True))
        same += next((position for position, (one, other) in enumerate(pairs) if one != other), len(pairs))
        common += len(pairs)
    print(f"{name}: perplexity {ratio:.4f} times bfloat16's, {same} of {common} greedy tokens before the first other")
    assert 0.98 < ratio < ON_LOAD[name]


def test_a_cached_model_answers_the_same(results: Results) -> None:
    assert results[CACHED] == results["arm_int4"]


def test_the_lm_head_can_be_quantised_too(results: Results) -> None:
    ratio = results[LM_HEAD]["short_perplexity"] / results["bfloat16"]["short_perplexity"]
    print(f"{LM_HEAD}: perplexity {ratio:.4f} times bfloat16's")
    assert 0.98 < ratio < INT4_BOUND
    assert results[LM_HEAD]["head_method"] == "ArmInt4LinearMethod"
