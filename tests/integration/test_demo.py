# SPDX-License-Identifier: Apache-2.0
"""``make demo`` and ``make setup`` meet bad input with one clear line."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

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
