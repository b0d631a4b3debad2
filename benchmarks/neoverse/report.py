# SPDX-License-Identifier: Apache-2.0
"""Results for people: a table on the terminal, a JSON file and a bar chart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.neoverse.cores import CORES, GRAVITON4_CORES, MAIN_CORE, MEMORY_BYTES_PER_CYCLE
from benchmarks.neoverse.measure import Record, Results
from benchmarks.neoverse.targets import Verdict

LIMITS = (
    "Modelled, not measured: executed instructions priced by LLVM's tables for each core. Every load hits the L1 "
    "cache, every branch is predicted, blocks do not overlap, and the tables have errors of their own. Compare "
    "implementations with it; do not predict time. Bound by memory: the core would need more than "
    f"{MEMORY_BYTES_PER_CYCLE:.2f} bytes a cycle, its 1/{GRAVITON4_CORES} of a Graviton4's memory bandwidth, where the "
    "operands are in no cache."
)


def detail_core(records: Sequence[Record]) -> str:
    """The core whose derived figures are shown: the main one if it was modelled."""
    cores = {record.core for record in records}
    return MAIN_CORE.name if MAIN_CORE.name in cores else min(cores, default=MAIN_CORE.name)


def build_table(records: Sequence[Record]) -> Table:
    """One line for each implementation: cycles on every core, the rest on one."""
    core = detail_core(records)
    cores = [name for name in CORES if any(record.core == name for record in records)]
    table = Table(title="Modelled cycles", title_justify="left", pad_edge=False)
    table.add_column("case", no_wrap=True)
    table.add_column("implementation", no_wrap=True)
    table.add_column("instructions", justify="right")
    for name in cores:
        table.add_column(f"{name} cycles", justify="right")
    titles = ("MAC/cycle", "bytes/cycle", "% of peak", "/ upstream", "accessed / required", "bound", "max error")
    for title in titles:
        table.add_column(f"{core} {title}" if title == "MAC/cycle" else title, justify="right")
    grouped: dict[str, dict[str, Record]] = {}
    for record in records:
        grouped.setdefault(record.label, {})[record.core] = record
    previous = ""
    for by_core in grouped.values():
        shown = by_core.get(core) or next(iter(by_core.values()))
        case = f"{shown.op}/{shown.case}"
        if previous and shown.op != previous.partition("/")[0]:
            table.add_section()
        table.add_row(
            "" if case == previous else case,
            "/".join(filter(None, (shown.impl, shown.isa))),
            f"{shown.instructions:,}",
            *(f"{by_core[name].cycles:,}" if name in by_core else "-" for name in cores),
            *_details(shown),
        )
        previous = case
    return table


def _details(record: Record) -> list[str]:
    ratio = record.ratio_to_upstream
    return [
        f"{record.multiply_accumulates_per_cycle:.1f}" if record.multiply_accumulates_per_cycle else "-",
        f"{record.bytes_per_cycle:.2f}",
        f"{100 * record.peak_fraction:.0f}",
        "-" if ratio is None else f"{ratio:.2f}",
        f"{record.accessed_bytes / record.required_bytes:.1f}",
        record.bound,
        f"{record.max_error:.1e}" + ("" if record.correct else " WRONG"),
    ]


def show(results: Results, console: Console) -> None:
    """Print the table, what gave no figure, what was wrong, and the model's limits."""
    if results.records:
        console.print(build_table(results.records))
    reasons: dict[tuple[str, str], list[str]] = {}
    for failure in results.failures:
        reasons.setdefault((failure.core, failure.reason), []).append(failure.label)
    for (core, reason), labels in reasons.items():
        console.print(f"no figure on {core}, {reason}: {', '.join(labels)}", highlight=False)
    for record in results.records:
        if not record.correct:
            console.print(f"wrong result: {record.label} on {record.core}, error {record.max_error:.2e}", style="red")
    console.print(LIMITS, style="dim", highlight=False)


def show_targets(verdicts: Sequence[Verdict], console: Console) -> None:
    """Print what was aimed at and what was reached."""
    words = {True: "met", False: "[red]missed", None: "not counted"}
    table = Table(title="Targets in modelled cycles", title_justify="left", pad_edge=False)
    for title in ("case", "core", "measure", "target", "variant", "reached", ""):
        table.add_column(title, justify="right" if title in ("target", "reached") else "left", no_wrap=True)
    for each in verdicts:
        limit = f"{'at least' if each.at_least else 'at most'} {each.limit:.2f}"
        value = "-" if each.value is None else f"{each.value:.2f}"
        table.add_row(each.case, each.core, each.measure, limit, each.isa, value, words[each.is_met])
    console.print(table)


def write_json(records: Sequence[Record], path: Path) -> None:
    """Write the records, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record.as_json()) for record in records]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def read_json(path: Path) -> list[Record]:
    """The records of a file that ``write_json`` wrote. Raises ``ValueError`` where it holds anything else."""
    try:
        return [Record(**fields) for fields in json.loads(path.read_text())]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
