# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what the modelled cycles need: a figure, and LLVM's two programs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.neoverse.measure import Record

RECORD = Record(
    op="norm",
    case="rows",
    impl="vllm_arm",
    isa="neon",
    core="V2",
    instructions=5000,
    cycles=1000,
    peak_fraction=0.5,
    ratio_to_upstream=0.8,
    max_error=1e-3,
    correct=True,
    multiply_accumulates_per_cycle=0.0,
    required_bytes=4000,
    accessed_bytes=6000,
    bytes_per_cycle=4.0,
    bound="memory",
)

# Words are named after themselves; odd ones are no instructions.
FAKE_LLVM_MC = """
import sys
if "--version" in sys.argv:
    print("LLVM version 19.0.0")
    sys.exit()
for number, line in enumerate(sys.stdin, 1):
    word = int.from_bytes(bytes(int(byte, 16) for byte in line.split()), "little")
    if word % 2:
        print(f"<stdin>:{number}:1: warning: invalid instruction encoding", file=sys.stderr)
    else:
        print(f"\\tnop\\t#{word} // a comment")
"""

# Each line of a region takes a cycle, and the first iteration 3 more.
FAKE_LLVM_MCA = """
import re, sys
iterations = int(next(a for a in sys.argv if a.startswith("-iterations=")).split("=")[1])
text = sys.stdin.read()
if "bad" in text:
    sys.exit("error: bad instruction")
open(LOG, "a").write("x")
regions = re.findall(r"# LLVM-MCA-BEGIN (\\d+)\\n(.*?)\\n# LLVM-MCA-END", text, re.S)
for place, (name, body) in enumerate(regions):
    cycles = iterations * len(body.splitlines()) + 3
    print(f"\\n[{place}] Code Region - {name}\\n\\nIterations:        {iterations}\\nTotal Cycles:      {cycles}\\n")
"""


def record(**changes: object) -> Record:
    """A figure with some fields changed."""
    return replace(RECORD, **changes)  # type: ignore[arg-type]


def write_program(path: Path, source: str) -> Path:
    """An executable Python program."""
    path.write_text(f"#!{sys.executable}\n{source}")
    path.chmod(0o755)
    return path
