# SPDX-License-Identifier: Apache-2.0
"""The loop of the throughput benchmark: every step in every round, in turns, each run kept as it ends."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.serving.child import ChildError
from benchmarks.serving.steps import Step
from benchmarks.serving.store import Store


def schedule(steps: Sequence[Step], rounds: int) -> Iterator[tuple[int, Step]]:
    """Every step in every round; each round goes the other way, so that a steady drift hits all steps alike."""
    for number in range(rounds):
        for step in steps if number % 2 == 0 else reversed(steps):
            yield number, step


def run_all(
    steps: Sequence[Step],
    rounds: int,
    store: Store,
    run: Callable[[Step], dict[str, Any]],
    finished: Callable[[], None] = lambda: None,
) -> None:
    """Do the runs that ``store`` lacks. A step that fails is not tried again in this session.

    ``run`` measures one step and raises ``ChildError`` where it fails; ``finished`` is told after each run, also of
    those that were there already.
    """
    failed: set[str] = set()
    for number, step in schedule(steps, rounds):
        if step.name not in failed and not store.has(step.name, number):
            try:
                store.add(step.name, number, run(step))
            except ChildError as error:
                failed.add(step.name)
                store.add(step.name, number, {"error": str(error)})
        finished()
