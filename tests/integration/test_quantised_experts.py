# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts with quantised weights, in whole engines beside bfloat16."""

import pytest

from tests.integration.engines import Results, ask, engine
from tests.integration.test_quantised_models import INT4_BOUND, INT8_BOUND, LINEAR
from tests.models.quantised import make_gpt_oss, make_mixtral

pytestmark = pytest.mark.slow

CHECKPOINTS = {
    "awq": ("awq", {}, INT4_BOUND),
    "gptq-asymmetric": ("gptq", {"symmetric": False}, INT4_BOUND),
    "w4a16-asymmetric": ("packed", {"symmetric": False, "group_size": 64}, INT4_BOUND),
    "w8a16-channel": ("packed", {"bits": 8, "group_size": None}, INT8_BOUND),
    "w4a8": ("integers", {"bits": 4, "group_size": 32}, INT4_BOUND),
    "w8a8": ("integers", {}, INT8_BOUND),
    "fp8-tensor": ("fp8_plain", {}, INT8_BOUND),
    "fp8-blocks": ("fp8_plain", {"blocks": True}, INT8_BOUND),
}
ON_LOAD = {"arm_int8": INT8_BOUND, "arm_int4": INT4_BOUND}
CACHED = "arm_int4 from the cache"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    models = tmp_path_factory.mktemp("models")
    plain = make_mixtral(models / "bfloat16")
    engines = [engine("bfloat16", plain, "short_perplexity")]
    for name in ON_LOAD:
        engines.append(engine(name, plain, "short_perplexity", "expert_methods", quantization=name))
    engines.append(engine(CACHED, plain, "short_perplexity", "expert_methods", quantization="arm_int4"))
    gpt_oss = make_gpt_oss(models / "gpt-oss")
    for name in ("bfloat16", *ON_LOAD):
        quantization = None if name == "bfloat16" else name
        engines.append(
            engine(f"gpt-oss {name}", gpt_oss, "short_perplexity", "expert_methods", quantization=quantization)
        )
    for name, (scheme, options, _) in CHECKPOINTS.items():
        model = make_mixtral(models / name, scheme, **options)
        engines.append(engine(name, model, "short_perplexity", "expert_methods", dtype="bfloat16"))
    cache = tmp_path_factory.mktemp("cache") / "weights"
    return ask(engines, LINEAR | {"VLLM_ARM_WEIGHT_CACHE": str(cache)}, tmp_path_factory.mktemp("engines") / "run")


@pytest.mark.parametrize("name", [*CHECKPOINTS, *ON_LOAD])
def test_perplexity(results: Results, name: str) -> None:
    bound = ON_LOAD[name] if name in ON_LOAD else CHECKPOINTS[name][2]
    ratio = results[name]["short_perplexity"] / results["bfloat16"]["short_perplexity"]
    print(f"{name}: perplexity {ratio:.4f} times bfloat16's")
    assert 0.98 < ratio < bound
    assert results[name]["expert_methods"] == ["ArmQuantisedExperts"]


@pytest.mark.parametrize("name", ON_LOAD)
def test_gpt_oss_whose_gate_and_rest_alternate(results: Results, name: str) -> None:
    plain, quantised = results["gpt-oss bfloat16"], results[f"gpt-oss {name}"]
    assert plain["short_perplexity"] / results["bfloat16"]["short_perplexity"] == pytest.approx(1, abs=0.06)
    ratio = quantised["short_perplexity"] / plain["short_perplexity"]
    print(f"{name}: perplexity {ratio:.4f} times bfloat16's")
    assert 0.98 < ratio < ON_LOAD[name]
    assert quantised["expert_methods"] == ["ArmQuantisedExperts"]


def test_a_cached_model_answers_the_same(results: Results) -> None:
    assert results[CACHED] == results["arm_int4"]
