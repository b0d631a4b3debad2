# SPDX-License-Identifier: Apache-2.0
"""The tiny models with windows: what they answer depends on their windows and sinks, as a test of those needs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.models.random_windowed import SLIDING_WINDOW, VOCABULARY, make_random_gemma3, make_random_gpt_oss

TOKENS = torch.randint(5, VOCABULARY, (1, 3 * SLIDING_WINDOW), generator=torch.Generator().manual_seed(0))


def best_tokens(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits[0]
    return logits.argmax(-1)


@pytest.mark.parametrize("make", [make_random_gemma3, make_random_gpt_oss])
def test_the_window_matters_beyond_it(make: Callable[[Path], Path], tmp_path: Path) -> None:
    directory = make(tmp_path / "model")
    windowed = best_tokens(AutoModelForCausalLM.from_pretrained(directory))
    wider = best_tokens(AutoModelForCausalLM.from_pretrained(directory, sliding_window=2 * SLIDING_WINDOW))
    assert torch.equal(windowed[:SLIDING_WINDOW], wider[:SLIDING_WINDOW])
    assert (windowed[SLIDING_WINDOW:] != wider[SLIDING_WINDOW:]).float().mean() > 0.1


def test_sinks_matter(tmp_path: Path) -> None:
    directory = make_random_gpt_oss(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(directory)
    with_sinks = best_tokens(model)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.fill_(-100.0)
    assert (with_sinks != best_tokens(model)).float().mean() > 0.1


def test_equal_calls_write_equal_weights(tmp_path: Path) -> None:
    first, second = (make_random_gpt_oss(tmp_path / name) / "model.safetensors" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
