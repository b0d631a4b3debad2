# SPDX-License-Identifier: Apache-2.0
"""QEMU user emulation and the kernel's binfmt_misc handler that starts it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

BINFMT_DIRECTORY = Path("/proc/sys/fs/binfmt_misc")
# The start of every 64-bit little-endian Arm executable or shared object, and which bits count.
ELF_MAGIC = rb"\x7f\x45\x4c\x46\x02\x01\x01" + rb"\x00" * 9 + rb"\x02\x00\xb7\x00"
ELF_MASK = rb"\xff" * 7 + rb"\x00" + rb"\xff" * 8 + rb"\xfe\xff\xff\xff"
# O: pass the open file; P: keep argv[0]; F: open QEMU now, so that it is found inside a chroot.
HANDLER_FLAGS = "OPF"


def find_qemu() -> str | None:
    """Path of the statically linked QEMU for aarch64 programs, or None."""
    return shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


def qemu_version() -> str:
    """First line of QEMU's `--version`; LookupError when there is no QEMU."""
    qemu = find_qemu()
    if qemu is None:
        raise LookupError("qemu-aarch64-static is not installed")
    done = subprocess.run([qemu, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


def handler_is_registered(directory: Path = BINFMT_DIRECTORY) -> bool:
    """Whether the kernel already runs aarch64 programs by a QEMU that works inside a chroot."""
    entry = directory / "qemu-aarch64"
    if not entry.is_file():
        return False
    lines = entry.read_text().splitlines()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return "enabled" in lines and "F" in flags


def handler_line() -> str | None:
    """The line that registers QEMU for one user namespace; None where the host has a handler."""
    if handler_is_registered():
        return None
    qemu = find_qemu()
    if qemu is None:
        raise LookupError("qemu-aarch64-static is not installed")
    magic, mask = ELF_MAGIC.decode(), ELF_MASK.decode()
    return f":qemu-aarch64:M::{magic}:{mask}:{qemu}:{HANDLER_FLAGS}"
