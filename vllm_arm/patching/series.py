# SPDX-License-Identifier: Apache-2.0
"""The patches on disk: ``series`` gives their order, each has DEP-3 headers and then a unified
diff.

Besides DEP-3's fields there are ``Target`` (specifiers of vLLM versions, alternatives joined by
``||``), ``Test`` (the pytest node that fails without the patch) and ``Drop-When`` (what would make
the patch unnecessary).
"""

import re
from dataclasses import dataclass
from datetime import date
from email import message_from_string
from email.message import Message
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from vllm_arm.patching.diff import FileDiff, PatchError, parse_diff, split_lines

PATCH_DIRECTORY = Path(__file__).resolve().parent.parent / "patches"

_FORWARDED = re.compile(r"no|not-needed|https://\S+")
_TEST = re.compile(r"tests/\S+\.py::\S+")


@dataclass(frozen=True)
class Target:
    """The vLLM versions that a patch is written for."""

    text: str
    alternatives: tuple[SpecifierSet, ...]

    def covers(self, version: Version) -> bool:
        """Whether ``version``, which may be a pre-release, is one of them."""
        return any(specifiers.contains(version, prereleases=True) for specifiers in self.alternatives)


@dataclass(frozen=True)
class Patch:
    """One patch: its headers, and its diffs by file. ``description`` is the first line of that
    field.
    """

    name: str
    description: str
    author: str
    forwarded: str
    last_update: date
    target: Target
    test: str
    drop_when: str
    files: tuple[FileDiff, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """The full names of the modules that it changes."""
        return tuple(file.module for file in self.files)


def read_series(directory: Path = PATCH_DIRECTORY) -> list[str]:
    """The names of the patch files in the order in which they apply.

    Raises ``PatchError`` on a missing ``series``, a name given twice, or a file that is not in
    ``directory``.
    """
    series = directory / "series"
    try:
        lines = series.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PatchError(f"cannot read the series of patches: {error}") from error
    names: list[str] = []
    for number, line in enumerate(lines, 1):
        name = line.strip()
        if not name or name.startswith("#"):
            continue
        if "/" in name or not name.endswith(".patch"):
            raise PatchError(f"series:{number}: expected the name of a .patch file beside it, not {name!r}")
        if name in names:
            raise PatchError(f"series:{number}: {name} is listed twice")
        if not (directory / name).is_file():
            raise PatchError(f"series:{number}: there is no {name} in {directory}")
        names.append(name)
    return names


def load_patch(file: Path) -> Patch:
    """The patch in ``file``. Raises ``PatchError`` naming the field or the part of the diff that is
    wrong.
    """
    try:
        lines = split_lines(file.read_bytes().decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PatchError(f"cannot be read: {error}") from error
    first = next((i for i, line in enumerate(lines) if line.startswith(("--- ", "diff --git "))), len(lines))
    headers = _parse_headers("".join(lines[:first]))
    return Patch(
        name=file.name,
        description=_field(headers, "Description").splitlines()[0],
        author=_field(headers, "Author"),
        forwarded=_matching(headers, "Forwarded", _FORWARDED, "no, not-needed or an https address"),
        last_update=_date(headers, "Last-Update"),
        target=_target(headers, "Target"),
        test=_matching(headers, "Test", _TEST, "a pytest node such as tests/unit/test_x.py::test_y"),
        drop_when=_field(headers, "Drop-When"),
        files=parse_diff("".join(lines[first:])),
    )


def _parse_headers(text: str) -> Message:
    headers = message_from_string(text)
    rest = str(headers.get_payload()).strip()
    if rest or headers.defects:
        raise PatchError(f"expected 'Field: value' lines and then the diff, not {rest.splitlines()[:1]}")
    return headers


def _field(headers: Message, name: str) -> str:
    values = headers.get_all(name, [])
    if len(values) > 1:
        raise PatchError(f"header field {name} is given twice")
    value = str(values[0]).strip() if values else ""
    if not value:
        raise PatchError(f"header field {name} is missing")
    return value


def _matching(headers: Message, name: str, pattern: re.Pattern[str], expected: str) -> str:
    value = _field(headers, name)
    if not pattern.fullmatch(value):
        raise PatchError(f"header field {name}: expected {expected}, not {value!r}")
    return value


def _date(headers: Message, name: str) -> date:
    value = _field(headers, name)
    try:
        return date.fromisoformat(value)
    except ValueError:
        raise PatchError(f"header field {name}: expected a date such as 2026-01-31, not {value!r}") from None


def _target(headers: Message, name: str) -> Target:
    value = _field(headers, name)
    alternatives = [part.strip() for part in value.split("||")]
    try:
        if not all(alternatives):
            raise InvalidSpecifier
        return Target(value, tuple(map(SpecifierSet, alternatives)))
    except InvalidSpecifier:
        expected = "version specifiers such as ==0.32.*, alternatives joined by ||"
        raise PatchError(f"header field {name}: expected {expected}, not {value!r}") from None
