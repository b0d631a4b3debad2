# SPDX-License-Identifier: Apache-2.0
"""The random-weight models: size, determinism and what they share with the tiny model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from tests.models.random_llama import TINY_LLAMA, make_random_llama


def test_has_the_parameters_asked_for_in_bfloat16(tmp_path: Path) -> None:
    weights = load_file(make_random_llama(tmp_path) / "model.safetensors")
    assert sum(weight.numel() for weight in weights.values()) == pytest.approx(100e6, rel=0.04)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_is_deterministic_and_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first = make_random_llama(tmp_path / "first", "10M")
    drawn_after_first = torch.rand(4)
    second = make_random_llama(tmp_path / "second", "10M")
    torch.manual_seed(1)
    assert torch.equal(drawn_after_first, torch.rand(4))
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


def test_takes_long_prompts_of_the_tiny_models_tokens(tmp_path: Path) -> None:
    directory = make_random_llama(tmp_path, "10M")
    text = "def size(self) -> int:\n    return 1"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.encode(text) == AutoTokenizer.from_pretrained(TINY_LLAMA).encode(text)
    config = AutoConfig.from_pretrained(directory)
    assert config.vocab_size >= len(tokenizer)
    assert config.max_position_embeddings >= 2048


@pytest.mark.parametrize("parameters", ["", "100", "1M", "3B", "100m", "-100M", "nanM"])
def test_rejects_sizes_it_cannot_make(tmp_path: Path, parameters: str) -> None:
    with pytest.raises(ValueError, match="parameters: expected 10M to 2B"):
        make_random_llama(tmp_path, parameters)
