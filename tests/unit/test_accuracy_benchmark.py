# SPDX-License-Identifier: Apache-2.0
"""The accuracy benchmark, with the processes that hold models replaced."""

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from benchmarks import accuracy
from benchmarks.quality import held_out_task, report, settings, worker
from benchmarks.quality.settings import Setting
from benchmarks.serving import child
from tests.integration.serving import FORCED, TRAINED_MODEL
from tests.models.corpus import load_corpus
from vllm_arm import compat


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "a-model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


ANSWERS: dict[str, dict[str, Any]] = {
    "bfloat16": {"perplexity": 10.0, "best_tokens": [[1, 2], [3, 4]], "continuations": [[1, 2, 3, 4]]},
    "arm_int8": {"perplexity": 10.05, "best_tokens": [[1, 2], [3, 4]], "continuations": [[1, 2, 3, 4]]},
    "arm_int4": {"perplexity": 10.3, "best_tokens": [[1, 2], [3, 5]], "continuations": [[1, 2, 9, 4]]},
}


class Processes:
    """Stands in for the processes: what they were asked."""

    def __init__(self) -> None:
        self.specifications: list[dict[str, Any]] = []
        self.environments: list[dict[str, str]] = []
        self.fails: set[str] = set()

    def __call__(self, command: list[str], environment: dict[str, str], log: Path, *_: Any) -> None:
        spec = json.loads(Path(command[-1]).read_text())
        self.specifications.append(spec)
        self.environments.append(environment)
        name = log.stem.removeprefix("a-model-").removesuffix("-tasks")
        if name in self.fails:
            raise child.ChildError("exit code 1: ValueError: no")
        scores = {"scores": {"arc acc": 0.5 if name == "bfloat16" else 0.48}}
        answers = scores if spec["evaluate"] else {**ANSWERS[name], "load_seconds": 2.0}
        Path(spec["result"]).write_text(json.dumps(answers))


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    stand_in = Processes()
    monkeypatch.setattr(child, "run", stand_in)
    return stand_in


def run(model: Path, *arguments: str) -> Result:
    output = model.parent / "out"
    return CliRunner().invoke(accuracy.main, ["--model", str(model), "--output", str(output), *arguments])


def test_settings_beside_the_baseline(model: Path, processes: Processes) -> None:
    result = run(model, "--settings", "arm_int4,arm_int8", "--", "--enforce-eager")
    assert result.exit_code == 0, result.output
    assert [spec["arguments"][-2:] for spec in processes.specifications] == [
        ["--dtype", "bfloat16"],
        ["--quantization", "arm_int8"],
        ["--quantization", "arm_int4"],
    ]
    assert all("--enforce-eager" in spec["arguments"] for spec in processes.specifications)
    assert "1.0300" in result.output
    assert "75.0 %" in result.output
    assert "50.0 %" in result.output
    written = json.loads((model.parent / "out/a-model.json").read_text())
    assert written["figures"]["arm_int8"]["perplexity_ratio"] == pytest.approx(1.005)
    assert written["figures"]["bfloat16"]["same_best_token"] == 1
    assert written["questions"]["windows"] == 48


def test_tasks_of_lm_eval(model: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = [None]
    monkeypatch.setattr(accuracy.importlib.util, "find_spec", lambda _: found[0])
    result = run(model, "--settings", "arm_int8", "--tasks", "arc")
    assert result.exit_code == 2
    assert "--tasks: lm-eval is not installed: pip install lm-eval" in result.output
    found[0] = object()
    result = run(model, "--settings", "arm_int8", "--tasks", "arc", "--limit", "10")
    assert result.exit_code == 0, result.output
    assert [spec["evaluate"] for spec in processes.specifications] == [False, True] * 2
    assert processes.specifications[1]["questions"]["limit"] == 10
    assert "0.4800 (96.0 %)" in result.output


def test_tasks_of_the_users_own(model: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy.importlib.util, "find_spec", lambda _: object())
    folder = model.parent / "tasks"
    result = run(model, "--task-folder", str(folder), "--tasks", "mine")
    assert result.exit_code == 2
    assert "does not exist" in result.output
    folder.mkdir()
    result = run(model, "--task-folder", str(folder))
    assert result.exit_code == 2
    assert "--task-folder: expected --tasks to name some of its tasks" in result.output
    result = run(model, "--settings", "arm_int8", "--task-folder", str(folder), "--tasks", "mine")
    assert result.exit_code == 0, result.output
    questions = processes.specifications[1]["questions"]
    assert questions["task_folder"] == str(folder)
    assert worker.task_folders(questions, model) == [str(folder)]
    assert not list(model.glob("*.yaml"))


def test_the_task_that_needs_no_download(tmp_path: Path) -> None:
    questions = {"tasks": ["arc", held_out_task.NAME], "task_folder": None}
    assert worker.task_folders(questions, tmp_path) == [str(tmp_path)]
    description = json.loads((tmp_path / f"{held_out_task.NAME}.yaml").read_text())
    data = Path(description["dataset_kwargs"]["data_files"]["test"])
    examples = [json.loads(line) for line in data.read_text().splitlines()]
    assert len(examples) > 200
    assert examples == list(held_out_task.examples())
    for example in examples:
        assert len(set(example["choices"])) == held_out_task.CHOICES
    answers = [example["answer"] for example in examples]
    assert all(answers.count(place) > len(answers) / 8 for place in range(held_out_task.CHOICES))
    sources = [module.source for module in load_corpus().held_out]
    for example in examples[::20]:
        right = example["context"] + example["choices"][example["answer"]]
        assert any(right in source for source in sources)


def test_the_version_of_vllm_is_answered_whatever_brought_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", importlib.metadata.version)
    worker.answer_for_vllm()
    assert importlib.metadata.version("vllm") == str(compat.vllm_version())
    assert importlib.metadata.version("pytest") == pytest.__version__


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_lm_eval_itself(tmp_path: Path) -> None:
    options = ("--tasks", held_out_task.NAME, "--limit", "40", "--settings", "arm_int8", "--windows", "2")
    arguments = ("--prompts", "2", "--tokens", "4", "--", "--enforce-eager", "--max-model-len", "1024")
    output = tmp_path / "out"
    model = ["--model", str(TRAINED_MODEL), "--output", str(output)]
    result = CliRunner(env=FORCED).invoke(accuracy.main, [*model, *options, *arguments])
    assert result.exit_code == 0, result.output
    figures = json.loads((output / f"{TRAINED_MODEL.name}.json").read_text())["figures"]
    plain, quantised = (figures[name]["scores"]["held_out_lines acc_norm"] for name in ("bfloat16", "arm_int8"))
    assert 0 < plain["score"] < 1
    assert quantised["ratio"] == pytest.approx(quantised["score"] / plain["score"])


def test_a_setting_that_fails_is_shown_and_the_others_stay(model: Path, processes: Processes) -> None:
    processes.fails = {"arm_int4"}
    result = run(model, "--settings", "arm_int4,arm_int8")
    assert result.exit_code == 1
    assert "exit code 1: ValueError: no" in result.output
    assert "1.0050" in result.output
    processes.fails = {"bfloat16"}
    result = run(model)
    assert result.exit_code == 1
    assert "bfloat16: exit code 1" in result.output


@pytest.mark.parametrize(("chosen", "expected"), [(None, "portable"), ("sve", "sve")])
def test_attention_is_ours_off_arm(
    model: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch, chosen: str | None, expected: str
) -> None:
    monkeypatch.setattr(accuracy.host, "is_arm", lambda: False)
    monkeypatch.delenv("VLLM_ARM_ISA", raising=False)
    if chosen is not None:
        monkeypatch.setenv("VLLM_ARM_ISA", chosen)
    assert run(model, "--settings", "arm_int8").exit_code == 0
    assert [environment["VLLM_ARM_ISA"] for environment in processes.environments] == [expected] * 2


def test_settings_of_the_users_own() -> None:
    assert settings.select("arm_int8", ["awq=--model '/a folder'"]) == [
        settings.BASELINE,
        Setting("arm_int8", ("--quantization", "arm_int8")),
        Setting("awq", ("--model", "/a folder")),
    ]
    assert settings.select(None, []) == list(settings.TABLE)
    for names, own, message in (
        ("int3", [], "--settings: expected some of bfloat16, arm_int8, arm_int4, fp8-kv, int8-kv, got int3"),
        (None, ["awq"], "--setting: expected NAME=ARGUMENTS"),
        (None, ["fp8-kv=--kv-cache-dtype fp8"], "--setting: fp8-kv is there already"),
    ):
        with pytest.raises(ValueError, match=message):
            settings.select(names, own)


def test_how_answers_are_read(tmp_path: Path) -> None:
    candidates = [None, {7: SimpleNamespace(rank=3, logprob=-2.0), 4: SimpleNamespace(rank=1, logprob=-0.5)}]
    assert worker.best_tokens(candidates) == [4]
    assert worker.own_logprobs([1, 7], candidates) == [-2.0]
    assert report.common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert report.common_prefix([1, 2], [1, 2, 4]) == 2
    (tmp_path / "text").write_text("a b c d e")
    tokenizer = SimpleNamespace(encode=lambda text: [ord(word) for word in text.split()])
    questions = {"windows": 2, "length": 2, "text": str(tmp_path / "text")}
    assert worker.windows_of(tokenizer, questions) == [[97, 98], [99, 100]]
    with pytest.raises(ValueError, match="--windows: the text has 2 of 2 tokens"):
        worker.windows_of(tokenizer, questions | {"windows": 3})
