# SPDX-License-Identifier: Apache-2.0
"""``make demo`` and ``make setup`` meet bad input with one clear line."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

PROJECT = Path(__file__).resolve().parents[2]
UNSUPPORTED_PYTHONS = ("python3.9", "python3.10", "python3.14")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=60)


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "demo", *arguments)


def test_a_busy_port_is_one_line() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        result = demo("--port", str(port))
    assert result.returncode == 1
    assert result.stderr.strip() == f"Error: port {port} cannot be used: Address already in use; choose another"


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    result = demo("--model", str(tmp_path / "none"))
    assert result.returncode == 1
    assert result.stderr.strip() == f"Error: no model at {tmp_path}/none: expected a folder with config.json"


def test_a_model_that_vllm_cannot_load_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = demo("--model", str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith("Error: the server ended while starting: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["starting", "answering"])
def test_kill_9_of_the_server_leaves_nothing(moment: str) -> None:
    shared_memory: set[str] = set()
    command = [sys.executable, "-m", "demo", "--requests", "100000", "--tokens", "256"]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        if moment == "answering":
            # Said between the first request and the benchmark.
            assert any(line.startswith("streaming") for line in running.stdout)
        server = wait_for_server(running.pid, least=4 if moment == "answering" else 3)
        family = [server, *server.children(recursive=True)]
        for process in family:
            shared_memory |= {m.path for m in process.memory_maps(grouped=True) if m.path.startswith("/dev/shm/")}
        server.kill()
        _, errors = running.communicate(timeout=120)
    assert running.returncode == 1
    assert errors.startswith("Error: the server ") and errors.count("\n") == 1, errors
    assert not [process for process in family if process.is_running()]
    assert not [path for path in shared_memory if Path(path).exists()]


def wait_for_server(parent: int, least: int) -> psutil.Process:
    """The demo's ``vllm serve``, once it and its descendants are ``least`` processes."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        for child in psutil.Process(parent).children():
            if "serve" in child.cmdline() and 1 + len(child.children(recursive=True)) >= least:
                return child
        time.sleep(0.2)
    pytest.fail(f"no server with {least} processes below the demo")


def test_an_unsupported_python_is_one_line(tmp_path: Path) -> None:
    found = next((path for name in UNSUPPORTED_PYTHONS if (path := working_python(name))), None)
    if found is None:
        pytest.skip("no Python outside 3.11 to 3.13 on this machine")
    result = run(found, "tools/setup_environment.py", str(tmp_path / "venv"))
    assert result.returncode == 1
    assert result.stderr.startswith("setup: this is Python 3.")
    assert result.stderr.strip().endswith("expected 3.11, 3.12 or 3.13: make PYTHON=python3.11")
    assert result.stderr.count("\n") == 1


def working_python(name: str) -> str | None:
    """Path of the interpreter ``name``; pyenv's stand-ins for versions that are not selected do not count."""
    pyenv = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/*/bin/{name}"))
    candidates = [str(path) for path in pyenv] + [path for path in [shutil.which(name)] if path]
    for path in candidates:
        if subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
            return path
    return None
