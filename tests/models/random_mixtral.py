# SPDX-License-Identifier: Apache-2.0
"""Write a tiny Mixtral with random weights, for tests of expert parallelism."""

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

TINY_LLAMA = Path(__file__).parent / "tiny-llama"
EXPERTS = 4

_SEED = 100
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.bfloat16
        )
    model.save_pretrained(directory)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(TINY_LLAMA / name, directory / name)
    return directory
