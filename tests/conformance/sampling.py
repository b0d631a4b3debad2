# SPDX-License-Identifier: Apache-2.0
"""What the plugins share: which cases stand for all of them, and the count of our ops.

It lies beside the ``conftest.py`` that a plugin here becomes.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

calls: Counter[str] = Counter()
"""How often each op of ours ran."""


@pytest.fixture(scope="session", autouse=True)
def count_calls(record_testsuite_property: Callable[[str, object], None]) -> Iterator[None]:
    """Put how often each op of ours ran into the report."""
    yield
    for name, count in calls.items():
        record_testsuite_property(name, count)


def leave_out_repetitions(config: pytest.Config, items: list[pytest.Function], only_in_full: str = "") -> None:
    """Keep a sample of ``items``, without the test ``only_in_full``, unless all is asked for."""
    if os.environ.get("VLLM_ARM_CONFORMANCE") == "all":
        return
    chosen = sample([item for item in items if item.originalname != only_in_full])
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def sample(items: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Cases that have, for each test, every value of every parameter; greedily, the one with most new values first."""
    chosen = []
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        tests.setdefault(item.originalname, []).append(item)
    for cases in tests.values():
        values = {case: _values(case) for case in cases}
        missing = set().union(*values.values())
        while True:
            best = max(cases, key=lambda case: len(values[case] & missing))
            chosen.append(best)
            missing -= values[best]
            if not missing:
                break
    return chosen


def _values(case: pytest.Function) -> set[tuple[str, str]]:
    parameters = case.callspec.params if hasattr(case, "callspec") else {}
    return {(name, str(value)) for name, value in parameters.items()}
