# SPDX-License-Identifier: Apache-2.0
"""What the patches do to the installed vLLM, found without importing it: for the command line and
for tests.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.version import Version

from vllm_arm import envs
from vllm_arm.activation import is_active
from vllm_arm.compat import VllmNotFoundError, VllmUnsupportedError, vllm_directory, vllm_version
from vllm_arm.patching import series
from vllm_arm.patching.diff import PatchError
from vllm_arm.patching.overlay import is_patched, unpatched_modules
from vllm_arm.patching.plan import Outcome, make_plan
from vllm_arm.startup import installed_finder

State = Literal["applied", "pending", "skipped", "failed", "off"]


@dataclass(frozen=True)
class PatchStatus:
    """One patch in this process.

    ``state`` is ``applied`` (at least one of its modules is imported, patched), ``pending`` (it
    fits, and none is imported yet), ``skipped`` (it is not for this vLLM), ``failed`` (it should
    apply and cannot) or ``off``. ``reason`` says why, and is empty for ``applied``. ``files`` are
    relative to the directory that holds the package ``vllm``.
    """

    name: str
    description: str
    target: str
    files: tuple[str, ...]
    state: State
    reason: str


def status(patch_directory: Path | None = None) -> list[PatchStatus]:
    """The state of every patch of the series, tried on the installed files without importing vLLM.

    Raises ``PatchError`` where the series itself is malformed and ``ValueError`` on a bad
    ``VLLM_ARM_*`` value.
    """
    patch_directory = patch_directory or series.PATCH_DIRECTORY
    off = _reason_for_off()
    try:
        directory = vllm_directory()
        plan = make_plan(patch_directory, directory, vllm_version(directory), unpatched_modules())
        outcomes = plan.outcomes
    except (VllmNotFoundError, VllmUnsupportedError) as error:
        outcomes = [Outcome(name, patch, "skipped", str(error)) for name, patch in _loadable_patches(patch_directory)]
    return [_status(outcome, off) for outcome in outcomes]


def validate(
    patch_directory: Path | None = None,
    *,
    package: Path | None = None,
    version: Version | None = None,
    strict: bool = False,
) -> list[str]:
    """What is wrong with the series and its patches: one line each, none if all is well.

    Checks the series, the headers and the diffs, and that each patch whose ``Target`` covers the
    vLLM in ``package`` (by default the installed one) of that ``version`` applies exactly and
    leaves sources that compile. Raises ``PatchError`` with all the lines if ``strict`` and there
    are any; ``ImportError`` where there is no usable vLLM.
    """
    patch_directory = patch_directory or series.PATCH_DIRECTORY
    package = package or vllm_directory()
    problems = []
    try:
        listed = series.read_series(patch_directory)
        plan = make_plan(patch_directory, package, version or vllm_version(package))
    except PatchError as error:
        problems.append(str(error))
    else:
        unlisted = {file.name for file in patch_directory.glob("*.patch")} - set(listed)
        problems += [f"{name}: not listed in series" for name in sorted(unlisted)]
        problems += [f"{o.name}: {o.reason}" for o in plan.outcomes if o.state == "failed"]
        for module, source in plan.sources.items():
            try:
                compile(source.text, str(source.file), "exec", dont_inherit=True)
            except SyntaxError as error:
                problems.append(f"{module}: the patched source does not compile: {error}")
    if problems and strict:
        raise PatchError("; ".join(problems))
    return problems


def _reason_for_off() -> str:
    if not is_active():
        return "vllm-arm is not active on this machine (VLLM_ARM_FORCE=1 would make it so)"
    if not envs.VLLM_ARM_PATCHES:
        return "VLLM_ARM_PATCHES=0"
    if installed_finder() is None:
        return "vllm_arm.pth did not run when this interpreter started: it is not in site-packages"
    return ""


def _loadable_patches(directory: Path) -> list[tuple[str, series.Patch | None]]:
    patches: list[tuple[str, series.Patch | None]] = []
    for name in series.read_series(directory):
        try:
            patches.append((name, series.load_patch(directory / name)))
        except PatchError:
            patches.append((name, None))
    return patches


def _status(outcome: Outcome, off: str) -> PatchStatus:
    patch = outcome.patch
    state, reason = _state(outcome, off)
    return PatchStatus(
        name=outcome.name,
        description=patch.description if patch else "",
        target=patch.target.text if patch else "",
        files=tuple(file.path for file in patch.files) if patch else (),
        state=state,
        reason=reason,
    )


def _state(outcome: Outcome, off: str) -> tuple[State, str]:
    if off:
        return "off", off
    if outcome.state != "applies":
        return outcome.state, outcome.reason
    modules = outcome.patch.modules if outcome.patch else ()
    if any(is_patched(sys.modules.get(module)) for module in modules):
        return "applied", ""
    return "pending", f"will be applied as {', '.join(modules)} are imported"
