# SPDX-License-Identifier: Apache-2.0
"""The bar chart of modelled cycles."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.neoverse.measure import Record
from benchmarks.neoverse.report import detail_core

BAR_INCHES = 0.16
# Where every bar begins: less than any case costs.
FEWEST_CYCLES = 1e3


def require_matplotlib() -> None:
    """Raise ``LookupError`` where a chart could not be drawn at the end of a long run."""
    if find_spec("matplotlib") is None:
        raise LookupError("matplotlib is not installed: pip install --no-deps -r requirements/bench.txt")


def draw(records: Sequence[Record], path: Path) -> None:
    """Write a PNG with a panel for each op: a bar for each implementation of each case, on one core."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    core = detail_core(records)
    shown = [record for record in records if record.core == core]
    ops = list(dict.fromkeys(record.op for record in shown))
    labels = {record.label: "/".join(filter(None, (record.impl, record.isa))) for record in shown}
    colours = {name: f"C{number}" for number, name in enumerate(sorted(set(labels.values())))}
    heights = [1 + BAR_INCHES * sum(record.op == op for record in shown) for op in ops]
    figure, axes = pyplot.subplots(
        len(ops), 1, figsize=(10, sum(heights)), height_ratios=heights, sharex=True, squeeze=False, layout="constrained"
    )
    for op, axis in zip(ops, axes[:, 0], strict=True):
        of_op = [record for record in shown if record.op == op]
        places = range(len(of_op))
        axis.barh(places, [record.cycles for record in of_op], color=[colours[labels[r.label]] for r in of_op])
        axis.set_yticks(places, [f"{record.case}  {labels[record.label]}" for record in of_op], fontsize=7)
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.set_xlim(left=FEWEST_CYCLES)
        axis.set_title(op, loc="left", fontsize=9)
        axis.grid(axis="x", alpha=0.3)
    axes[-1, 0].set_xlabel(f"modelled cycles on Neoverse {core} (L1 hits, predicted branches)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
