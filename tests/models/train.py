# SPDX-License-Identifier: Apache-2.0
"""Train the small Llama of the tests from scratch: `python tests/models/train.py`.

Seeds and the number of steps are fixed, so a run can be repeated: with the same Python, torch and
thread count it gives the same weights, elsewhere weights as good.
"""

import json
import math
import os
import platform
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tokenizers
import torch
import transformers
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

# Run as a script, the repository's root is not on the path.
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.models.corpus import Corpus, Module, conversations, load_corpus
from tests.models.perplexity import WINDOW_COUNT, WINDOW_LENGTH, held_out_perplexity

SEED = 20250
VOCABULARY_SIZE = 1024
MAX_POSITIONS = 2048
BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

TOKENS_PER_STEP = 2048
STEPS_PER_MINUTE = 220
"""About what two server cores manage; it only turns minutes into a number of steps."""

WARM_UP_STEPS = 100
PEAK_LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.1
GRADIENT_NORM = 1.0
SEQUENCE_LENGTH_SHARES = {256: 0.5, 512: 0.25, 1024: 0.15, 2048: 0.1}
"""Sequence length in tokens -> the share of all training tokens seen at that length."""

CONVERSATIONS_PER_DOCUMENT = 16

_DEFAULT_OUTPUT = Path(__file__).parent / "tiny-llama"


def make_tokenizer(modules: Sequence[Module]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of VOCABULARY_SIZE tokens, with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PAD, BOS, EOS, *(f"<|{role}|>" for role in ROLES)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((module.source for module in modules), trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A {BOS} $B:1",
                special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
            ),
        ]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """Return the untrained model, in float32."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(  # type: ignore[no-untyped-call]
        LlamaConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            initializer_range=0.05,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


@dataclass(frozen=True)
class Documents:
    """Training documents as token ids, beginning and end tokens included."""

    token_ids: tuple[tuple[int, ...], ...]

    @classmethod
    def from_corpus(cls, corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> "Documents":
        """Encode every training module, and its conversations in bundles."""
        documents = [
            (*tokenizer.encode(module.source, verbose=False), tokenizer.eos_token_id) for module in corpus.train
        ]
        chats = [
            tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False)
            for conversation in conversations(corpus.train)
        ]
        random.Random(SEED).shuffle(chats)
        for start in range(0, len(chats), CONVERSATIONS_PER_DOCUMENT):
            bundle = chats[start : start + CONVERSATIONS_PER_DOCUMENT]
            documents.append(tuple(token for chat in bundle for token in chat))
        return cls(tuple(documents))

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield batches without end: int64 [TOKENS_PER_STEP / length, length], lengths mixed.

        Each epoch sees every token once, in another order and cut elsewhere.
        """
        generator = random.Random(SEED)
        while True:
            order = generator.sample(self.token_ids, len(self.token_ids))
            stream = torch.tensor([token for document in order for token in document])
            yield from _epoch(stream, generator)


def _epoch(stream: torch.Tensor, generator: random.Random) -> Iterator[torch.Tensor]:
    """Cut one epoch's tokens into blocks, deal the blocks to the lengths, and mix the batches."""
    block_size = max(SEQUENCE_LENGTH_SHARES)
    offset = generator.randrange(block_size)
    blocks = list(stream[offset:].split(block_size))[:-1]
    generator.shuffle(blocks)
    batches: list[torch.Tensor] = []
    dealt = 0.0
    for length, share in SEQUENCE_LENGTH_SHARES.items():
        first, last = round(dealt * len(blocks)), round((dealt + share) * len(blocks))
        dealt += share
        sequences = torch.cat(blocks[first:last]).view(-1, length)
        sequences = sequences[torch.tensor(generator.sample(range(len(sequences)), len(sequences)))]
        rows = TOKENS_PER_STEP // length
        batches += [batch for batch in sequences.split(rows) if len(batch) == rows]
    generator.shuffle(batches)
    return iter(batches)


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to zero."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    progress = (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
    return 0.5 * (1 + math.cos(math.pi * progress))


def train(model: LlamaForCausalLM, documents: Documents, steps: int) -> None:
    """Train `model` in place, in float32, showing progress and the smoothed loss in nats."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=PEAK_LEARNING_RATE,
        betas=(0.9, 0.95),
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    model.train()
    smoothed_loss: float | None = None
    progress = tqdm(total=steps, desc="training", unit="step", mininterval=1.0)
    for _, token_ids in zip(range(steps), documents.batches(), strict=False):
        loss = model(input_ids=token_ids, labels=token_ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        smoothed_loss = value if smoothed_loss is None else 0.98 * smoothed_loss + 0.02 * value
        progress.set_postfix(loss=f"{smoothed_loss:.3f}", refresh=False)
        progress.update()
    progress.close()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, output: Path) -> None:
    """Write the Hugging Face folder, weights in bfloat16."""
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)


def main(
    output: Annotated[Path, typer.Option(help="Folder to write the model to.")] = _DEFAULT_OUTPUT,
    minutes: Annotated[float, typer.Option(min=0.1, help="About how long to train; sets the number of steps.")] = 10.0,
) -> None:
    """Train the small Llama of the tests and write it as a Hugging Face folder."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(2)
    steps = round(minutes * STEPS_PER_MINUTE)
    corpus = load_corpus()
    tokenizer = make_tokenizer(corpus.train)
    documents = Documents.from_corpus(corpus, tokenizer)
    model = make_model(tokenizer)
    train(model, documents, steps)
    save(model, tokenizer, output)
    record = {
        "license": "Apache-2.0",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "seed": SEED,
        "steps": steps,
        "tokens_per_step": TOKENS_PER_STEP,
        "tokens_per_epoch": sum(len(document) for document in documents.token_ids),
        "parameters": model.num_parameters(),
        "corpus_sha256": corpus.sha256(),
        "held_out_windows": [WINDOW_COUNT, WINDOW_LENGTH],
        "held_out_perplexity": {
            name: round(held_out_perplexity(output, dtype), 4)
            for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32))
        },
    }
    (output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    typer.echo(json.dumps(record, indent=2))


if __name__ == "__main__":
    typer.run(main)
