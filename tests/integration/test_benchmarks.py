# SPDX-License-Identifier: Apache-2.0
"""The benchmarks as a user starts them, on the trained model and on small cases."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import components
from benchmarks.timing import allocator
from demo.server import Server
from tests.integration.serving import EAGER, FORCED, READY_SECONDS, TRAINED_MODEL

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = ("--input-len", "64", "--output-len", "8", "--num-prompts", "8")
ENGINE = ("--", *EAGER, "--kv-cache-memory-bytes", str(1 << 28))
# glibc and mimalloc differ by 400,000 to 1,000 faults under long prefills; this is a short one.
FEWER_FAULTS = 5


def run(script: str, *arguments: str, directory: Path, code: int = 0) -> str:
    """Run a benchmark from a folder that is not the project's; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def only_json(directory: Path) -> dict[str, Any]:
    (path,) = directory.glob("*.json")
    return dict(json.loads(path.read_text()))


def test_throughput_of_two_steps(tmp_path: Path) -> None:
    command = ("--model", str(TRAINED_MODEL), *SMALL, "--steps", "stock,mimalloc", "--output", "results", *ENGINE)
    printed = run("throughput.py", *command, directory=tmp_path)
    result = only_json(tmp_path / "results")
    runs = {each["step"]: each for each in result["runs"]}
    assert set(runs) == {"stock", "mimalloc"}
    for each in runs.values():
        assert (each["requests"], each["prompt_tokens"], each["output_tokens"]) == (8, 512, 64)
        assert each["seconds"] > 0
        assert each["worker_peak_bytes"] > 50 << 20
    assert runs["mimalloc"]["worker_page_faults"] * FEWER_FAULTS < runs["stock"]["worker_page_faults"]
    assert {check["section"] for check in result["host"]["doctor"]} >= {"CPU", "Kernels", "Allocator"}
    assert "+ mimalloc" in printed

    again = run("throughput.py", *command, directory=tmp_path)
    assert "2 of 2 runs are in" in again
    assert only_json(tmp_path / "results")["runs"] == result["runs"]


def test_a_model_that_cannot_be_loaded_fails_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{}")
    command = ("--model", str(tmp_path / "broken"), *SMALL, "--steps", "stock", "--output", "results")
    printed = run("throughput.py", *command, directory=tmp_path, code=1)
    assert "failed: stock" in printed
    assert "Error" in only_json(tmp_path / "results")["runs"][0]["error"]


def test_profile(tmp_path: Path) -> None:
    command = ("--model", str(TRAINED_MODEL), *SMALL, "--profile", "--steps", "norm", "--output", "results", *ENGINE)
    printed = run("throughput.py", *command, directory=tmp_path)
    (profile,) = only_json(tmp_path / "results")["profiles"].values()
    assert sum(profile["percent"].values()) == pytest.approx(100)
    expected = ("ATTENTION", "CACHE_WRITE", "NORMS", "SCHEDULER", "SAMPLING")
    assert {getattr(components, name) for name in expected} <= set(profile["seconds"])
    assert any(name.startswith("linear: ") for name in profile["seconds"])
    assert any(name.startswith("vllm_arm::") for name, _, _ in profile["operations"])
    # Were an operation's name to change, its time would move here.
    assert profile["percent"][components.OTHER] < 25
    assert "share of the worker's time" in printed


def test_latency(tmp_path: Path) -> None:
    arguments = (*EAGER, "--served-model-name", "tiny")
    with Server(TRAINED_MODEL, tmp_path / "server.log", arguments=arguments, environment=FORCED) as server:
        server.wait_until_ready(READY_SECONDS)
        command = ("latency", "--url", server.url, "--concurrency", "4", "--output", "results", *SMALL)
        printed = run("throughput.py", *command, directory=tmp_path)
    content = only_json(tmp_path / "results")
    assert content["load"]["concurrency"] == 4
    assert content["result"]["completed"] == 8
    for metric in ("ttft", "tpot"):
        p50, p90, p99 = (content["result"][f"p{number}_{metric}_ms"] for number in (50, 90, 99))
        assert 0 < p50 <= p90 <= p99
    assert "TTFT, time to first token" in printed


def test_kernels_of_one_case(tmp_path: Path) -> None:
    printed = run("kernels.py", "--op", "norm", "--case", "llama_decode_1", "--repeat", "2", directory=tmp_path)
    content = json.loads((tmp_path / "build/kernels.json").read_text())
    rows = {(each["impl"], each["isa"]): each for each in content["results"]}
    assert {("vllm_arm", "portable"), ("upstream", None), ("torch", None)} <= set(rows)
    assert all(each["seconds"] > 0 and each["max_error"] <= each["tolerance"] for each in rows.values())
    assert "norm/llama_decode_1" in printed


def test_mimalloc_speeds_an_mlp_up() -> None:
    comparison = allocator.compare(pairs=5)
    assert comparison.page_faults("mimalloc") * 50 < comparison.page_faults("glibc")
    # 1.36 to 1.48 over many runs, with and without other work on the machine.
    assert comparison.speed_up() >= 1.3
