# SPDX-License-Identifier: Apache-2.0
"""Which of many cases stand for all of them. It lies beside the ``conftest.py`` that a plugin here becomes."""

from collections.abc import Sequence

import pytest


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
