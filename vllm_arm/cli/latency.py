# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-arm topology --latency`` measures, prints and draws."""

from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_arm.runtime import core_latency
from vllm_arm.runtime.topology import Topology

_INCHES_PER_CORE = 0.12
_MOST_TICKS = 16


class Latencies(NamedTuple):
    """Nanoseconds one way between every two of ``cpus``; None on the diagonal of ``matrix``."""

    cpus: list[int]
    matrix: list[list[float | None]]


def measure(topology: Topology, heat_map: Path | None) -> Latencies:
    """Measure between all cores that may be used, and draw the result to the file ``heat_map``, if any.

    Raises ``click.ClickException`` where matplotlib is missing, before anything is measured, a CPU cannot be had, or
    the file cannot be written.
    """
    if heat_map is not None:
        try:
            import matplotlib as _  # noqa: F401 - whether it is there
        except ImportError:
            raise click.ClickException("--heat-map needs matplotlib: pip install matplotlib") from None
    cpus = core_latency.one_cpu_per_core(topology)
    try:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("core-to-core latency", total=None)
            matrix = core_latency.measure(
                cpus, progress=lambda done, total: bar.update(task, completed=done, total=total)
            )
        measured = Latencies(cpus, matrix)
        if heat_map is not None:
            draw(measured, heat_map)
    except (OSError, RuntimeError) as error:
        raise click.ClickException(str(error)) from None
    return measured


def as_data(measured: Latencies) -> dict[str, Any]:
    """CPUs and nanoseconds as plain data, for JSON."""
    return {"cpus": measured.cpus, "nanoseconds": measured.matrix}


def show(console: Console, topology: Topology, measured: Latencies) -> None:
    """Print the least, the median and the greatest latency within each NUMA node and between every two."""
    console.print()
    distances = core_latency.summarise(topology, *measured)
    if not distances:
        console.print("core-to-core latency: there is only one core")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("Core-to-core latency", "Least", "Median", "Most"):
        table.add_column(column)
    for (first, second), *values in distances:
        place = f"within node {first}" if first == second else f"node {first} to node {second}"
        table.add_row(place, *(f"{value:.0f} ns" for value in values))
    console.print(table)


def draw(measured: Latencies, path: Path) -> None:
    """Write the heat map as PNG to ``path``. Raises ``OSError`` where it cannot be written."""
    from matplotlib.figure import Figure

    cpus = measured.cpus
    values = [[float("nan") if value is None else value for value in row] for row in measured.matrix]
    size = max(5.0, min(20.0, _INCHES_PER_CORE * len(cpus)))
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(values, cmap="viridis", interpolation="nearest")
    ticks = range(0, len(cpus), -(-len(cpus) // _MOST_TICKS))
    axes.set_xticks(ticks, [str(cpus[tick]) for tick in ticks])
    axes.set_yticks(ticks, [str(cpus[tick]) for tick in ticks])
    axes.set(title="Core-to-core latency, one way", xlabel="CPU", ylabel="CPU")
    figure.colorbar(image, label="ns", shrink=0.8)
    figure.savefig(path, format="png", dpi=150)
