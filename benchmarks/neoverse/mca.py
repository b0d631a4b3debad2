# SPDX-License-Identifier: Apache-2.0
"""Cycles of basic blocks in LLVM's core models, by llvm-mca, kept between runs."""

from __future__ import annotations

import re
import sqlite3
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.neoverse.assembly import Disassembler
from benchmarks.neoverse.cores import Core
from benchmarks.neoverse.counts import Block, Words, hottest, total_instructions

ITERATIONS = 200
# Blocks below this share of the instructions are taken to cost what the rest does per instruction.
COVERAGE = 0.97
BLOCKS_PER_PROCESS = 50
PROCESSES = 2
# What ends a block by leaving it for the kernel; llvm-mca has no price for it.
_TRAP = re.compile(r"(?:svc|brk|hlt)\b")
_REGION = re.compile(r"^\[\d+\] Code Region - (\d+)\n(?:.*\n)*?Total Cycles:\s+(\d+)$", re.MULTILINE)


class Model:
    """LLVM's models of the cores, asked through llvm-mca and remembered in the SQLite file ``cache``."""

    def __init__(self, llvm_mca: Path, disassembler: Disassembler, cache: Path) -> None:
        self._llvm_mca = llvm_mca
        self.disassembler = disassembler
        cache.parent.mkdir(parents=True, exist_ok=True)
        self._cache = sqlite3.connect(cache, timeout=60)
        with self._cache:
            self._cache.execute(
                "CREATE TABLE IF NOT EXISTS cycles (core TEXT, words BLOB, cycles REAL, UNIQUE (core, words))"
            )

    def learn(self, regions: Iterable[Sequence[Block]], core: Core, advance: Callable[[int, int], None]) -> None:
        """Price every block that ``cycles`` of these regions will need; ``advance(done, total)`` follows it."""
        wanted = {block.words for region in regions for block in hottest(list(region), COVERAGE)}
        missing = sorted(words for words in wanted if self._known(words, core) is None)
        self.disassembler.learn(word for words in missing for word in words)
        done = 0
        with ThreadPoolExecutor(PROCESSES) as pool:
            chunks = [missing[i : i + BLOCKS_PER_PROCESS] for i in range(0, len(missing), BLOCKS_PER_PROCESS)]
            bodies = [[self._body(words) for words in chunk] for chunk in chunks]
            for chunk, prices in zip(chunks, pool.map(lambda each: self.price(each, core), bodies), strict=True):
                self._remember(zip(chunk, prices, strict=True), core)
                done += len(chunk)
                advance(done, len(missing))

    def cycles(self, region: Sequence[Block], core: Core) -> float:
        """Modelled cycles of a region: executions times cycles of its hot blocks, scaled to all instructions."""
        hot = list(hottest(list(region), COVERAGE))
        if any(self._known(block.words, core) is None for block in hot):
            self.learn([region], core, lambda done, total: None)
        covered = total_instructions(hot)
        cycles = sum(block.executions * (self._known(block.words, core) or 0) for block in hot)
        return cycles * total_instructions(region) / covered

    def price(self, bodies: Sequence[Sequence[str]], core: Core) -> list[float]:
        """Cycles per iteration of each body of assembly, repeated without end and hitting the L1 cache.

        Raises ``RuntimeError`` with llvm-mca's words where it cannot tell.
        """
        regions = [
            f"# LLVM-MCA-BEGIN {number}\n" + "\n".join(body) + f"\n# LLVM-MCA-END {number}\n"
            for number, body in enumerate(bodies)
            if body
        ]
        command = [str(self._llvm_mca), "-mtriple=aarch64", f"-mcpu={core.llvm}", "-mattr=+all"]
        command += [f"-iterations={ITERATIONS}", "-all-views=false", "-summary-view"]
        # N1's table has no atomic read-modify-writes: they cost nothing there.
        command += ["-skip-unsupported-instructions=lack-sched"]
        done = subprocess.run(command, input="".join(regions), capture_output=True, text=True, check=False)
        cycles = {int(number): int(total) / ITERATIONS for number, total in _REGION.findall(done.stdout)}
        if done.returncode or (regions and not cycles):
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            raise RuntimeError(f"llvm-mca: {errors[0] if errors else done.stderr.strip()[-200:]}")
        return [cycles.get(number, 0.0) for number in range(len(bodies))]

    def _body(self, words: Words) -> list[str]:
        texts = (self.disassembler.text(word) for word in words)
        return [text for text in texts if text is not None and not _TRAP.match(text)]

    def _known(self, words: Words, core: Core) -> float | None:
        row = self._cache.execute(
            "SELECT cycles FROM cycles WHERE core = ? AND words = ?", (self._core_key(core), _encode(words))
        ).fetchone()
        return None if row is None else float(row[0])

    def _remember(self, prices: Iterable[tuple[Words, float]], core: Core) -> None:
        rows = [(self._core_key(core), _encode(words), cycles) for words, cycles in prices]
        with self._cache:
            self._cache.executemany("INSERT OR REPLACE INTO cycles VALUES (?, ?, ?)", rows)

    def _core_key(self, core: Core) -> str:
        return f"{core.llvm} LLVM {self.disassembler.version}"


def _encode(words: Words) -> bytes:
    return b"".join(word.to_bytes(4, "little") for word in words)
