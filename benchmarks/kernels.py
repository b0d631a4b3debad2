# SPDX-License-Identifier: Apache-2.0
"""What each kernel takes in wall time on this machine: ours, vLLM's and torch's; see benchmarks/README.md."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a script: the folder of this file would make it the module `kernels` that transformers looks for.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.cases import Case, select
from benchmarks.neoverse.cores import CORES
from benchmarks.serving import host
from benchmarks.serving.store import write_atomically
from benchmarks.serving.summary import Spread
from benchmarks.timing import allocator, modelled
from benchmarks.timing.cases import Timing, time_case, variants
from vllm_arm import _host

DEFAULT_OUTPUT = Path("build/kernels.json")
MODELLED = Path("build/cycles.json")


console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)


@click.command()
@click.option("--op", help=f"One family of ops, or {allocator.OP}. Default: all.")
@click.option("--case", "name", help="One case.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--repeat", type=click.IntRange(min=1), default=7, show_default=True, help="Rounds, in turns.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), default=DEFAULT_OUTPUT, show_default=True)
@click.option("--cycles", type=click.Path(path_type=Path, dir_okay=False), default=MODELLED, show_default=True)
def main(op: str | None, name: str | None, threads: int, repeat: int, output: Path, cycles: Path) -> None:
    """Time the kernels' cases, checking their results, and write JSON.

    Every implementation is a process of its own, and they take turns. On an Arm machine the speed-ups over vLLM are
    set beside those that CYCLES models.
    """
    available = len(os.sched_getaffinity(0))
    if threads > available:
        raise click.UsageError(f"--threads: expected at most the {available} CPUs of this process, got {threads}")
    try:
        chosen = [] if op == allocator.OP else _timed(op, name)
        model = modelled.read(cycles)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if op == allocator.OP and name not in (None, allocator.CASE):
        raise click.UsageError(f"--case: expected {allocator.CASE}, got {name}")
    with_allocator = op == allocator.OP or (op is None and name is None)
    rows, wrong = _time_cases(chosen, threads, repeat)
    comparison = _compare_allocators(repeat) if with_allocator else None
    measured = [row for row in rows if row["seconds"] is not None]
    comparisons = _compare_with_model(model, measured, cycles)
    write_atomically(
        output,
        {
            "host": host.describe(),
            "threads": threads,
            "rounds": repeat,
            "results": rows,
            "allocator": comparison,
            "modelled": [{**each._asdict(), "agrees": each.agrees} for each in comparisons],
        },
    )
    console.print(f"{host.cpu_name()}, threads: {threads}, rounds: {repeat}. JSON: {output}")
    if wrong:
        raise click.ClickException(f"wrong results: {', '.join(wrong)}")


def _timed(op: str | None, name: str | None) -> list[Case]:
    """The cases that can be timed. Raises ``ValueError`` where there are none."""
    chosen = [case for case in select(op, name) if case.is_repeatable]
    if not chosen:
        raise ValueError(f"op {op!r}: its cases are counted only; collectives.py measures it between processes")
    return chosen


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _time_cases(chosen: Sequence[Case], threads: int, rounds: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Time and show each case; return the rows of the JSON and the labels of what is wrong."""
    features, operations = _host.host_features(), _host.operations()
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    with _progress() as progress:
        task = progress.add_task("cases", total=len(chosen))
        for case in chosen:
            progress.update(task, description=case.label)
            timings = time_case(case, variants(case, features, operations), threads, rounds)
            progress.console.print(case_table(case, timings))
            rows += case_rows(case, timings)
            wrong += [f"{case.label} {each.variant.label}" for each in timings if each.seconds and each.is_wrong]
            progress.advance(task)
    return rows, wrong


def _upstream_seconds(timings: Sequence[Timing]) -> float | None:
    return next((each.median for each in timings if each.variant.name == "upstream" and each.seconds), None)


def case_rows(case: Case, timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """The rows of the JSON: seconds are of one run, ``speed_up`` is over upstream's op in the same rounds."""
    upstream = _upstream_seconds(timings)
    moved = case.work.bytes_read + case.work.bytes_written
    rows = []
    for timing in timings:
        row: dict[str, Any] = {"op": case.op, "case": case.name, "impl": timing.variant.name, "isa": timing.variant.isa}
        if not timing.seconds:
            rows.append({**row, "seconds": None, "failure": timing.failure})
            continue
        seconds = timing.median
        rows.append(
            {
                **row,
                "seconds": seconds,
                "rounds": timing.seconds,
                "bytes_per_second": moved / seconds,
                "multiply_accumulates_per_second": case.work.multiply_accumulates / seconds,
                "speed_up": upstream / seconds if upstream else None,
                "max_error": timing.max_error,
                "tolerance": timing.tolerance,
                "failure": timing.failure,
            }
        )
    return rows


def case_table(case: Case, timings: Sequence[Timing]) -> Table:
    """Times of a case, a row for each implementation."""
    table = Table(title=f"{case.label}: {case.shape}", title_justify="left")
    table.add_column("implementation")
    for name in ("µs", "±", "GB/s", "GMAC/s", "over vLLM's", "error"):
        table.add_column(name, justify="right")
    upstream = _upstream_seconds(timings)
    for timing in timings:
        if not timing.seconds:
            table.add_row(timing.variant.label, f"[red]{timing.failure}")
            continue
        seconds = timing.median
        moved = case.work.bytes_read + case.work.bytes_written
        products = case.work.multiply_accumulates
        error = f"{timing.max_error:.1e}"
        table.add_row(
            timing.variant.label,
            f"{1e6 * seconds:.1f}",
            f"{Spread.of(timing.seconds).percent:.0f} %",
            f"{moved / seconds / 1e9:.2f}",
            f"{products / seconds / 1e9:.1f}" if products else "",
            f"{upstream / seconds:.2f}x" if upstream else "",
            f"[red]{error}, wrong" if timing.is_wrong else error,
        )
    return table


def _compare_allocators(pairs: int) -> dict[str, Any] | None:
    """Run and show the allocator's case; None, with the reason said, where it cannot be run."""
    try:
        with _progress() as progress:
            task = progress.add_task(f"{allocator.OP}/{allocator.CASE}", total=2 * pairs)
            comparison = allocator.compare(pairs, finished=lambda: progress.advance(task))
    except allocator.AllocatorError as error:
        console.print(f"[yellow]{allocator.OP}: {error}")
        return None
    title = f"{allocator.OP}/{allocator.CASE}: bf16, {allocator.THREADS} threads, of one pass"
    table = Table(title=title, title_justify="left")
    table.add_column("malloc")
    for column in ("CPU ms", "of it system", "wall ms", "fastest wall ms", "page faults"):
        table.add_column(column, justify="right")
    for name in allocator.ALLOCATORS:
        table.add_row(
            name,
            f"{1e3 * comparison.cpu_seconds(name):.1f}",
            f"{1e3 * comparison.system_seconds(name):.1f}",
            f"{1e3 * comparison.median(name):.1f}",
            f"{1e3 * comparison.fastest(name):.1f}",
            f"{comparison.page_faults(name):,.0f}",
        )
    console.print(table)
    speed_ups = {"speed_up": comparison.speed_up(), "wall_speed_up": comparison.wall_speed_up()}
    console.print(
        f"mimalloc over glibc: {speed_ups['speed_up']:.2f}x in CPU time, {speed_ups['wall_speed_up']:.2f}x in wall time"
    )
    return {"case": allocator.CASE, **speed_ups, "processes": comparison.processes}


def _compare_with_model(
    model: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]], cycles: Path
) -> list[modelled.Comparison]:
    """On an Arm machine, show modelled and measured speed-ups side by side, and where they disagree."""
    if not host.is_arm():
        return []
    core = _host.core_name(_host.host_features().midr)
    if core not in CORES:
        console.print(f"[yellow]no model of this core, {core}: the model has {', '.join(CORES)}")
        return []
    if not model:
        console.print(f"[yellow]no modelled cycles in {cycles}: make cycles writes them")
        return []
    comparisons = modelled.compare(model, measured, core)
    table = Table(title=f"speed-up over vLLM's op, modelled for Neoverse {core} and measured", title_justify="left")
    for column in ("case", "implementation", "modelled", "measured", ""):
        table.add_column(column, justify="right" if column.endswith("ed") else "left")
    for each in comparisons:
        verdict = "" if each.agrees else f"[red]differs by more than {100 * modelled.TOLERANCE:.0f} %"
        table.add_row(f"{each.op}/{each.case}", each.impl, f"{each.modelled:.2f}x", f"{each.measured:.2f}x", verdict)
    console.print(table)
    agreeing = sum(each.agrees for each in comparisons)
    console.print(f"{agreeing} of {len(comparisons)} agree within {100 * modelled.TOLERANCE:.0f} %")
    return comparisons


if __name__ == "__main__":
    main()
