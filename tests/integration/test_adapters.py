# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters on linear layers of every kind, beside the model that they were added to beforehand."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.engines import Engine, Results, ask, engine
from tests.integration.test_quantised_models import INT4_BOUND, INT8_BOUND, LINEAR
from tests.models.quantised import ADAPTER_RANK, add_adapter, make_merged_llama, make_quantised_llama

pytestmark = pytest.mark.slow

VOCABULARY = 1024
BOUNDS = {"bfloat16": 1.005, "arm_int8": INT8_BOUND, "arm_int4": INT4_BOUND, "w8a8": INT8_BOUND}


def adapted(name: str, model: Path, **arguments: Any) -> Engine:
    questions = "next_token_perplexity", "adapted_perplexity"
    lora = {"enable_lora": True, "max_lora_rank": ADAPTER_RANK}
    return engine(name, model, *questions, max_logprobs=VOCABULARY, **lora, **arguments)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    models = tmp_path_factory.mktemp("models")
    plain = make_merged_llama(models / "plain", scale=0)
    add_adapter(plain)
    engines = [
        engine("merged", make_merged_llama(models / "merged"), "next_token_perplexity", max_logprobs=VOCABULARY),
        adapted("bfloat16", plain),
        adapted("arm_int8", plain, quantization="arm_int8"),
        adapted("arm_int4", plain, quantization="arm_int4"),
    ]
    quantised = make_quantised_llama(models / "w8a8", "integers")
    add_adapter(quantised)
    engines.append(adapted("w8a8", quantised, dtype="bfloat16"))
    return ask(engines, LINEAR, tmp_path_factory.mktemp("engines") / "run")


@pytest.mark.parametrize("name", BOUNDS)
def test_an_adapter_adds_to_any_layer(results: Results, name: str) -> None:
    merged, without = results["merged"]["next_token_perplexity"], results["bfloat16"]["next_token_perplexity"]
    assert merged > 1.1 * without, "the adapter matters"
    ratio = results[name]["adapted_perplexity"] / merged
    print(f"{name}: perplexity {ratio:.4f} times that of merged weights in bfloat16")
    assert 0.98 < ratio < BOUNDS[name]
    assert results[name]["next_token_perplexity"] < BOUNDS[name] * without, "requests without it are as they were"
