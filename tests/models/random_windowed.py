# SPDX-License-Identifier: Apache-2.0
"""Write tiny models with random weights whose layers differ in what they see: shaped as Gemma 3 and as gpt-oss."""

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GptOssConfig, PretrainedConfig

from tests.models.random_llama import TINY_LLAMA

SLIDING_WINDOW = 24
"""Keys that a query of a sliding layer sees; every second layer sees all."""
VOCABULARY = 1024

_SEED = 100
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_LAYER_TYPES = ["sliding_attention", "full_attention"] * 2
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": len(_LAYER_TYPES),
    "layer_types": _LAYER_TYPES,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": SLIDING_WINDOW,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Large enough for attention to prefer some keys to others.
    "initializer_range": 0.3,
}


def make_random_gemma3(directory: Path | str) -> Path:
    """Write a Gemma 3 of about a million random float32 weights to `directory`; return its path.

    Queries and keys are normalised, and sliding layers have a rotary embedding of their own.
    """
    return _write(Gemma3TextConfig(**_SHAPE, query_pre_attn_scalar=32), Path(directory))


def make_random_gpt_oss(directory: Path | str) -> Path:
    """Write a gpt-oss of about a million random float32 weights to `directory`; return its path.

    Its attention has biases and a random sink for each head, its four experts are taken by twos.
    """
    return _write(GptOssConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2), Path(directory))


def _write(config: PretrainedConfig, directory: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32
        )
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                # As large as the largest logits, so that they matter.
                torch.nn.init.normal_(parameter, mean=2.0)
            elif name.endswith("embed_tokens.weight"):
                # Small beside what the layers add: where they are the output's weights too, the model would only
                # repeat its last token.
                torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(TINY_LLAMA / name, directory / name)
    return directory
