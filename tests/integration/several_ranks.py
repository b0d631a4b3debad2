# SPDX-License-Identifier: Apache-2.0
"""What tests of servers of several ranks share: the questions, and whether answers are those of one rank."""

from pathlib import Path
from typing import Any, NamedTuple

import httpx

from demo.server import Server
from tests.integration.serving import FORCED, TRAINED_MODEL

PROMPTS = [
    "import os\n\ndef main():\n    ",
    "class Stack:\n    def __init__(self):\n        self.",
    "What does `os.path.join` do?",
    "def fibonacci(n):\n    ",
    "for line in open(",
    "x = 1\n" * 60,
    "The list is sorted ",
    "try:\n    import json\nexcept ",
]
TOKENS = 32
# In bfloat16 the logits of this model are so coarse that one token in a hundred is nearly tied.
EXACT = ("--dtype", "float32")
NEAR_TIE = 0.05
"""The greatest difference of two log-probabilities that another order of sums may turn round."""


class Answer(NamedTuple):
    """Greedy tokens, and for each how far the best was ahead of the second in log-probability."""

    tokens: list[str]
    margins: list[float]


def complete(server: Server, prompt: str, tokens: int) -> dict[str, Any]:
    request = {"model": str(server.model), "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 2}
    response = httpx.post(f"{server.url}/v1/completions", json=request, timeout=120)
    assert response.status_code == 200, response.text
    logprobs: dict[str, Any] = response.json()["choices"][0]["logprobs"]
    return logprobs


def ask(server: Server) -> list[Answer]:
    answers = []
    for prompt in PROMPTS:
        logprobs = complete(server, prompt, TOKENS)
        best = [sorted(top.values(), reverse=True) for top in logprobs["top_logprobs"]]
        answers.append(Answer(logprobs["tokens"], [top[0] - top[1] if len(top) > 1 else 9.0 for top in best]))
    return answers


def assert_same(found: list[Answer], expected: list[Answer]) -> None:
    """The same tokens up to near ties, after which answers may differ; those are fewer than one in a hundred."""
    compared = ties = 0
    for ours, theirs in zip(found, expected, strict=True):
        pairs = zip(ours.tokens, theirs.tokens, theirs.margins, strict=False)
        for token, other, margin in pairs:
            compared += 1
            if token != other:
                assert margin < NEAR_TIE, f"{token!r} instead of {other!r}, which is ahead by {margin:.3f}"
                ties += 1
                break
    assert compared > len(PROMPTS) * TOKENS // 2
    assert ties <= compared / 100, f"{ties} near ties in {compared} tokens"


def serve(folder: Path, *arguments: str, model: Path = TRAINED_MODEL, **variables: str) -> Server:
    return Server(model, folder / "server.log", arguments=arguments, environment={**FORCED, **variables})
