# SPDX-License-Identifier: Apache-2.0
"""``vllm-arm doctor``, ``vllm-arm topology`` and ``vllm-arm patches``."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click
from rich.console import Console
from rich.table import Table

import vllm_arm
from vllm_arm.cli import doctor as diagnosis

_Command = TypeVar("_Command", bound=Callable[..., None])
_COLOURS = {"ok": "green", "off": "dim", "warning": "yellow", "broken": "bold red"}


def _console() -> Console:
    # A pipe or a log has no width of its own: do not fold paths there.
    return Console() if sys.stdout.isatty() else Console(width=200, force_terminal=False)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(vllm_arm.__version__, prog_name="vllm-arm")
def main() -> None:
    """vLLM, fast on Arm Neoverse servers."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
@click.option(
    "--tp",
    "tensor_parallel_size",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Show the thread binding for this --tensor-parallel-size.",
)
def doctor(as_json: bool, tensor_parallel_size: int) -> None:
    """Show what vllm-arm does on this machine and why; exit with 1 if something is broken."""
    checks = diagnosis.examine(tensor_parallel_size)
    broken = [check for check in checks if check.status == "broken"]
    if as_json:
        click.echo(json.dumps({"ok": not broken, "checks": [c._asdict() for c in checks]}, indent=2))
    else:
        _print_checks(checks)
    sys.exit(1 if broken else 0)


def _print_checks(checks: list[diagnosis.Check]) -> None:
    console = _console()
    table = Table(box=None, pad_edge=False)
    for column in ("", "Check", "Found", "Why, and what to do"):
        table.add_column(column, overflow="fold")
    section = None
    for check in checks:
        if check.section != section:
            section = check.section
            table.add_row("", f"[bold]{section}[/bold]", "", "")
        colour = _COLOURS[check.status]
        advice = f" {check.advice}" if check.advice else ""
        table.add_row(f"[{colour}]{check.status}[/{colour}]", check.name, check.value, check.reason + advice)
    console.print(table)


def _size(option: str, name: str, meaning: str) -> Callable[[_Command], _Command]:
    return click.option(
        option, name, type=click.IntRange(min=1), default=1, show_default=True, help=f"{meaning} of the plan."
    )


@main.command()
@_size("--tp", "tensor_parallel_size", "--tensor-parallel-size")
@_size("--pp", "pipeline_parallel_size", "--pipeline-parallel-size")
@_size("--dp", "data_parallel_size", "--data-parallel-size-local")
@click.option("--latency", is_flag=True, help="Measure core-to-core latency; the machine should be idle.")
@click.option(
    "--heat-map",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Measure core-to-core latency and draw it to this PNG file (needs matplotlib).",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
def topology(
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    data_parallel_size: int,
    latency: bool,
    heat_map: Path | None,
    as_json: bool,
) -> None:
    """Show NUMA nodes and cores, and where the processes of a server would go."""
    from vllm_arm.cli import latency as latencies
    from vllm_arm.cli import topology as report
    from vllm_arm.runtime import environment
    from vllm_arm.runtime.binding import BindingError
    from vllm_arm.runtime.topology import read_topology

    machine = read_topology()
    try:
        plan = environment.plan_threads(
            tensor_parallel_size * pipeline_parallel_size, data_parallel_size, topology=machine
        )
    except BindingError as error:
        raise click.ClickException(str(error)) from None
    measured = latencies.measure(machine, heat_map) if latency or heat_map else None
    if as_json:
        data = report.as_data(machine, plan)
        if measured:
            data["latency"] = latencies.as_data(measured)
        click.echo(json.dumps(data, indent=2))
        return
    report.show(_console(), machine, plan)
    if measured:
        latencies.show(_console(), machine, measured)


@main.command()
@click.option("--check", is_flag=True, help="Exit with 1 unless every patch applies or is off.")
def patches(check: bool) -> None:
    """List the patches to vLLM, and whether each applies to the installed one."""
    from vllm_arm.patching import status

    table = Table(box=None, pad_edge=False)
    for column in ("State", "Patch", "vLLM", "What it does", "Reason"):
        table.add_column(column, overflow="fold")
    states = status()
    for patch in states:
        table.add_row(patch.state, patch.name, patch.target, patch.description, patch.reason)
    _console().print(table)
    if check and any(patch.state in ("failed", "skipped") for patch in states):
        sys.exit(1)
