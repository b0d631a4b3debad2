# SPDX-License-Identifier: Apache-2.0
"""Instruction words to assembly, by llvm-mc."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

_INVALID = re.compile(r"^<stdin>:(\d+):\d+: warning: (?:invalid|potentially undefined) instruction encoding")
_SVE_REGISTER = re.compile(r"\b(?:z\d+|p\d+)\b")
_SVE_MNEMONIC = re.compile(r"(?:cnt|inc|dec|sqinc|uqinc|sqdec|uqdec)[bhwd]\b|addvl\b|addpl\b|rdvl\b")


class Disassembler:
    """Assembly of instruction words; each is asked of llvm-mc once."""

    def __init__(self, llvm_mc: Path) -> None:
        self._llvm_mc = llvm_mc
        self._texts: dict[int, str | None] = {}

    @cached_property
    def version(self) -> str:
        """LLVM's version, for instance ``19.1.7``."""
        done = subprocess.run([self._llvm_mc, "--version"], capture_output=True, text=True, check=True)
        match = re.search(r"LLVM version (\S+)", done.stdout)
        return match[1] if match else "unknown"

    def learn(self, words: Iterable[int]) -> None:
        """Disassemble the words that are new, in one go."""
        new = sorted(set(words) - self._texts.keys())
        self._texts.update(self._decode(new))

    def text(self, word: int) -> str | None:
        """The instruction, or None where LLVM knows none."""
        if word not in self._texts:
            self.learn([word])
        return self._texts[word]

    def _decode(self, words: list[int]) -> dict[int, str | None]:
        if not words:
            return {}
        source = "\n".join(" ".join(f"0x{byte:02x}" for byte in word.to_bytes(4, "little")) for word in words)
        command = [str(self._llvm_mc), "-disassemble", "-triple=aarch64", "-mattr=+all"]
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        return dict(zip(words, parse_disassembly(done.stdout, done.stderr, len(words)), strict=True))


def parse_disassembly(output: str, warnings: str, count: int) -> list[str | None]:
    """Match llvm-mc's lines to its ``count`` input lines, with None where it warned that a line is no instruction."""
    invalid = {int(match[1]) for line in warnings.splitlines() if (match := _INVALID.match(line))}
    lines = (re.sub(r"\s+", " ", line.split("//")[0]).strip() for line in output.splitlines())
    texts = [line for line in lines if line and not line.startswith(".")]
    if len(texts) != count - len(invalid):
        raise ValueError(f"llvm-mc: expected {count - len(invalid)} instructions, found {len(texts)}")
    found = iter(texts)
    return [None if number in invalid else next(found) for number in range(1, count + 1)]


def is_sve(text: str) -> bool:
    """Whether the instruction depends on the SVE vector length."""
    return bool(_SVE_MNEMONIC.match(text) or _SVE_REGISTER.search(text))
