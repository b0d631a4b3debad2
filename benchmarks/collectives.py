# SPDX-License-Identifier: Apache-2.0
"""What collective operations between processes of this machine take: ours, vLLM's, gloo's; see benchmarks/README.md."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
from rich.console import Console
from rich.table import Table

from benchmarks.neoverse.chart import require_matplotlib
from benchmarks.serving import host
from benchmarks.serving.store import write_atomically
from benchmarks.timing import collective_ranks
from benchmarks.timing.collective_ranks import Plan

OPS = ("all_reduce", "all_gather")
SIZES = (64, 2 << 10, 8 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
PLOT = Path("build/collectives.png")

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


@click.command()
@click.option("--ranks", type=click.IntRange(min=2, max=64), default=2, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Of each rank.")
@click.option("--op", "ops", type=click.Choice(OPS), multiple=True, default=OPS[:1], show_default=True)
@click.option("--size", "sizes", type=click.IntRange(min=2), multiple=True, default=SIZES, help="Bytes of each rank.")
@click.option("--rounds", type=click.IntRange(min=1), default=10, show_default=True, help="Turns of each.")
@click.option("--iterations", type=click.IntRange(min=1), default=500, show_default=True, help="Calls in a turn.")
@click.option("--json", "output", type=click.Path(path_type=Path, dir_okay=False), help="Rows and host, as JSON.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), default=PLOT, show_default=True)
def main(
    ranks: int,
    threads: int,
    ops: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    iterations: int,
    output: Path | None,
    plot: Path,
) -> None:
    """Time all_reduce or all_gather of bf16 between RANKS processes, each on CPUs of its own if there are enough."""
    cpus = len(os.sched_getaffinity(0))
    if ranks * threads > cpus:
        console.print(f"{ranks} ranks of {threads} threads share {cpus} CPUs: what is measured is the sharing.")
    try:
        rows = collective_ranks.measure(Plan(ranks, tuple(ops), tuple(sizes), threads, rounds, iterations))
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None
    for op in ops:
        console.print(table(op, [row for row in rows if row["op"] == op]))
    if output is not None:
        write_atomically(output, {"host": host.describe(), "threads": threads, "results": rows})
        console.print(f"JSON: {output}")
    try:
        require_matplotlib()
    except LookupError as error:
        console.print(f"No plot: {error}")
        return
    draw(rows, plot)
    console.print(f"Plot: {plot}")


def table(op: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Rows of one op as a table, with ours over each of the others."""
    result = Table(title=f"{op}, {rows[0]['dtype']}, {rows[0]['ranks']} ranks", title_justify="left")
    for column in ("bytes", "implementation", "p50 us", "p90 us", "p99 us", "GB/s", "ours / it, p50", "p99"):
        result.add_column(column, justify="left" if column == "implementation" else "right")
    ours = {row["bytes"]: row for row in rows if row["impl"] == "ours"}
    for row in rows:
        own = ours[row["bytes"]]
        result.add_row(
            f"{row['bytes']:,}" if row is own else "",
            row["impl"],
            *(f"{row[f'p{percent}_us']:.1f}" for percent in (50, 90, 99)),
            f"{row['bytes'] / row['p50_us'] / 1e3:.2f}",
            *("" if row is own else f"{own[key] / row[key]:.2f}" for key in ("p50_us", "p99_us")),
        )
    return result


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG: each implementation's median over the size, on log scales, and a band up to the 99th percentile."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    ops = list(dict.fromkeys(row["op"] for row in rows))
    figure, axes = pyplot.subplots(1, len(ops), figsize=(7 * len(ops), 5), squeeze=False, layout="constrained")
    for op, axis in zip(ops, axes[0], strict=True):
        for name in dict.fromkeys(row["impl"] for row in rows):
            shown = sorted(
                (row for row in rows if (row["op"], row["impl"]) == (op, name)), key=lambda row: row["bytes"]
            )
            sizes = [row["bytes"] for row in shown]
            axis.plot(sizes, [row["p50_us"] for row in shown], marker="o", label=name)
            axis.fill_between(
                sizes, [row["p50_us"] for row in shown], [row["p99_us"] for row in shown], alpha=0.15, linewidth=0
            )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("bytes of each rank")
        axis.set_ylabel("microseconds, median to 99th percentile")
        axis.set_title(f"{op}, {rows[0]['ranks']} ranks", loc="left")
        axis.grid(alpha=0.3)
        axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
