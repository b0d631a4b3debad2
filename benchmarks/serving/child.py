# SPDX-License-Identifier: Apache-2.0
"""Runs one measured process: starts it, follows its progress, and leaves nothing of it behind."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.serving import worker
from benchmarks.serving.workload import SEED, Workload
from demo.server import session_processes

PROJECT = Path(__file__).resolve().parents[2]
Progress = Callable[[str, int, int], None]
"""Takes a phase, how many of its requests are done, and of how many."""

_STOP_SECONDS = 20


class ChildError(Exception):
    """A measured process failed; the message is one line for a user."""


def write_specification(directory: Path, workload: Workload, *, profile: bool = False) -> tuple[Path, Path]:
    """Write what the measured process reads; return the paths of that file and of its result."""
    arguments = workload.arguments()
    if profile:
        config = {
            "profiler": "torch",
            "torch_profiler_dir": str(directory / "traces"),
            "torch_profiler_with_stack": False,
            "ignore_frontend": True,
        }
        scheduler = "benchmarks.serving.timed_scheduler.make_scheduler"
        arguments += ["--enforce-eager", "--profiler-config", json.dumps(config), "--scheduler-cls", scheduler]
    result = directory / "result.json"
    specification = directory / "specification.json"
    specification.write_text(
        json.dumps(
            {
                "engine_arguments": arguments,
                "requests": workload.requests,
                "seed": SEED,
                "input_len": workload.input_len,
                "output_len": workload.output_len,
                "num_prompts": workload.num_prompts,
                "warmups": workload.warmups,
                "profile": profile,
                "import_path": str(PROJECT) if profile else "",
                "result": str(result),
            }
        )
    )
    return specification, result


def run_workload(
    workload: Workload,
    environment: Mapping[str, str],
    log: Path,
    timeout: float,
    progress: Progress,
    profile_directory: Path | None = None,
) -> dict[str, Any]:
    """Run ``workload`` in a fresh process under ``environment`` and return what it measured.

    ``profile_directory`` asks for a profile and takes the traces. Raises ``ChildError`` where the process fails or
    takes longer than ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="throughput-") as temporary:
        directory = profile_directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        specification, result = write_specification(directory, workload, profile=profile_directory is not None)
        result.unlink(missing_ok=True)
        command = [sys.executable, "-P", worker.__file__, str(specification)]
        run(command, environment, log, timeout, progress)
        return dict(json.loads(result.read_text()))


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    timeout: float,
    progress: Progress = lambda phase, done, total: None,
) -> None:
    """Run ``command`` in a session of its own, its output in ``log``. Raises ``ChildError`` as above."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w", encoding="utf-8") as output,
        _started(command, {**os.environ, "VLLM_NO_USAGE_STATS": "1", **environment}) as process,
    ):
        lines = _lines_of(process)
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ChildError(f"took longer than {timeout:.0f} s (see {log})") from None
            if line is None:
                break
            _take(line, output, progress)
        code = process.wait()
    if code:
        raise ChildError(f"{_reason(log, code)} (see {log})")


def _lines_of(process: subprocess.Popen[str]) -> "queue.Queue[str | None]":
    """What ``process`` prints, line by line, then None once it has ended: its descendants may hold the pipe open."""
    lines: queue.Queue[str | None] = queue.Queue()
    assert process.stdout is not None

    def read(stream: IO[str]) -> None:
        with contextlib.suppress(ValueError):  # closed under us: the process was ended
            for line in stream:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, args=(process.stdout,), daemon=True).start()
    return lines


def _take(line: str, output: IO[str], progress: Progress) -> None:
    if line.startswith(worker.PROGRESS):
        report = json.loads(line.removeprefix(worker.PROGRESS))
        progress(report["phase"], report["done"], report["total"])
    else:
        output.write(line)
        output.flush()


def _reason(log: Path, code: int) -> str:
    """Why a process that ended with ``code`` did: its last error line, for vLLM logs the true one before others."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{ended}: {errors[-1] if errors else lines[-1] if lines else 'no output'}"


@contextlib.contextmanager
def _started(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end_session(process)


def _end_session(process: subprocess.Popen[str]) -> None:
    """End every process of the session, wherever their parents are. Those of one that ended by itself may finish."""
    members = session_processes(process.pid)
    if process.poll() is None:
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.terminate()
    _, alive = psutil.wait_procs(members, timeout=_STOP_SECONDS)
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(alive, timeout=_STOP_SECONDS)
    process.wait()
