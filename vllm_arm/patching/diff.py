# SPDX-License-Identifier: Apache-2.0
"""Unified diffs of vLLM's sources: parsed strictly, applied exactly (no fuzz, no offset)."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import PurePosixPath

from unidiff import Hunk as ParsedHunk
from unidiff import PatchedFile, PatchSet
from unidiff.errors import UnidiffParseError

_GIT_LINES = ("diff --git ", "index ")


class PatchError(ImportError):
    """A patch or the series is malformed, or does not fit the vLLM that is installed."""


@dataclass(frozen=True)
class Hunk:
    """Replace ``before`` by ``after``, both lists of lines with their newlines, at line ``start``
    (the first is 1).
    """

    start: int
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class FileDiff:
    """The hunks, in order, for one source file; ``path`` is relative to the parent of the package,
    ``vllm/...``.
    """

    path: str
    hunks: tuple[Hunk, ...]

    @property
    def module(self) -> str:
        """The full name of the module whose source the file is."""
        parts = PurePosixPath(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def split_lines(text: str) -> list[str]:
    """``text`` cut after each line feed, and at no other character, as diff counts lines."""
    return StringIO(text, newline="\n").readlines()


def parse_diff(text: str) -> tuple[FileDiff, ...]:
    """The changes in ``text``, a unified diff of existing Python files under ``vllm/``.

    Raises ``PatchError`` on anything else: other files, new, deleted, renamed or binary ones, hunks
    without context or with wrong counts, and stray text, which a lenient parser would pass over.
    """
    try:
        parsed = PatchSet.from_string(text)
    except UnidiffParseError as error:
        raise PatchError(f"not a unified diff: {str(error).strip()}") from None
    if not parsed:
        raise PatchError("there is no diff after the header")
    files = tuple(FileDiff(_checked_path(file), _checked_hunks(file)) for file in parsed)
    paths = [file.path for file in files]
    for path in paths:
        if paths.count(path) > 1:
            raise PatchError(f"{path} is changed twice in the same patch")
    _check_nothing_ignored(text, parsed)
    return files


def apply_hunks(hunks: Sequence[Hunk], text: str) -> str:
    """``text`` with ``hunks`` applied. Raises ``PatchError`` at the first line that is not the one
    a hunk expects.
    """
    lines = split_lines(text)
    result: list[str] = []
    position = 0
    for hunk in hunks:
        first = hunk.start - 1
        for number, expected in enumerate(hunk.before, hunk.start):
            found = lines[number - 1] if number <= len(lines) else "the end of the file"
            if found != expected:
                raise PatchError(f"line {number} is {found.rstrip()!r}, not {expected.rstrip()!r}")
        result += lines[position:first]
        result += hunk.after
        position = first + len(hunk.before)
    return "".join(result + lines[position:])


def _checked_path(file: PatchedFile) -> str:
    if file.is_binary_file:
        raise PatchError(f"{file.path}: binary files are not supported")
    if file.is_added_file:
        raise PatchError(f"{file.path}: new files are not supported; add a module to vllm_arm")
    if file.is_removed_file:
        raise PatchError(f"{file.path}: deleting a file is not supported")
    source = str(file.source_file).removeprefix("a/")
    target = str(file.target_file).removeprefix("b/")
    if source != target:
        raise PatchError(f"{source}: renaming a file, to {target}, is not supported")
    parts = PurePosixPath(source).parts
    if parts[:1] != ("vllm",) or ".." in parts or not source.endswith(".py"):
        raise PatchError(f"{source}: only Python files under vllm/ can be patched")
    return source


def _checked_hunks(file: PatchedFile) -> tuple[Hunk, ...]:
    if not file:
        raise PatchError(f"{file.path}: there is no hunk")
    hunks = []
    growth = 0
    end = 1
    for hunk in file:
        if any(line.line_type == "\\" for line in hunk):
            raise PatchError(f"{file.path}: a file without a newline at its end is not supported")
        converted = _converted(hunk)
        if not converted.before:
            raise PatchError(f"{file.path}: the hunk at line {hunk.source_start} has no context")
        if hunk.source_start < end or hunk.target_start != hunk.source_start + growth:
            raise PatchError(f"{file.path}: the hunk at line {hunk.source_start} has wrong line numbers")
        growth += len(converted.after) - len(converted.before)
        end = hunk.source_start + len(converted.before)
        hunks.append(converted)
    return tuple(hunks)


def _converted(hunk: ParsedHunk) -> Hunk:
    before = tuple(line.value for line in hunk.source_lines())
    after = tuple(line.value for line in hunk.target_lines())
    return Hunk(hunk.source_start, before, after)


def _check_nothing_ignored(text: str, parsed: PatchSet) -> None:
    """The parser skips lines that it does not know, for instance those after a hunk whose count is
    too low.
    """
    information = [line for file in parsed for line in file.patch_info or ()]
    stray = [line for line in information if not line.startswith(_GIT_LINES)]
    understood = len(information) + sum(2 + sum(1 + len(hunk) for hunk in file) for file in parsed)
    if stray:
        raise PatchError(f"stray text in the diff: {stray[0].rstrip()!r}")
    if understood != len(split_lines(text)):
        raise PatchError("stray text after the last hunk, or a hunk that is longer than its counts")
