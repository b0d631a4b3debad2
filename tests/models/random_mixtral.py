# SPDX-License-Identifier: Apache-2.0
"""Write a tiny Mixtral with random weights, for tests of expert parallelism."""

from pathlib import Path

import torch
from transformers import LlamaConfig, MixtralConfig

from tests.models.random_llama import TINY_LLAMA, write_random_model

EXPERTS = 4


def make_random_mixtral(directory: Path) -> Path:
    """Write a bfloat16 Mixtral of two layers with four experts to `directory`; return its path.

    The tokenizer and the chat template are the tiny model's. The weights are wide, so that few tokens are nearly as
    likely as the likeliest.
    """
    tiny = LlamaConfig.from_pretrained(TINY_LLAMA)
    config = MixtralConfig(
        vocab_size=tiny.vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        sliding_window=None,
        initializer_range=0.2,
        bos_token_id=tiny.bos_token_id,
        eos_token_id=tiny.eos_token_id,
        pad_token_id=tiny.pad_token_id,
        dtype=torch.bfloat16,
    )
    return write_random_model(config, directory)
