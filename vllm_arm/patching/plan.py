# SPDX-License-Identifier: Apache-2.0
"""Which patches apply to a given vLLM, and what its modules' sources then are. Reads files; changes
nothing.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from packaging.version import Version

from vllm_arm.patching.diff import PatchError, apply_hunks
from vllm_arm.patching.series import Patch, load_patch, read_series


@dataclass(frozen=True)
class Outcome:
    """What becomes of one patch. ``reason`` is empty if it applies; ``patch`` is None if its file
    is malformed.
    """

    name: str
    patch: Patch | None
    state: Literal["applies", "skipped", "failed"]
    reason: str = ""


@dataclass(frozen=True)
class PatchedSource:
    """The source that a module is to have instead of that in ``file``."""

    file: Path
    text: str


@dataclass
class Plan:
    """The outcome of each patch, in order, and each patched source by its module's full name."""

    outcomes: list[Outcome] = field(default_factory=list)
    sources: dict[str, PatchedSource] = field(default_factory=dict)


def make_plan(patch_directory: Path, package: Path, version: Version, imported: Collection[str] = ()) -> Plan:
    """Try the patches in ``patch_directory``, one after the other, on the vLLM in ``package``.

    A patch applies as a whole or not at all. ``imported`` names the modules that have been imported
    unpatched, which no patch can reach any more. Raises ``PatchError`` where ``series`` itself is
    malformed.
    """
    plan = Plan()
    for name in read_series(patch_directory):
        try:
            patch = load_patch(patch_directory / name)
        except PatchError as error:
            plan.outcomes.append(Outcome(name, None, "failed", f"the patch is malformed: {error}"))
            continue
        plan.outcomes.append(_try(patch, plan, package, version, imported))
    return plan


def _try(patch: Patch, plan: Plan, package: Path, version: Version, imported: Collection[str]) -> Outcome:
    files = ", ".join(file.path for file in patch.files)
    if not patch.target.covers(version):
        reason = f"it is for vLLM {patch.target.text}, this is {version}; it would change {files}"
        return Outcome(patch.name, patch, "skipped", reason)
    late = [module for module in patch.modules if module in imported]
    if late:
        reason = f"imported before it could be patched: {', '.join(late)}"
        return Outcome(patch.name, patch, "failed", reason)
    sources = {}
    for diff in patch.files:
        file = package.parent / diff.path
        earlier = plan.sources.get(diff.module)
        try:
            text = earlier.text if earlier else file.read_bytes().decode("utf-8")
            sources[diff.module] = PatchedSource(file, apply_hunks(diff.hunks, text))
        except (PatchError, OSError, UnicodeDecodeError) as error:
            reason = f"it does not fit {diff.path} of vLLM {version}: {error}"
            return Outcome(patch.name, patch, "failed", reason)
    plan.sources |= sources
    return Outcome(patch.name, patch, "applies")
