# SPDX-License-Identifier: Apache-2.0
"""Write Llamas of any size with random weights, for tests of memory and speed."""

import re
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

TINY_LLAMA = Path(__file__).parent / "tiny-llama"

_SEED = 100
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_UNITS = {"M": 10**6, "B": 10**9}
_HIDDEN_SIZE = 768
_INTERMEDIATE_SIZE = 2048
_HEADS, _KEY_VALUE_HEADS, _HEAD_SIZE = 12, 4, 64
_PARAMETERS_PER_LAYER = (
    2 * _HIDDEN_SIZE * (_HEADS + _KEY_VALUE_HEADS) * _HEAD_SIZE
    + 3 * _HIDDEN_SIZE * _INTERMEDIATE_SIZE
    + 2 * _HIDDEN_SIZE
)


def make_random_llama(directory: Path | str, parameters: str = "100M") -> Path:
    """Write a bfloat16 Llama of about `parameters` random weights to `directory`; return its path.

    `parameters` is a number and M or B, from 10M to 2B; layers are added until it is reached, each
    with hidden size 768, 12 heads, 4 key-value heads and head size 64. The tokenizer and the chat
    template are the tiny model's. Equal arguments give equal files.
    Raises ValueError for other sizes.
    """
    directory = Path(directory)
    tiny = LlamaConfig.from_pretrained(TINY_LLAMA)
    embedding_parameters = tiny.vocab_size * _HIDDEN_SIZE
    layers = round((_parse_size(parameters) - embedding_parameters) / _PARAMETERS_PER_LAYER)
    config = LlamaConfig(
        vocab_size=tiny.vocab_size,
        hidden_size=_HIDDEN_SIZE,
        intermediate_size=_INTERMEDIATE_SIZE,
        num_hidden_layers=layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KEY_VALUE_HEADS,
        head_dim=_HEAD_SIZE,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=tiny.bos_token_id,
        eos_token_id=tiny.eos_token_id,
        pad_token_id=tiny.pad_token_id,
        dtype=torch.bfloat16,
    )
    return write_random_model(config, directory)


def write_random_model(config: PretrainedConfig, directory: Path) -> Path:
    """Write the model of `config` with random bfloat16 weights to `directory`; return that.

    The tokenizer and the chat template are the tiny model's. Equal arguments give equal files.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.bfloat16
        )
    model.save_pretrained(directory)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(TINY_LLAMA / name, directory / name)
    return directory


def _parse_size(parameters: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([MB])", parameters)
    size = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 10 * _UNITS["M"] <= size <= 2 * _UNITS["B"]:
        raise ValueError(f"parameters: expected 10M to 2B, such as '100M', got {parameters!r}")
    return size
