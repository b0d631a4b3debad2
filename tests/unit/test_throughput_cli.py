# SPDX-License-Identifier: Apache-2.0
"""The command line of the throughput benchmark, with the measured processes replaced."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from benchmarks import throughput
from benchmarks.serving import child
from benchmarks.serving.workload import Workload


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "a-model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


class Measured:
    """Stands in for the processes: what they were asked, and figures that depend on the switches."""

    def __init__(self) -> None:
        self.calls: list[tuple[Workload, dict[str, str]]] = []
        self.fails = False

    def __call__(self, workload: Workload, environment: Mapping[str, str], *_: Any) -> dict[str, Any]:
        self.calls.append((workload, dict(environment)))
        on = environment["VLLM_ARM_MIMALLOC"] == "1"
        if on and self.fails:
            raise child.ChildError("signal 4: no output")
        return {
            "seconds": 1.0 if on else 2.0,
            "requests": workload.num_prompts,
            "prompt_tokens": workload.num_prompts * workload.input_len,
            "output_tokens": workload.num_prompts * workload.output_len,
            "worker_page_faults": 3 if on else 3000,
            "worker_user_seconds": 1.5,
            "worker_system_seconds": 0.1,
            "worker_peak_bytes": 2**30,
        }


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    stand_in = Measured()
    monkeypatch.setattr(child, "run_workload", stand_in)
    return stand_in


def run(*arguments: str) -> Result:
    return CliRunner().invoke(throughput.main, arguments)


def test_steps_in_rounds_then_a_table_and_json(model: Path, measured: Measured, tmp_path: Path) -> None:
    command = (
        "--model",
        str(model),
        "--steps",
        "stock,mimalloc",
        "--num-prompts",
        "5",
        "--output",
        str(tmp_path / "out"),
    )
    result = run(*command, "--repeat", "2", "--", "--enforce-eager")
    assert result.exit_code == 0, result.output
    assert [environment["VLLM_ARM_MIMALLOC"] for _, environment in measured.calls] == ["0", "1", "1", "0"]
    assert measured.calls[0][0].engine_arguments == ("--enforce-eager",)
    assert "2.00x" in result.output
    (path,) = (tmp_path / "out").glob("a-model-*.json")
    content = json.loads(path.read_text())
    assert [(each["step"], each["round"]) for each in content["runs"]] == [
        ("stock", 0),
        ("mimalloc", 0),
        ("mimalloc", 1),
        ("stock", 1),
    ]
    assert content["workload"]["num_prompts"] == 5
    assert content["host"]["cpu"]
    assert content["host"]["doctor"]

    assert "4 of 6 runs are in" in run(*command, "--repeat", "3", "--", "--enforce-eager").output
    assert len(measured.calls) == 6
    run(*command, "--fresh", "--", "--enforce-eager")
    assert len(measured.calls) == 8


def test_steps_that_quantise(model: Path, measured: Measured, tmp_path: Path) -> None:
    command = ("--model", str(model), "--steps", "stock,int4", "--output", str(tmp_path / "out"))
    assert run(*command, "--", "--enforce-eager").exit_code == 0
    arguments = [workload.engine_arguments for workload, _ in measured.calls]
    assert arguments == [("--enforce-eager",), ("--enforce-eager", "--quantization", "arm_int4")]
    (model / "config.json").write_text('{"quantization_config": {}}')
    assert "--steps: expected some of" in run(*command).output


def test_a_failed_step_is_shown_and_makes_the_exit_code_1(model: Path, measured: Measured, tmp_path: Path) -> None:
    measured.fails = True
    result = run("--model", str(model), "--steps", "stock,mimalloc", "--output", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "signal 4: no output" in result.output
    assert "failed: mimalloc" in result.output


def test_all_rows_of_a_dataset(model: Path, measured: Measured, tmp_path: Path) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "a"}\n' * 3)
    command = ("--model", str(model), "--steps", "stock", "--output", str(tmp_path / "out"), "--dataset", str(dataset))
    assert run(*command).exit_code == 0
    assert measured.calls[0][0].num_prompts == 3
    assert run(*command, "--num-prompts", "2").exit_code == 0
    assert len(measured.calls[1][0].requests or ()) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing option '--model'"),
        (("--model", "./missing"), "--model: no folder ./missing"),
        (("--model", "a/b", "--steps", "fast"), "--steps: expected some of stock, mimalloc"),
        (("--model", "a/b", "--input-len", "0"), "--input-len"),
        (("latency", "--url", "http://127.0.0.1:1"), "--url: no vLLM server answers at http://127.0.0.1:1"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code in (1, 2)
    assert message in " ".join(result.output.split())


def test_help_names_both_modes() -> None:
    output = run("--help").output
    assert "offline" in output
    assert "latency" in output
