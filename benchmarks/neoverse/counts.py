# SPDX-License-Identifier: Apache-2.0
"""The plugin's counts: basic blocks with their instruction words, and how often each was executed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

Words = tuple[int, ...]

# Of A64's branches, exceptions and system instructions; execution goes on to the next address after any other.
_GROUP, _BRANCHES = 0x1C000000, 0x14000000


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

    QEMU ends a block at the end of a page too, as no core does: it is joined to the one that follows it there.

    Raises ``ValueError`` with the line that is none.
    """
    counted: defaultdict[int, Counter[Words]] = defaultdict(Counter)
    for line in lines:
        count, *numbers = line.split()
        if len(numbers) < 2:
            raise ValueError(f"counts: expected 'executions address word ...', found {line!r}")
        address, *words = (int(number, 16) for number in numbers)
        counted[address][tuple(words)] += int(count)
    _join(counted)
    executions: Counter[Words] = Counter()
    for at_address in counted.values():
        executions.update(at_address)
    blocks = [Block(words, count) for words, count in executions.items() if count > 0]
    return sorted(blocks, key=lambda block: (-block.instructions, block.words))


def _join(counted: dict[int, Counter[Words]]) -> None:
    # From the end, so that what is joined may have been joined itself.
    for address in sorted(counted, reverse=True):
        for words, count in list(counted[address].items()):
            after = counted.get(address + 4 * len(words), Counter())
            if words[-1] & _GROUP == _BRANCHES or len(after) != 1:
                continue
            [(next_words, next_count)] = after.items()
            if next_count >= count:
                del counted[address][words]
                counted[address][words + next_words] += count
                after[next_words] -= count


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
