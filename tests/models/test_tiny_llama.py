# SPDX-License-Identifier: Apache-2.0
"""The trained model: it has learnt, it is small, and its tokenizer and chat template work."""

import json
import platform
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tests.models.perplexity import held_out_perplexity
from tests.models.random_llama import TINY_LLAMA

QUESTIONS = (
    "What does `logging.Logger.info` do?",
    "What is `asyncio.queues.Queue`?",
    "What does `os.path.join` do?",
)
LONGEST_ANSWER = 32


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(TINY_LLAMA)
    return loaded


@pytest.fixture(scope="module")
def trained() -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(TINY_LLAMA)
    return loaded


@pytest.fixture(scope="module")
def training_record() -> dict[str, Any]:
    record: dict[str, Any] = json.loads((TINY_LLAMA / "training.json").read_text())
    return record


def greedy_answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Return the token ids that greedy decoding adds to the question, eos included."""
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    prompt = torch.tensor([tokenizer.encode(str(rendered), add_special_tokens=False)])
    output = model.generate(prompt, max_new_tokens=LONGEST_ANSWER, do_sample=False)
    answer: list[int] = output[0, prompt.shape[1] :].tolist()
    return answer


@pytest.fixture(scope="module")
def answers(trained: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return [greedy_answer(trained, tokenizer, question) for question in QUESTIONS]


def test_held_out_perplexity_is_the_recorded_one(training_record: dict[str, Any]) -> None:
    # Another Python has other texts in the held-out modules, so there the figure may move further.
    same_texts = platform.python_version() == training_record["python"]
    assert held_out_perplexity(TINY_LLAMA, torch.bfloat16) == pytest.approx(
        training_record["held_out_perplexity"]["bfloat16"], rel=0.03 if same_texts else 0.10
    )


def test_bfloat16_costs_little_perplexity(training_record: dict[str, Any]) -> None:
    perplexity = training_record["held_out_perplexity"]
    assert perplexity["bfloat16"] == pytest.approx(perplexity["float32"], rel=0.01)


def test_weights_are_small_and_bfloat16() -> None:
    path = TINY_LLAMA / "model.safetensors"
    assert path.stat().st_size < 8_000_000
    with safe_open(path, "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.offset_keys()} == {"BF16"}


def test_config_is_a_grouped_query_llama() -> None:
    config = AutoConfig.from_pretrained(TINY_LLAMA)
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.dtype == torch.bfloat16
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert config.head_dim == 64
    assert config.tie_word_embeddings
    assert config.max_position_embeddings >= 2048


def test_chat_template_renders_every_role(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is `io`?"},
        {"role": "assistant", "content": "Streams."},
        {"role": "user", "content": "And `os`?"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|begin|><|system|>Be brief.<|end|><|user|>What is `io`?<|end|>"
        "<|assistant|>Streams.<|end|><|user|>And `os`?<|end|><|assistant|>"
    )
    token_ids = tokenizer.encode(rendered, add_special_tokens=False)
    assert tokenizer.decode(token_ids) == rendered
    assert token_ids.count(tokenizer.eos_token_id) == len(messages)


@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_tokenizer_round_trips_any_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(token_ids[1:]) == text
    assert max(token_ids) < len(tokenizer)


def test_answers_differ_from_an_untrained_models(
    trained: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, answers: list[list[int]]
) -> None:
    torch.manual_seed(0)
    untrained = LlamaForCausalLM(trained.config).to(trained.dtype)  # type: ignore[no-untyped-call]
    for question, answer in zip(QUESTIONS, answers, strict=True):
        assert answer != greedy_answer(untrained, tokenizer, question)


def test_ends_an_answer(tokenizer: PreTrainedTokenizerBase, answers: list[list[int]]) -> None:
    ended = [answer for answer in answers if answer[-1] == tokenizer.eos_token_id]
    assert any(len(answer) > 4 for answer in ended), [tokenizer.decode(a) for a in answers]
