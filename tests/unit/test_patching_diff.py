# SPDX-License-Identifier: Apache-2.0
"""Diffs are parsed strictly and applied exactly."""

import difflib

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.patching_helpers import ANSWERS, INNER, SOURCES, diff_of
from vllm_arm.patching.diff import PatchError, apply_hunks, parse_diff, split_lines

# Few different lines, so that a hunk would fit in several places; odd characters, which are not
# ends of lines to diff.
LINES = st.lists(st.sampled_from(["", "a", "b", "    c", "\x0c", "é", "-x", "+y", "--- z"]), min_size=1)


def unified(before: list[str], after: list[str], context: int) -> str:
    lines = [[line + "\n" for line in side] for side in (before, after)]
    return "".join(difflib.unified_diff(*lines, "a/vllm/x.py", "b/vllm/x.py", n=context))


def joined(lines: list[str]) -> str:
    return "".join(line + "\n" for line in lines)


@given(LINES, LINES, st.integers(1, 3))
def test_applying_a_diff_gives_the_other_text(before, after, context):
    diff = unified(before, after, context)
    assume(diff)
    (file,) = parse_diff(diff)
    assert apply_hunks(file.hunks, joined(before)) == joined(after)


@given(LINES, LINES, st.data())
def test_a_text_that_differs_in_a_line_of_a_hunk_is_refused(before, after, data):
    diff = unified(before, after, 1)
    assume(diff)
    (file,) = parse_diff(diff)
    hunk = data.draw(st.sampled_from(file.hunks))
    line = data.draw(st.integers(hunk.start, hunk.start + len(hunk.before) - 1))
    changed = [*before[: line - 1], "different", *before[line:]]
    with pytest.raises(PatchError, match=f"line {line} is 'different'"):
        apply_hunks(file.hunks, joined(changed))


def test_a_moved_hunk_is_refused():
    (file,) = parse_diff(diff_of(ANSWERS))
    with pytest.raises(PatchError, match="line 4 is"):
        apply_hunks(file.hunks, "\n" + SOURCES["vllm/answers.py"])


def test_a_text_that_is_too_short_is_refused():
    (file,) = parse_diff(diff_of(INNER))
    with pytest.raises(PatchError, match="line 1 is 'the end of the file'"):
        apply_hunks(file.hunks, "")


def test_a_file_with_other_line_ends_is_refused():
    (file,) = parse_diff(diff_of(INNER))
    with pytest.raises(PatchError, match="line 1"):
        apply_hunks(file.hunks, "PLACE = 'disk'\r\n")


def test_modules_are_named_after_their_files():
    assert [file.module for file in parse_diff(diff_of(ANSWERS, INNER))] == [
        "vllm.answers",
        "vllm.inner",
    ]


def test_lines_end_only_at_line_feeds():
    assert split_lines("a\x0cb\u2028c\r\nd") == ["a\x0cb\u2028c\r\n", "d"]


GOOD = "--- a/vllm/x.py\n+++ b/vllm/x.py\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
SECOND = "@@ -5,1 +5,2 @@\n e\n+f\n"


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        ("", "no diff"),
        ("nothing of a diff\n", "no diff"),
        (GOOD.replace("vllm/x.py", "torch/x.py"), "torch/x.py: only Python files under vllm/"),
        (GOOD.replace("vllm/x.py", "vllm/../x.py"), "only Python files under vllm/"),
        (GOOD.replace("vllm/x.py", "vllm/x.json"), "vllm/x.json: only Python files"),
        (GOOD.replace("b/vllm/x.py", "b/vllm/y.py"), "renaming"),
        (GOOD.replace("a/vllm/x.py", "/dev/null"), "vllm/x.py: new files"),
        (GOOD.replace("b/vllm/x.py", "/dev/null"), "vllm/x.py: deleting"),
        ("Binary files a/vllm/x.py and b/vllm/x.py differ\n", "binary"),
        ("diff --git a/vllm/x.py b/vllm/x.py\nold mode 100644\nnew mode 100755\n", "no hunk"),
        (GOOD + GOOD, "changed twice"),
        (GOOD.replace("-1,2 +1,2", "-1,9 +1,9"), "shorter than expected"),
        (GOOD.replace("-1,2 +1,2", "-1,1 +1,1"), "stray text"),
        (GOOD + "+more\n", "stray text"),
        (GOOD + "\n+more\n", "stray text"),
        (GOOD + "a remark\n" + GOOD.replace("x.py", "y.py"), "stray text in the diff: 'a remark'"),
        (GOOD + "\\ No newline at end of file\n", "newline at its end"),
        (GOOD + SECOND.replace("+5,2", "+6,2"), "hunk at line 5 has wrong line numbers"),
        (GOOD + SECOND.replace("-5,1 +5,2", "-2,1 +2,2"), "hunk at line 2 has wrong line numbers"),
        (GOOD + "@@ -5,0 +6 @@\n+f\n", "hunk at line 5 has no context"),
    ],
)
def test_a_diff_that_is_not_supported_is_refused(diff, message):
    with pytest.raises(PatchError, match=message):
        parse_diff(diff)


@pytest.mark.parametrize("end", ["", "\n"])
def test_the_diff_that_the_refused_ones_are_made_of_is_good(end):
    git = "diff --git a/vllm/x.py b/vllm/x.py\nindex 01..02 100644\n"
    (file,) = parse_diff(git + GOOD + SECOND + end)
    assert apply_hunks(file.hunks, "a\nb\nc\nd\ne\n") == "a\nc\nc\nd\ne\nf\n"
