# SPDX-License-Identifier: Apache-2.0
"""``make setup``: the system packages that a build needs, and a virtual environment with everything pinned.

Uses the standard library only, for it runs before anything is installed.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import system_packages

PROJECT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ("core", "vllm", "build", "test")
PYTHON_VERSIONS = ((3, 11), (3, 12), (3, 13))


def fail(message: str) -> None:
    """End with one line that says what is wrong and what to do."""
    sys.exit(f"setup: {message}")


def pip(venv: Path, *arguments: str) -> None:
    """Run the environment's pip quietly."""
    command = [str(venv / "bin/python"), "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode:
        print(result.stdout, file=sys.stderr)
        fail(f"pip failed: {' '.join(arguments)}")


def make_environment(venv: Path) -> None:
    """Create the virtual environment and install the pinned requirements into it."""
    if not (venv / "bin/python").exists():
        result = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, check=False)
        if result.returncode:
            fail(f"cannot make {venv}: install the package python3-venv")
    files = [argument for name in REQUIREMENTS for argument in ("-r", f"requirements/{name}.txt")]
    # torch's CPU build is not on the public index: TORCH_INDEX names an index that has it.
    index = os.environ.get("TORCH_INDEX")
    extra = ["--extra-index-url", index] if index else []
    print("setup: installing pinned requirements (a minute or two)", flush=True)
    pip(venv, "install", "--quiet", "--no-deps", *extra, *files)
    if subprocess.run([str(venv / "bin/python"), "-c", "import torch"], capture_output=True, check=False).returncode:
        fail(
            "torch does not load: this index gave a CUDA build. Set TORCH_INDEX to PyTorch's index "
            "of CPU wheels and run 'make clean setup'"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path, help="folder of the virtual environment")
    arguments = parser.parse_args()
    started = time.monotonic()
    if sys.version_info[:2] not in PYTHON_VERSIONS:
        fail(f"this is Python {sys.version.split()[0]}, expected 3.11, 3.12 or 3.13: make PYTHON=python3.11")
    os.chdir(PROJECT)
    system_packages.install("build")
    make_environment(arguments.venv)
    print(f"setup: {arguments.venv} is ready after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
