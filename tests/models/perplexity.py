# SPDX-License-Identifier: Apache-2.0
"""Perplexity on the held-out modules, by transformers or from anyone's log-probabilities."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from tests.models.corpus import load_corpus, stable_hash

WINDOW_COUNT = 48
WINDOW_LENGTH = 512
"""The windows, 48 of 512 tokens, on which the recorded perplexity was measured."""

_BATCH_SIZE = 8


class _Logprob(Protocol):
    """The part of vLLM's `Logprob` that is read here."""

    logprob: float


def held_out_token_windows(
    tokenizer: PreTrainedTokenizerBase,
    count: int = WINDOW_COUNT,
    length: int = WINDOW_LENGTH,
    root: Path | None = None,
) -> list[list[int]]:
    """Return `count` different lists of `length` token ids from the held-out modules of `root`.

    `root` is a standard library's folder, by default the running Python's. First comes the
    beginning of each module (after the beginning-of-text token), then each module's second window,
    and so on: an edit to one module leaves the other modules' windows alone, so that most windows,
    the first ones above all, are the same under every patch release of Python.

    Raises ValueError when the held-out modules hold fewer windows than `count`.
    """
    modules = sorted(load_corpus(root).held_out, key=lambda module: stable_hash(module.name))
    documents = [tokenizer.encode(module.source, verbose=False) for module in modules]
    longest = max(len(document) for document in documents)
    windows = dict.fromkeys(  # some modules begin alike: each window is taken once
        tuple(document[start : start + length])
        for start in range(0, longest, length)
        for document in documents
        if start + length <= len(document)
    )
    if len(windows) < count:
        raise ValueError(
            f"count: expected at most {len(windows)}, the held-out windows of {length} tokens, got {count}"
        )
    return [list(window) for window in islice(windows, count)]


def held_out_perplexity(
    model_path: Path | str,
    dtype: torch.dtype,
    windows: Sequence[Sequence[int]] | None = None,
) -> float:
    """Return the model's perplexity per token, by transformers on the CPU computing in `dtype`.

    `windows` are lists of token ids, all of one length; by default the recorded ones.
    Each token but a window's first is predicted from those before it in its window.
    """
    if windows is None:
        windows = held_out_token_windows(AutoTokenizer.from_pretrained(model_path))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
    logprobs: list[list[float]] = []
    for start in range(0, len(windows), _BATCH_SIZE):
        token_ids = torch.tensor(windows[start : start + _BATCH_SIZE])
        with torch.inference_mode():
            logits = model(input_ids=token_ids, use_cache=False).logits
        all_logprobs = logits[:, :-1].float().log_softmax(dim=-1)
        logprobs += all_logprobs.gather(2, token_ids[:, 1:, None]).squeeze(2).tolist()
    return perplexity_from_logprobs(logprobs)


def perplexity_from_logprobs(logprobs: Iterable[Iterable[float]]) -> float:
    """Return exp of the mean negative log-probability (natural logarithm) over all tokens.

    `logprobs` holds, for each window, the log-probabilities of its tokens but the first.
    Raises ValueError when there are none.
    """
    flat = [logprob for window in logprobs for logprob in window]
    if not flat:
        raise ValueError("logprobs: expected at least one log-probability, got none")
    return math.exp(-math.fsum(flat) / len(flat))


def prompt_token_logprobs(
    token_ids: Sequence[int],
    prompt_logprobs: Sequence[Mapping[int, _Logprob] | None],
) -> list[float]:
    """Pick the prompt's own tokens out of vLLM's `RequestOutput.prompt_logprobs`.

    `prompt_logprobs` has one entry per token, the first of which is None. The result has one
    log-probability for each token but the first, as `perplexity_from_logprobs` takes them.
    Raises ValueError when the lengths differ.
    """
    if len(token_ids) != len(prompt_logprobs):
        raise ValueError(
            f"prompt_logprobs: expected one entry for each of {len(token_ids)} tokens, got {len(prompt_logprobs)}"
        )
    return [
        candidates[token].logprob
        for token, candidates in zip(token_ids[1:], prompt_logprobs[1:], strict=True)
        if candidates is not None
    ]
