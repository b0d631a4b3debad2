# SPDX-License-Identifier: Apache-2.0
"""Reading the plugin's counts and llvm-mc's assembly."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.neoverse.assembly import Disassembler, is_sve, parse_disassembly
from benchmarks.neoverse.counts import Block, hottest, parse_counts, total_instructions
from tests.unit.cycles_helpers import FAKE_LLVM_MC, write_program


def test_equal_blocks_are_added_and_order_does_not_depend_on_the_file() -> None:
    lines = ["3 1000 0000000a 0000000b", "1 2000 0000000c", "4 3000 0000000a 0000000b", "1 4000 00000001"]
    blocks = parse_counts(lines)
    assert blocks == parse_counts(reversed(lines))
    assert blocks == [Block((10, 11), 7), Block((1,), 1), Block((12,), 1)]
    assert total_instructions(blocks) == 16


RETURN = 0xD65F03C0


def test_a_block_that_ends_with_its_page_is_joined_to_the_next() -> None:
    lines = ["5 ff8 a b", f"7 1000 c {RETURN:x}"]
    assert parse_counts(lines) == [Block((10, 11, 12, RETURN), 5), Block((12, RETURN), 2)]


def test_blocks_are_joined_in_chains_and_not_after_branches() -> None:
    assert parse_counts(["4 ffc a", "4 1000 b", "4 1004 c"]) == [Block((10, 11, 12), 4)]
    apart = [f"5 ff8 a {RETURN:x}", "7 1000 b"]
    assert parse_counts(apart) == [Block((10, RETURN), 5), Block((11,), 7)]


def test_blocks_are_left_where_it_is_not_known_what_followed() -> None:
    assert len(parse_counts(["5 ffc a", "3 1000 b", "3 1000 b c"])) == 3, "two blocks of different length"
    assert len(parse_counts(["5 ffc a", "3 1000 b"])) == 2, "the count began in between"


@pytest.mark.parametrize("line", ["7", "7 0000000a", "x 10 0000000a", "7 10 zz"])
def test_what_is_no_block_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"expected|invalid literal"):
        parse_counts([line])


def test_the_hottest_blocks_cover_the_share() -> None:
    blocks = [Block((1,), 90), Block((2,), 8), Block((3,), 2)]
    assert list(hottest(blocks, 0.5)) == blocks[:1]
    assert list(hottest(blocks, 0.97)) == blocks[:2]
    assert list(hottest(blocks, 0.98)) == blocks, "more than the share, not as much"


def test_assembly_is_matched_to_words_around_those_that_are_none(tmp_path: Path) -> None:
    disassembler = Disassembler(write_program(tmp_path / "llvm-mc", FAKE_LLVM_MC))
    disassembler.learn([4, 3, 2])
    assert [disassembler.text(word) for word in (2, 3, 4)] == ["nop #2", None, "nop #4"]
    assert disassembler.text(6) == "nop #6", "one that was not announced"
    assert disassembler.version == "19.0.0"


def test_a_line_too_few_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected 2 instructions, found 1"):
        parse_disassembly("nop\n", "", 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ld1w { z0.s }, p0/z, [x0]", True),
        ("whilelo p0.b, x1, x2", True),
        ("cntd x3", True),
        ("incb x3, all, mul #4", True),
        ("bfmmla v0.4s, v1.8h, v2.8h", False),
        ("cnt v0.8b, v1.8b", False),
        ("add x0, x1, x2", False),
    ],
)
def test_sve_is_told_by_its_registers(text: str, expected: bool) -> None:
    assert is_sve(text) is expected
