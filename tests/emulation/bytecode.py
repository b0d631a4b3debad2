# SPDX-License-Identifier: Apache-2.0
"""Compile Python sources to bytecode ahead of time: under emulation that would be slow."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

# Bytecode is the same for all final releases of one minor version.
PROBE = "import sys; print(sys.version_info[:2] == (3, 13) and sys.version_info[3] == 'final')"
DISTURBING_VARIABLES = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONHOME", "PYTHONPATH")


def _candidates() -> Iterator[str]:
    if found := shutil.which("python3.13"):
        yield found
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    yield from map(str, sorted(pyenv.glob("versions/3.13*/bin/python3.13")))


def find_host_python() -> str | None:
    """A working final CPython 3.13 on this machine, or None."""
    for candidate in _candidates():
        probe = subprocess.run([candidate, "-c", PROBE], capture_output=True, check=False)
        if probe.returncode == 0 and probe.stdout.strip() == b"True":
            return candidate
    return None


def compile_on_host(python: str, directories: Sequence[Path], host_prefix: Path, guest_prefix: str) -> None:
    """Write `__pycache__` below `directories`, naming the sources as the guest sees them.

    `host_prefix`, a folder of this machine, is the guest's `guest_prefix`. Files that do not
    compile (templates, tests of other versions) are passed over.
    """
    kept = {name: value for name, value in os.environ.items() if name not in DISTURBING_VARIABLES}
    command = [python, "-m", "compileall", "-qq", "-j0", "-s", str(host_prefix)]
    command += ["-p", guest_prefix]
    subprocess.run([*command, *map(str, directories)], env=kept, check=False, stdout=subprocess.DEVNULL)
