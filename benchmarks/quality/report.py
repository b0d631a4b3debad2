# SPDX-License-Identifier: Apache-2.0
"""What the answers of a setting say beside the baseline's, as figures and as a table."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts have in common before they part."""
    for position, (token, other) in enumerate(zip(first, second, strict=False)):
        if token != other:
            return position
    return min(len(first), len(second))


def compare(answers: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    """The figures of a setting: ratios are to the baseline's.

    ``same_best_token`` is the share of positions of the text at which the most likely token is the baseline's;
    ``same_continuation`` that of the generated tokens that come before the first different one.
    """
    pairs = [
        (token, other)
        for window, others in zip(answers["best_tokens"], baseline["best_tokens"], strict=True)
        for token, other in zip(window, others, strict=True)
    ]
    texts = list(zip(answers["continuations"], baseline["continuations"], strict=True))
    scores = answers.get("scores", {})
    return {
        "perplexity": answers["perplexity"],
        "perplexity_ratio": answers["perplexity"] / baseline["perplexity"],
        "same_best_token": sum(token == other for token, other in pairs) / len(pairs),
        "same_continuation": sum(common_prefix(*pair) for pair in texts) / sum(len(text) for text, _ in texts),
        "load_seconds": answers["load_seconds"],
        "scores": {
            task: {"score": score, "ratio": score / baseline["scores"][task] if baseline["scores"][task] else None}
            for task, score in scores.items()
        },
    }


def accuracy_table(title: str, figures: dict[str, dict[str, Any]], errors: dict[str, str]) -> Table:
    """One row for each setting; those that failed have their error."""
    table = Table(title=title, title_justify="left")
    tasks = list(next(iter(figures.values()))["scores"]) if figures else []
    for name in ("setting", "perplexity", "ratio", "same best token", "same continuation", *tasks, "load s"):
        table.add_column(name, justify="left" if name == "setting" else "right", overflow="fold")
    for name, found in figures.items():
        table.add_row(
            name,
            f"{found['perplexity']:.4f}",
            f"{found['perplexity_ratio']:.4f}",
            f"{100 * found['same_best_token']:.1f} %",
            f"{100 * found['same_continuation']:.1f} %",
            *(_score(found["scores"].get(task)) for task in tasks),
            f"{found['load_seconds']:.1f}",
        )
    for name, error in errors.items():
        table.add_row(name, f"[red]{error}")
    return table


def _score(found: dict[str, float | None] | None) -> str:
    if found is None:
        return ""
    ratio = "" if found["ratio"] is None else f" ({100 * found['ratio']:.1f} %)"
    return f"{found['score']:.4f}{ratio}"
