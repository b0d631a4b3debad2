# SPDX-License-Identifier: Apache-2.0
"""``vllm-arm doctor`` and ``vllm-arm patches``."""

import json
import sys

import click
from rich.console import Console
from rich.table import Table

import vllm_arm
from vllm_arm.cli import doctor as diagnosis

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
