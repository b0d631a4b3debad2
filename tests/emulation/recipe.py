# SPDX-License-Identifier: Apache-2.0
"""How the Arm root is made, step by step. Everything heavy runs natively on the host."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .apt_sources import find_debian_mirror
from .bytecode import compile_on_host, find_host_python
from .cuda_stubs import write_cuda_stubs
from .debian_packages import SUITE, unpack
from .guest import ArmRoot
from .install import SYSTEM_SITE, install_into
from .launcher import Bind

DEBIAN_SUITE = "trixie"
GUEST_PACKAGES = (
    # CPython and what the wheels link to
    *("python3", "libpython3.13", "libstdc++6", "libgomp1", "libnuma1", "ca-certificates"),
    # a shell and the usual tools; util-linux has lscpu, which vLLM calls
    *("bash", "dash", "coreutils", "grep", "sed", "procps", "passwd", "util-linux", "numactl"),
    # headers and start files: the root is also the sysroot of cross builds
    *("libc6-dev", "linux-libc-dev", "libgcc-14-dev", "libstdc++-14-dev", "libpython3.13-dev"),
)
# Headers and libraries for cross builds that Debian has for arm64 in its development suite only.
DEVELOPMENT_PACKAGES = ("libdnnl-dev", "libkleidiai-dev")
PASSWD = "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000:user:/home/user:/bin/bash\n"
GROUP = "root:x:0:\nuser:x:1000:\n"
HOST_COMMANDS = {
    "mmdebstrap": "mmdebstrap",
    "arch-test": "arch-test",
    "unshare": "util-linux",
    "aarch64-linux-gnu-gcc": "g++-aarch64-linux-gnu",
}
# Runs in the guest at the end: what was built must work before it is kept.
SELF_TEST = """
import importlib.util, platform, sys
import numpy
assert platform.machine() == "aarch64", platform.machine()
assert sys.version_info[:2] == (3, 13), sys.version
print(f"Python {platform.python_version()}, numpy {numpy.__version__}")
"""
# Imports what start-up needs, so that the interpreter writes its bytecode.
WARM_UP = "import torch, transformers, vllm, vllm.entrypoints.openai.api_server"

Report = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """The inputs of a root: Debian's mirror (None: as apt has it) and the pinned distributions."""

    mirror: str | None
    pins: Sequence[str]

    def steps(self) -> list[tuple[str, Callable[[Path, Report], None]]]:
        """Title and function of each step; each takes the root and a function for remarks."""
        return [
            (f"unpack Debian {DEBIAN_SUITE} for arm64", self.unpack_debian),
            (f"unpack {', '.join(DEVELOPMENT_PACKAGES)} of Debian {SUITE}", self.unpack_development_packages),
            (f"unpack {len(self.pins)} Python distributions", self.unpack_wheels),
            ("write stubs for the CUDA libraries", self.write_stubs),
            ("compile Python to bytecode", self.compile_python),
            ("check that it runs", self.check),
        ]

    def unpack_debian(self, root: Path, report: Report) -> None:
        """Unpack packages without configuring them: seconds, where emulation takes minutes."""
        mirror = self.mirror or find_debian_mirror()
        # In a mount namespace of its own, so that an interrupted run leaves nothing mounted.
        command = ["unshare", "--mount", "mmdebstrap", "--quiet", "--mode=root"]
        command += ["--architectures=arm64", "--variant=extract"]
        command += [f"--include={','.join(GUEST_PACKAGES)}", DEBIAN_SUITE, str(root)]
        _run([*command, f"deb {mirror} {DEBIAN_SUITE} main"])
        for directory in ("dev", "mnt", "opt", "proc", "root", "run", "sys", "home/user"):
            (root / directory).mkdir(parents=True, exist_ok=True)
        os.chown(root / "home/user", 1000, 1000)
        # The packages' own scripts would have made these.
        for path, text in (("etc/passwd", PASSWD), ("etc/group", GROUP)):
            (root / path).write_text(text)
        shell = root / "usr/bin/sh"
        shell.unlink(missing_ok=True)
        shell.symlink_to("dash")
        # Downloads are of no further use, and a third of Debian's part.
        for directory in ("var/cache/apt", "var/lib/apt", "usr/share/doc", "usr/share/locale"):
            shutil.rmtree(root / directory, ignore_errors=True)

    def unpack_development_packages(self, root: Path, report: Report) -> None:
        """Unpack libraries that are built for a newer Debian; their needs are met by this one."""
        with tempfile.TemporaryDirectory() as scratch:
            report(", ".join(unpack(DEVELOPMENT_PACKAGES, self.mirror or find_debian_mirror(), root, Path(scratch))))

    def unpack_wheels(self, root: Path, report: Report) -> None:
        """Unpack the pinned wheels for aarch64 where Debian keeps Python packages."""
        install_into(root / SYSTEM_SITE, root / "usr/bin", self.pins)

    def write_stubs(self, root: Path, report: Report) -> None:
        """Stand in for CUDA, which the aarch64 torch wheel links to."""
        written = write_cuda_stubs(root / SYSTEM_SITE / "torch" / "lib")
        report(f"{len(written)} stubs")

    def compile_python(self, root: Path, report: Report) -> None:
        """Compile with a host CPython 3.13; else let the guest compile what start-up imports."""
        if python := find_host_python():
            report(f"with {python}")
            directories = [root / SYSTEM_SITE, root / "usr/lib/python3.13"]
            compile_on_host(python, directories, root, "/")
            return
        report("no CPython 3.13 on this machine: the guest compiles what it imports, slowly")
        writable = Bind(host=str(root / "usr/lib"), guest="/usr/lib", read_only=False)
        ArmRoot(root, binds=[writable]).run(
            ["python3.13", "-c", WARM_UP],
            env={"PYTHONDONTWRITEBYTECODE": "", "VLLM_TARGET_DEVICE": "cpu"},
        )

    def check(self, root: Path, report: Report) -> None:
        """Start the guest's Python."""
        report(ArmRoot(root).run(["python3.13", "-c", SELF_TEST]).stdout.strip())


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise RuntimeError(f"{command[0]} failed ({done.returncode}): {tail}")


def missing_prerequisites() -> str | None:
    """One sentence on what keeps this machine from building or running a root, or None."""
    if not sys.platform.startswith("linux") or os.uname().machine != "x86_64":
        return "the emulated Arm server needs x86-64 Linux (an Arm host runs the tests natively)"
    packages = {package for command, package in HOST_COMMANDS.items() if shutil.which(command) is None}
    if not (shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")):
        packages.add("qemu-user-static")
    if packages:
        return f"missing packages: apt-get install {' '.join(sorted(packages))}"
    if os.geteuid() != 0:
        return "the emulated Arm server needs root privileges (chroot and mounts)"
    return None
