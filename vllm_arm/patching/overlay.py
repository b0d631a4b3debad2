# SPDX-License-Identifier: Apache-2.0
"""The patches at work in this process: what the finder answers, and what is said of the others."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

from vllm_arm.compat import VllmNotFoundError, vllm_directory, vllm_version
from vllm_arm.patching import series
from vllm_arm.patching.diff import PatchError
from vllm_arm.patching.loader import PatchedSourceLoader
from vllm_arm.patching.plan import PatchedSource, make_plan
from vllm_arm.startup import find_original_spec, warn_once_in_process_tree


class Overlay:
    """The patched source of each module of vLLM that is to have one."""

    def __init__(self, sources: dict[str, PatchedSource]) -> None:
        self._sources = sources

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        """The spec that loads ``fullname`` patched; None where it is to stay as it is.

        Raises ``PatchError`` where the module would not come from the file that the patches were
        tried on.
        """
        source = self._sources.get(fullname)
        if source is None:
            return None
        spec = find_original_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return None
        if Path(spec.origin) != source.file or type(spec.loader) is not SourceFileLoader:
            raise PatchError(f"{fullname} is to be loaded from {spec.origin}, not from {source.file}")
        spec.loader = PatchedSourceLoader(fullname, spec.origin, source.text)
        return spec


def prepare_overlay(strict: bool) -> Overlay | None:
    """The overlay for the vLLM that would be imported, or None where there is none.

    Each patch that does not apply brings one warning in a tree of processes, or ``PatchError`` if
    ``strict``. Raises ``PatchError`` on a malformed series and ``VllmUnsupportedError`` as
    ``compat.vllm_version`` does.
    """
    try:
        directory = vllm_directory()
    except VllmNotFoundError:
        return None
    plan = make_plan(series.PATCH_DIRECTORY, directory, vllm_version(directory), unpatched_modules())
    for outcome in plan.outcomes:
        if outcome.state == "applies":
            continue
        message = f"patch {outcome.name} is skipped: {outcome.reason}"
        if strict:
            raise PatchError(f"{message} (an error because VLLM_ARM_STRICT=1)")
        warn_once_in_process_tree(message)
    return Overlay(plan.sources)


def is_patched(module: ModuleType | None) -> bool:
    """Whether ``module`` was loaded from patched source."""
    spec = getattr(module, "__spec__", None)
    return isinstance(getattr(spec, "loader", None), PatchedSourceLoader)


def unpatched_modules() -> set[str]:
    """The full names of vLLM's modules that this process has imported as they are on disk."""
    return {
        name
        for name, module in list(sys.modules.items())
        if (name == "vllm" or name.startswith("vllm.")) and not is_patched(module)
    }
