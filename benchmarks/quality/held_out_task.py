# SPDX-License-Identifier: Apache-2.0
"""A task for lm-eval that needs no download: which line comes next in text that the model of the tests has not seen."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.models.corpus import Module, load_corpus

NAME = "held_out_lines"
EXAMPLES_PER_MODULE = 16
CONTEXT_LINES = 12
CHOICES = 4
_SHORTEST_LINE = 8


def examples() -> Iterator[dict[str, Any]]:
    """``context``, ``choices`` of its next line, the others from the same module, and which of them is the ``answer``.

    The same under the same release of Python.
    """
    for module in load_corpus().held_out:
        yield from _of_module(module)


def _of_module(module: Module) -> Iterator[dict[str, Any]]:
    generator = random.Random(module.name)
    lines = module.source.splitlines(keepends=True)
    usable = [number for number, line in enumerate(lines) if len(line.strip()) >= _SHORTEST_LINE]
    asked = [number for number in usable if number >= CONTEXT_LINES]
    for number in generator.sample(asked, min(EXAMPLES_PER_MODULE, len(asked))):
        others = sorted({lines[other] for other in usable} - {lines[number]})
        if len(others) < CHOICES - 1:
            continue
        choices = [lines[number], *generator.sample(others, CHOICES - 1)]
        generator.shuffle(choices)
        context = "".join(lines[number - CONTEXT_LINES : number])
        yield {"context": context, "choices": choices, "answer": choices.index(lines[number])}


def write(folder: Path) -> None:
    """Write the task's examples and description into ``folder``, for lm-eval to include."""
    data = folder / f"{NAME}.jsonl"
    data.write_text("".join(json.dumps(example) + "\n" for example in examples()))
    description = {
        "task": NAME,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        # The next line begins where the context ends.
        "target_delimiter": "",
        "metric_list": [{"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
    # JSON is YAML too.
    (folder / f"{NAME}.yaml").write_text(json.dumps(description))
