# SPDX-License-Identifier: Apache-2.0
"""Measured processes: what they are given, how their progress and failures are told, and that none is left."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.serving import child, latency, worker
from benchmarks.serving.workload import Workload


def run(tmp_path: Path, code: str, timeout: float = 30, **environment: str) -> list[tuple[str, int, int]]:
    seen: list[tuple[str, int, int]] = []
    child.run([sys.executable, "-c", code], environment, tmp_path / "log", timeout, lambda *each: seen.append(each))
    return seen


def test_progress_is_told_and_the_rest_is_logged(tmp_path: Path) -> None:
    report = json.dumps({"phase": "measure", "done": 3, "total": 8})
    code = f"import os; print('hello', os.environ['COLOUR']); print({worker.PROGRESS!r}, {report!r})"
    assert run(tmp_path, code, COLOUR="green") == [("measure", 3, 8)]
    assert (tmp_path / "log").read_text() == "hello green\n"


def test_a_failure_gives_its_last_error_line(tmp_path: Path) -> None:
    code = "import sys; print('ValueError: too large'); print('shutting down'); sys.exit(3)"
    with pytest.raises(child.ChildError, match=r"exit code 3: ValueError: too large \(see .*log\)"):
        run(tmp_path, code)


def test_a_signal_is_named(tmp_path: Path) -> None:
    with pytest.raises(child.ChildError, match="signal 4: no output"):
        run(tmp_path, "import os; os.kill(os.getpid(), 4)")


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(child.ChildError, match="took longer than 1 s"):
        run(tmp_path, "import time; time.sleep(12345)", timeout=1)


def test_an_interrupted_run_leaves_no_process(tmp_path: Path) -> None:
    report = json.dumps({"phase": "measure", "done": 0, "total": 1})
    code = (
        "import subprocess, time\n"
        "subprocess.Popen(['sleep', '12345.25'])\n"
        f"print({worker.PROGRESS!r}, {report!r}, flush=True)\n"
        "time.sleep(12345)"
    )

    def interrupt(*_: object) -> None:
        assert sleeping()
        raise KeyboardInterrupt

    def sleeping() -> list[psutil.Process]:
        return [each for each in psutil.process_iter(["cmdline"]) if "12345.25" in (each.info["cmdline"] or [])]

    with pytest.raises(KeyboardInterrupt):
        child.run([sys.executable, "-c", code], {}, tmp_path / "log", 60, interrupt)
    assert not sleeping()


def test_the_specification(tmp_path: Path) -> None:
    specification, result = child.write_specification(tmp_path, Workload("m", 8, 4, 2, tensor_parallel_size=2))
    content = json.loads(specification.read_text())
    assert content["result"] == str(result)
    assert content["engine_arguments"][:4] == ["--model", "m", "--tensor-parallel-size", "2"]
    assert (content["profile"], content["import_path"]) == (False, "")


def test_a_profile_is_eager_with_the_timed_scheduler(tmp_path: Path) -> None:
    specification, _ = child.write_specification(tmp_path, Workload("m", 8, 4, 2), profile=True)
    arguments = json.loads(specification.read_text())["engine_arguments"]
    assert "--enforce-eager" in arguments
    assert "benchmarks.serving.timed_scheduler.make_scheduler" in arguments
    config = json.loads(arguments[arguments.index("--profiler-config") + 1])
    assert config["torch_profiler_dir"] == str(tmp_path / "traces")


def test_usage_of_a_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", "bytearray(64 << 20); input()"], stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 20
        while worker.peak_bytes(psutil.Process(process.pid)) < 64 << 20 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert worker.peak_bytes(psutil.Process(process.pid)) >= 64 << 20
        assert worker.usage(psutil.Process(process.pid))["page_faults"] > 100
    finally:
        process.kill()
        process.wait()


def test_the_client_of_the_latency_mode() -> None:
    load = latency.Load("http://127.0.0.1:1", "m", "t", 4, 16, 8, 2)
    arguments = load.arguments()
    assert arguments[arguments.index("--max-concurrency") + 1] == "4"
    assert arguments[arguments.index("--metric-percentiles") + 1] == "50,90,99"
    assert arguments[arguments.index("--dataset-name") + 1] == "random"
    with pytest.raises(child.ChildError, match="--url: no vLLM server answers at "):
        latency.served_model("http://127.0.0.1:1")
