# SPDX-License-Identifier: Apache-2.0
"""The programs that counting and modelling need, and the plugin built beside QEMU for use in the guest."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

PLUGIN_SOURCE = Path(__file__).with_name("plugin") / "bbcount.c"
PLUGIN = "bbcount.so"
QEMU = "qemu-aarch64"
# Debian's and Ubuntu's packages by command. They install beside qemu-user-static.
PACKAGES = {QEMU: "qemu-user", "gcc": "gcc", "llvm-mc-19": "llvm-19", "llvm-mca-19": "llvm-19"}
# The first and the last major version that loads plugins of API 1.
QEMU_VERSIONS = (7, 8)
_LIBRARY = re.compile(r"(/\S+)")


@dataclass(frozen=True)
class Tools:
    """Paths of the programs."""

    qemu: Path
    gcc: Path
    llvm_mc: Path
    llvm_mca: Path


def find_tools() -> Tools:
    """The programs in PATH. Raises ``LookupError`` naming the packages to install, or the QEMU that is unfit."""
    found = {command: shutil.which(command) for command in PACKAGES}
    missing = sorted({PACKAGES[command] for command, path in found.items() if path is None})
    if missing:
        raise LookupError(f"missing packages: apt-get install {' '.join(missing)}")
    paths = {command: Path(path) for command, path in found.items() if path is not None}
    _check_qemu(paths[QEMU])
    return Tools(paths[QEMU], paths["gcc"], paths["llvm-mc-19"], paths["llvm-mca-19"])


def _check_qemu(qemu: Path) -> None:
    version = subprocess.run([qemu, "--version"], capture_output=True, text=True, check=True).stdout
    usage = subprocess.run([qemu, "--help"], capture_output=True, text=True, check=False).stdout
    if "-plugin" not in usage:
        raise LookupError(f"{qemu} takes no plugins: apt-get install {PACKAGES[QEMU]} (the dynamically linked QEMU)")
    match = re.search(r"version (\d+)", version)
    if match is None or not QEMU_VERSIONS[0] <= int(match[1]) <= QEMU_VERSIONS[1]:
        oldest, newest = QEMU_VERSIONS
        raise LookupError(f"{qemu} is {version.splitlines()[0]!r}, expected a version from {oldest} to {newest}")


def build_bundle(tools: Tools, folder: Path) -> None:
    """Fill ``folder`` with QEMU, the host's libraries that it needs, and the plugin, to be shown in the guest."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(tools.qemu, folder / QEMU)
    listing = subprocess.run(["ldd", tools.qemu], capture_output=True, text=True, check=True).stdout
    for library in _LIBRARY.findall(listing):
        shutil.copy(library, folder)
    options = ["-O2", "-shared", "-fPIC", "-pthread"]
    subprocess.run([tools.gcc, *options, "-o", folder / PLUGIN, PLUGIN_SOURCE], check=True)


def emulator_command(folder: str, counts: str) -> list[str]:
    """The command line, up to the program, that runs it in the guest under the plugin.

    ``folder`` is the bundle and ``counts`` the prefix of the plugin's files, both as the guest sees them.
    """
    return [
        *(f"{folder}/ld-linux-x86-64.so.2", "--library-path", folder, f"{folder}/{QEMU}"),
        *("-plugin", f"{folder}/{PLUGIN},out={counts}"),
    ]
