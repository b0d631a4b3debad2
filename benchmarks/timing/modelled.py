# SPDX-License-Identifier: Apache-2.0
"""The modelled cycles of ``make cycles`` beside what was measured on the host."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

TOLERANCE = 0.25
"""How far a measured ratio may be from the modelled one before it is said to disagree."""


class Comparison(NamedTuple):
    """The speed-up of a variant over upstream's op, as modelled for ``core`` and as measured."""

    op: str
    case: str
    impl: str
    core: str
    modelled: float
    measured: float

    @property
    def agrees(self) -> bool:
        """Whether they are within :data:`TOLERANCE`."""
        return abs(self.measured / self.modelled - 1) <= TOLERANCE


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of ``build/cycles.json``; none where there is no such file. Raises ``ValueError`` on another form."""
    if not path.exists():
        return []
    rows = json.loads(path.read_text())
    if not isinstance(rows, list) or any(not isinstance(row, dict) or "cycles" not in row for row in rows):
        raise ValueError(f"{path}: expected a list of objects with 'cycles', as make cycles writes it")
    return rows


def compare(
    modelled: Iterable[Mapping[str, Any]], measured: Iterable[Mapping[str, Any]], core: str
) -> list[Comparison]:
    """The speed-ups over upstream that are in both, for ``core`` (``N1``, ``V1``, ``N2`` or ``V2``).

    Rows are matched by op, case and :func:`label`; ``cycles`` and ``seconds`` are taken for the ratio.
    """
    model = {(row["op"], row["case"], label(row)): row.get("cycles") for row in modelled if row["core"] == core}
    times = {(row["op"], row["case"], label(row)): row.get("seconds") for row in measured}
    found = []
    for (op, case, impl), seconds in times.items():
        cycles = model.get((op, case, impl))
        upstream_cycles = model.get((op, case, "upstream"))
        upstream_seconds = times.get((op, case, "upstream"))
        if impl != "upstream" and cycles and seconds and upstream_cycles and upstream_seconds:
            found.append(Comparison(op, case, impl, core, upstream_cycles / cycles, upstream_seconds / seconds))
    return found


def label(row: Mapping[str, Any]) -> str:
    """``vllm_arm/neon``, ``upstream`` or ``torch``: only ours has variants of our choice."""
    impl = str(row["impl"])
    return f"{impl}/{row['isa']}" if impl == "vllm_arm" else impl
