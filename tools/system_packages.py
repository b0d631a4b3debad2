# SPDX-License-Identifier: Apache-2.0
"""Install the Debian or Ubuntu packages that a task needs: ``python tools/system_packages.py build|emulation``.

Uses the standard library only, for it runs before anything is installed.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# Each package with a file of it, as a pattern.
PACKAGES = {
    "build": {
        "g++": "/usr/bin/g++",
        "binutils": "/usr/bin/readelf",
        "libnuma1": "/usr/lib/*/libnuma.so.1",
        "doctest-dev": "/usr/include/doctest/doctest.h",
    },
    "emulation": {
        "arch-test": "/usr/bin/arch-test",
        "clang-19": "/usr/bin/clang++-19",
        "g++-aarch64-linux-gnu": "/usr/bin/aarch64-linux-gnu-g++",
        "gcc": "/usr/bin/gcc",
        "lld-19": "/usr/bin/ld.lld-19",
        "llvm-19": "/usr/bin/llvm-mca-19",
        "mmdebstrap": "/usr/bin/mmdebstrap",
        "qemu-user": "/usr/bin/qemu-aarch64",
        "qemu-user-static": "/usr/bin/qemu-aarch64-static",
    },
}


def missing_packages(task: str) -> list[str]:
    """The packages of ``task`` that are not installed."""
    missing = [name for name, file in PACKAGES[task].items() if not list(Path("/").glob(file.lstrip("/")))]
    if task == "build":
        # Of this interpreter: Debian splits its headers and its virtual environments off.
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            missing.append(f"{version}-dev")
        if importlib.util.find_spec("ensurepip") is None:
            missing.append(f"{version}-venv")
    return missing


def install(task: str) -> None:
    """Install what ``task`` lacks where apt can do it; otherwise exit with a line that lists it."""
    missing = missing_packages(task)
    if not missing:
        return
    names = " ".join(missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.exit(f"setup: these system packages are missing, install them first: {names}")
    print(f"setup: installing {names}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing],
    ):
        if subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode:
            sys.exit(f"setup: '{' '.join(command)}' failed; install these packages by hand: {names}")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PACKAGES:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(PACKAGES)}")
    install(sys.argv[1])
