# SPDX-License-Identifier: Apache-2.0
"""The plugin's counts: basic blocks with their instruction words, and how often each was executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

Words = tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """A basic block's instruction words and its executions, at whatever addresses it stands."""

    words: Words
    executions: int

    @property
    def instructions(self) -> int:
        """Instructions executed in it."""
        return self.executions * len(self.words)


def parse_counts(lines: Iterable[str]) -> list[Block]:
    """Blocks of one region, equal ones added up, in an order that depends on nothing else.

    Raises ``ValueError`` with the line that is none.
    """
    executions: Counter[Words] = Counter()
    for line in lines:
        count, *words = line.split()
        if not words:
            raise ValueError(f"counts: expected 'executions word ...', found {line!r}")
        executions[tuple(int(word, 16) for word in words)] += int(count)
    blocks = [Block(words, count) for words, count in executions.items()]
    return sorted(blocks, key=lambda block: (-block.instructions, block.words))


def read_counts(path: Path) -> list[Block]:
    """``parse_counts`` of a file."""
    with path.open() as lines:
        return parse_counts(lines)


def total_instructions(blocks: Iterable[Block]) -> int:
    """Instructions executed in the region."""
    return sum(block.instructions for block in blocks)


def hottest(blocks: list[Block], share: float) -> Iterator[Block]:
    """The leading blocks that together make up more than ``share`` of the instructions."""
    enough = share * total_instructions(blocks)
    covered = 0
    for block in blocks:
        yield block
        covered += block.instructions
        if covered > enough:
            return
