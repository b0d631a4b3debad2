# SPDX-License-Identifier: Apache-2.0
"""Medians, spread and speed-ups of the runs of a throughput benchmark."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Median, least and most of some figures."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Of ``values``, of which there must be one."""
        listed = list(values)
        return cls(median(listed), min(listed), max(listed))

    @property
    def percent(self) -> float:
        """Half the way from least to most, in per cent of the median."""
        return 50 * (self.most - self.least) / self.median if self.median else 0.0


@dataclass(frozen=True)
class StepSummary:
    """The figures of one step over its rounds; ``None`` for what cannot be, and ``error`` where no run succeeded.

    ``over_previous`` and ``over_start`` are medians of the speed-ups within each round, whose runs follow each other.
    """

    step: str
    rounds: int
    tokens_per_second: Spread | None = None
    output_tokens_per_second: float | None = None
    requests_per_second: float | None = None
    over_previous: float | None = None
    over_start: float | None = None
    page_faults: float | None = None
    cpu_seconds: float | None = None
    system_seconds: float | None = None
    peak_bytes: float | None = None
    error: str | None = None


def tokens_per_second(run: Mapping[str, Any]) -> float:
    """Prompt and generated tokens of a run, per second."""
    return float((run["prompt_tokens"] + run["output_tokens"]) / run["seconds"])


def summarise(runs: Iterable[Mapping[str, Any]], steps: Iterable[str]) -> list[StepSummary]:
    """One summary for each of ``steps``, in order, of the ``runs`` that a :class:`Store` holds."""
    by_step: dict[str, dict[int, Mapping[str, Any]]] = {}
    errors: dict[str, str] = {}
    for run in runs:
        if "error" in run:
            errors[run["step"]] = run["error"]
        else:
            by_step.setdefault(run["step"], {})[run["round"]] = run
    summaries = []
    start: Mapping[int, Mapping[str, Any]] = {}
    previous: Mapping[int, Mapping[str, Any]] = {}
    for number, step in enumerate(steps):
        rounds = by_step.get(step)
        if not rounds:
            summaries.append(StepSummary(step, 0, error=errors.get(step, "not run")))
            continue
        start = rounds if number == 0 else start
        values = list(rounds.values())
        summaries.append(
            StepSummary(
                step,
                len(rounds),
                tokens_per_second=Spread.of(tokens_per_second(run) for run in values),
                output_tokens_per_second=median(run["output_tokens"] / run["seconds"] for run in values),
                requests_per_second=median(run["requests"] / run["seconds"] for run in values),
                over_previous=speed_up(rounds, previous),
                over_start=speed_up(rounds, start),
                page_faults=median(run["worker_page_faults"] for run in values),
                cpu_seconds=median(run["worker_user_seconds"] + run["worker_system_seconds"] for run in values),
                system_seconds=median(run["worker_system_seconds"] for run in values),
                peak_bytes=median(run["worker_peak_bytes"] for run in values),
            )
        )
        previous = rounds
    return summaries


def speed_up(rounds: Mapping[int, Mapping[str, Any]], reference: Mapping[int, Mapping[str, Any]]) -> float | None:
    """The median over the rounds that both have of the ratio of their tokens per second; None if there is none."""
    ratios = [
        tokens_per_second(rounds[number]) / tokens_per_second(reference[number])
        for number in rounds
        if number in reference
    ]
    return median(ratios) if ratios else None
