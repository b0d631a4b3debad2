# SPDX-License-Identifier: Apache-2.0
"""What quantising weights and the KV cache costs a model in accuracy; see benchmarks/README.md."""

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

if not __package__:
    # As in throughput.py: run as a script, modules of this folder would hide others.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.quality import held_out_task, report
from benchmarks.quality import settings as setting_table
from benchmarks.quality.settings import BASELINE, Questions, Setting
from benchmarks.serving import child, host
from benchmarks.serving.child import PROJECT, ChildError
from benchmarks.serving.store import write_atomically
from benchmarks.serving.workload import resolve_model
from demo.server import end_on_signals

DEFAULT_OUTPUT = Path("build/accuracy")

console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
_positive = click.IntRange(min=1)


@click.command()
@click.option("--model", required=True, help="Folder, or name of the Hugging Face hub.")
@click.option("--settings", "names", help="Some of the settings, by comma; bfloat16 is always among them.")
@click.option(
    "--setting", "own", multiple=True, help="One more, NAME=ARGUMENTS: 'awq=--model FOLDER'. May be repeated."
)
@click.option("--windows", type=_positive, default=48, show_default=True, help="Pieces of held-out text.")
@click.option("--length", type=click.IntRange(min=2), default=512, show_default=True, help="Tokens of each.")
@click.option("--prompts", type=_positive, default=32, show_default=True, help="Pieces whose beginning is continued.")
@click.option("--prompt-tokens", type=_positive, default=64, show_default=True, help="Of such a beginning.")
@click.option("--tokens", type=_positive, default=64, show_default=True, help="Generated for each.")
@click.option(
    "--text", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Of its own, for perplexity."
)
@click.option(
    "--tasks",
    help=f"Of lm-eval, by comma; needs lm-eval, and for all but {held_out_task.NAME} data sets or a network.",
)
@click.option(
    "--task-folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True),
    help="With tasks of your own, as lm-eval's --include_path takes it.",
)
@click.option("--limit", type=_positive, help="Examples of each task.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), default=DEFAULT_OUTPUT, show_default=True)
@click.option("--timeout", type=float, default=3600, show_default=True, help="Seconds for one process.")
@click.argument("engine_arguments", nargs=-1, type=click.UNPROCESSED)
def main(
    model: str,
    names: str | None,
    own: tuple[str, ...],
    windows: int,
    length: int,
    prompts: int,
    prompt_tokens: int,
    tokens: int,
    text: Path | None,
    tasks: str | None,
    task_folder: Path | None,
    limit: int | None,
    output: Path,
    timeout: float,
    engine_arguments: tuple[str, ...],
) -> None:
    """Perplexity, greedy agreement and scores of tasks: quantised, beside bfloat16, each in a fresh process.

    ENGINE_ARGUMENTS, after --, are those of vllm serve.
    """
    end_on_signals()
    try:
        model = resolve_model(model)
        chosen = setting_table.select(names, own)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if tasks is not None and importlib.util.find_spec("lm_eval") is None:
        raise click.UsageError("--tasks: lm-eval is not installed: pip install lm-eval")
    if task_folder is not None and tasks is None:
        raise click.UsageError("--task-folder: expected --tasks to name some of its tasks")
    wanted = () if tasks is None else tuple(filter(None, tasks.split(",")))
    continued = min(prompt_tokens, length)
    questions = Questions(windows, length, prompts, continued, tokens, text, wanted, limit, task_folder)
    runner = _Runner(model, questions, engine_arguments, output, timeout)
    answers: dict[str, dict[str, Any]] = {}
    errors: dict[str, str] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for setting in chosen:
            try:
                answers[setting.name] = runner.run(setting, progress)
            except ChildError as error:
                errors[setting.name] = str(error)
                if setting == BASELINE:
                    raise click.ClickException(f"{setting.name}: {error}") from None
    figures = {name: report.compare(found, answers[BASELINE.name]) for name, found in answers.items()}
    console.print(report.accuracy_table(runner.title(), figures, errors))
    path = output / f"{Path(model).name}.json"
    description = {"model": model, "engine_arguments": list(engine_arguments), "questions": questions.describe()}
    settings = {setting.name: list(setting.arguments) for setting in chosen}
    results = {"settings": settings, "figures": figures, "errors": errors}
    write_atomically(path, {"host": host.describe(), **description, **results})
    console.print(f"JSON: {path}")
    if errors:
        raise click.ClickException(f"failed: {', '.join(errors)}")


class _Runner:
    """What the processes of one call share."""

    def __init__(
        self, model: str, questions: Questions, engine_arguments: tuple[str, ...], output: Path, timeout: float
    ) -> None:
        self.model = model
        self.questions = questions
        self.engine_arguments = engine_arguments
        self.output = output
        self.timeout = timeout

    def title(self) -> str:
        text = "held-out text" if self.questions.text is None else self.questions.text.name
        return f"{Path(self.model).name}: {self.questions.windows} x {self.questions.length} tokens of {text}"

    def run(self, setting: Setting, progress: Progress) -> dict[str, Any]:
        """The answers of one setting. Raises ``ChildError`` where a process fails."""
        # Log probabilities of prompts need every token to be computed. The setting's own arguments win.
        arguments = ["--model", self.model, "--no-enable-prefix-caching", *self.engine_arguments, *setting.arguments]
        task = progress.add_task(setting.name, total=None)

        def show(phase: str, done: int, total: int) -> None:
            progress.update(task, description=f"{setting.name}: {phase}", completed=done, total=total or None)

        try:
            found = self._ask(setting, arguments, show, evaluate=False)
            return found | (self._ask(setting, arguments, show, evaluate=True) if self.questions.tasks else {})
        finally:
            progress.remove_task(task)

    def _ask(self, setting: Setting, arguments: list[str], show: child.Progress, *, evaluate: bool) -> dict[str, Any]:
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))}
        if not host.is_arm():
            environment["VLLM_ARM_FORCE"] = "1"
            # Or attention were vLLM's, which takes an int8 KV cache there and computes nonsense.
            environment["VLLM_ARM_ISA"] = os.environ.get("VLLM_ARM_ISA", "portable")
        with tempfile.TemporaryDirectory(prefix="accuracy-") as directory:
            specification, result = Path(directory) / "specification.json", Path(directory) / "result.json"
            content = {"arguments": arguments, "questions": self.questions.describe(), "evaluate": evaluate}
            specification.write_text(json.dumps({**content, "result": str(result)}))
            command = [sys.executable, "-m", "benchmarks.quality.worker", str(specification)]
            log = self.output / f"{Path(self.model).name}-{setting.name}{'-tasks' if evaluate else ''}.log"
            child.run(command, environment, log, self.timeout, show)
            return dict(json.loads(result.read_text()))


if __name__ == "__main__":
    main()
