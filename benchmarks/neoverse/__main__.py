# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.neoverse`: modelled cycles, and the gate on them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from benchmarks.neoverse import budget as budgets
from benchmarks.neoverse import chart, measure, report, targets
from benchmarks.neoverse.assembly import Disassembler
from benchmarks.neoverse.cores import CORES
from benchmarks.neoverse.mca import Model
from benchmarks.neoverse.measure import Results
from benchmarks.neoverse.runner import REPOSITORY, CountingRoot, Runner
from benchmarks.neoverse.selection import Selection, choose, short_selections
from benchmarks.neoverse.tools import find_tools
from tests.emulation.cache import default_cache
from tests.emulation.install import install_wheels
from tests.emulation.rig import make_root

BUILD = REPOSITORY / "build"
JSON_FILE = BUILD / "cycles.json"
CHART_FILE = BUILD / "cycles.png"
SCRATCH = BUILD / "neoverse"
WHEEL_VARIABLE = "VLLM_ARM_AARCH64_WHEEL"
# As wide as the table, where the output is no terminal.
FILE_WIDTH = 230


class BarProgress:
    """Phases as bars on stderr."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=0, visible=False)

    def phase(self, title: str, total: int) -> None:
        """Begin a bar; where stderr is no terminal, say so in a line."""
        if not self._bar.console.is_terminal:
            print(f"{title}: {total}", file=sys.stderr, flush=True)
        self._task = self._bar.add_task(title, total=total)

    def advance(self, steps: int = 1) -> None:
        """Move the bar on."""
        self._bar.advance(self._task, steps)


def count_and_model(
    selections: Sequence[Selection], wheel: Path | None, cpuinfo: str | None = None, reference_conditions: bool = False
) -> Results:
    """Figures for all selections. Raises ``LookupError``, ``RuntimeError`` or ``ValueError`` with one line."""
    tools = find_tools()
    needs_wheel = any(job.isa for selection in selections for job in selection.jobs)
    if needs_wheel and wheel is None:
        raise ValueError(f"--wheel: the cross-built wheel is needed to count vllm_arm; or set {WHEEL_VARIABLE}")
    root = make_root()
    disassembler = Disassembler(tools.llvm_mc)
    model = Model(tools.llvm_mca, disassembler, default_cache().parent / "neoverse" / "cycles.sqlite")
    SCRATCH.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = Results([], [])
    with (
        tempfile.TemporaryDirectory(dir=SCRATCH) as scratch,
        Bar(*columns, console=Console(stderr=True)) as bar,
    ):
        usr_local = Path(scratch) / "usr-local"
        if wheel is not None and needs_wheel:
            install_wheels([wheel], usr_local)
        counting_root = CountingRoot(root, usr_local, cpuinfo=cpuinfo)
        runner = Runner(counting_root, tools, Path(scratch), reference_conditions)
        progress = BarProgress(bar)
        for selection in selections:
            found = measure.model(measure.count(selection, runner, disassembler, progress), model, progress)
            results.records.extend(found.records)
            results.failures.extend(found.failures)
    jobs = [f"{job.case.label}/{job.label}" for selection in selections for job in selection.jobs]
    order = list(CORES)
    results.records.sort(key=lambda record: (jobs.index(record.label), order.index(record.core)))
    return results


def one_line_errors(action: Callable[[], int]) -> int:
    """The action's exit code, or 2 after a line that says what is missing or wrong."""
    try:
        return action()
    except (LookupError, OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        print(f"cycles: {error}", file=sys.stderr)
        return 2


def selecting(command: Callable[..., None]) -> Callable[..., None]:
    """The options that narrow a run down."""
    options = (
        click.option("--op", help="family of ops, for instance attention"),
        click.option("--case", help="case, for instance prefill_512"),
        click.option("--impl", help="vllm_arm, vllm_arm/<isa>, upstream or torch"),
        click.option("--core", "cores", multiple=True, type=click.Choice(list(CORES)), help="may be repeated"),
        click.option(
            "--wheel",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            default=os.environ.get(WHEEL_VARIABLE),
            help=f"vllm-arm for aarch64 (default: ${WHEEL_VARIABLE})",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group(help=__doc__)
def main() -> None:
    """The command line."""


@main.command()
@selecting
@click.option("--json", "json_file", type=click.Path(path_type=Path), default=JSON_FILE, show_default=True)
@click.option("--chart", "chart_file", type=click.Path(path_type=Path), default=CHART_FILE, show_default=True)
@click.option(
    "--reference-conditions",
    is_flag=True,
    help="count as the README's reference figures were: with the host's /proc/cpuinfo, which hides the L2 cache "
    "from vLLM's attention, and with marks whose exception is counted",
)
def run(
    op: str | None,
    case: str | None,
    impl: str | None,
    cores: tuple[str, ...],
    wheel: Path | None,
    json_file: Path,
    chart_file: Path,
    reference_conditions: bool,
) -> None:
    """Count and model; write the JSON and the chart. Exit code 1 where a result is wrong."""

    def action() -> int:
        chart.require_matplotlib()
        cpuinfo = Path("/proc/cpuinfo").read_text() if reference_conditions else None
        results = count_and_model([choose(op, case, impl, cores)], wheel, cpuinfo, reference_conditions)
        console = Console()
        report.show(results, console if console.is_terminal else Console(width=FILE_WIDTH))
        report.write_json(results.records, json_file)
        chart.draw(results.records, chart_file)
        console.print(f"wrote {json_file} and {chart_file}", soft_wrap=True, highlight=False)
        return 0 if all(record.correct for record in results.records) else 1

    sys.exit(one_line_errors(action))


@main.command()
@selecting
@click.option("--subset", type=click.Choice(["short"]), help="what fits into three minutes")
@click.option("--budget", "budget_file", type=click.Path(path_type=Path), default=budgets.BUDGET_FILE)
def check(
    op: str | None,
    case: str | None,
    impl: str | None,
    cores: tuple[str, ...],
    wheel: Path | None,
    subset: str | None,
    budget_file: Path,
) -> None:
    """Compare with the budget. Exit code 1, with the names, where a case is over it or wrong."""

    def action() -> int:
        budget = budgets.read_budget(budget_file)
        narrowed = any((op, case, impl, cores))
        if subset and narrowed:
            raise ValueError("--subset: cannot be combined with --op, --case, --impl or --core")
        selections = short_selections() if subset else [choose(op, case, impl, cores)]
        results = count_and_model(selections, wheel)
        problems = budgets.find_excesses(results.records, budget)
        problems += [
            f"{record.label} on {record.core}: wrong result" for record in results.records if not record.correct
        ]
        if not (subset or narrowed):
            problems += budgets.find_orphans(results.records, budget)
        for problem in problems:
            print(problem)
        print(f"{len(results.records)} figures, {len(problems)} problems")
        return 1 if problems or not results.records else 0

    sys.exit(one_line_errors(action))


@main.command("update-budget")
@selecting
@click.option("--from", "json_file", type=click.Path(exists=True, path_type=Path), help="take a run's JSON, do not run")
@click.option("--budget", "budget_file", type=click.Path(path_type=Path), default=budgets.BUDGET_FILE)
def update_budget(
    op: str | None,
    case: str | None,
    impl: str | None,
    cores: tuple[str, ...],
    wheel: Path | None,
    json_file: Path | None,
    budget_file: Path,
) -> None:
    """Set the budget to what is counted now. A complete update drops budgets that nothing belongs to."""

    def action() -> int:
        narrowed = any((op, case, impl, cores))
        if json_file:
            records = report.read_json(json_file)
        else:
            records = count_and_model([choose(op, case, impl, cores)], wheel).records
        if wrong := [record.label for record in records if not record.correct]:
            raise ValueError(f"no budget is made of wrong results: {', '.join(wrong)}")
        old = budgets.read_budget(budget_file) if narrowed and budget_file.exists() else {}
        budgets.write_budget(budget_file, records, old)
        print(f"wrote {len(records)} budgets to {budget_file}")
        return 0

    sys.exit(one_line_errors(action))


@main.command("targets")
@click.option(
    "--from",
    "json_file",
    type=click.Path(path_type=Path),
    default=JSON_FILE,
    show_default=True,
    help="a run's JSON",
)
def show_targets(json_file: Path) -> None:
    """What kernels are meant to reach, and what a run found. Exit code 1 where something is missed."""

    def action() -> int:
        verdicts = list(targets.judge(report.read_json(json_file)))
        console = Console()
        report.show_targets(verdicts, console if console.is_terminal else Console(width=FILE_WIDTH))
        return 1 if any(verdict.is_met is False for verdict in verdicts) else 0

    sys.exit(one_line_errors(action))


if __name__ == "__main__":
    main()
