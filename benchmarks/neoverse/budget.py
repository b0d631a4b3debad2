# SPDX-License-Identifier: Apache-2.0
"""The regression gate: cycles per case, implementation and core that must not be exceeded by more than 2 %."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.neoverse.measure import Record

BUDGET_FILE = Path(__file__).with_name("budget.json")
ALLOWANCE = 0.02

# Cycles by the record's label and core.
Budget = dict[str, dict[str, int]]


def read_budget(path: Path) -> Budget:
    """The budget in ``path``. Raises ``ValueError`` naming the file where it is none."""
    try:
        budget = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(budget, dict) or not all(isinstance(cores, dict) for cores in budget.values()):
        raise ValueError(f"{path}: expected an object of cycles by core for each case")
    return budget


def write_budget(path: Path, records: Iterable[Record], old: Budget) -> None:
    """Write ``old`` with the cycles of the records put in."""
    budget = {label: dict(cores) for label, cores in old.items()}
    for record in records:
        budget.setdefault(record.label, {})[record.core] = record.cycles
    lines = [f"  {json.dumps(label)}: {json.dumps(budget[label])}" for label in sorted(budget)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def find_excesses(records: Iterable[Record], budget: Budget) -> list[str]:
    """One line for each record that is over its budget, or has none."""
    problems = []
    for record in records:
        allowed = budget.get(record.label, {}).get(record.core)
        if allowed is None:
            problems.append(f"{record.label} on {record.core}: no budget; run update-budget")
        elif record.cycles > allowed * (1 + ALLOWANCE):
            excess = 100 * (record.cycles / allowed - 1)
            problems.append(f"{record.label} on {record.core}: {record.cycles} cycles, {excess:.1f} % over {allowed}")
    return problems


def find_orphans(records: Iterable[Record], budget: Budget) -> list[str]:
    """One line for each budget that no record of a complete run belongs to."""
    measured = {(record.label, record.core) for record in records}
    return [
        f"{label} on {core}: has a budget but was not measured; remove it or restore the case"
        for label, cores in budget.items()
        for core in cores
        if (label, core) not in measured
    ]
