# SPDX-License-Identifier: Apache-2.0
"""The finder of the import overlay, installed by ``vllm_arm.pth`` at every interpreter start.

So it imports only ``sys``. Everything else waits for the first import of ``vllm``, in a process
where vllm-arm is active.
"""

import sys

# Not a setting: it tells child processes which warnings their parents have given. Without the
# underscore vLLM would report an unknown variable.
_WARNED = "_VLLM_ARM_WARNED"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from vllm_arm.patching.overlay import Overlay


class OverlayFinder:
    """A meta-path finder that answers only for the modules of vLLM that a patch touches."""

    def __init__(self) -> None:
        self._overlay: Overlay | None = None
        self._off = False

    def find_spec(
        self,
        fullname: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        """The spec of a patched module, or None where the other finders should answer.

        Raises ``ImportError`` under ``VLLM_ARM_STRICT=1`` where a patch cannot be applied, and
        ``ValueError`` where a ``VLLM_ARM_*`` variable has a value that it cannot take; otherwise a
        failure leaves vLLM as it is.
        """
        if self._off or not (fullname == "vllm" or fullname.startswith("vllm.")):
            return None
        if self._overlay is None and not _wanted():
            self._off = True
            return None
        return self._patched_spec(fullname, path, target)

    def _patched_spec(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None"
    ) -> "ModuleSpec | None":
        from vllm_arm import envs

        strict = envs.VLLM_ARM_STRICT
        try:
            from vllm_arm.patching.overlay import prepare_overlay

            if self._overlay is None:
                self._overlay = prepare_overlay(strict)
            return self._overlay.find_spec(fullname, path, target) if self._overlay else None
        except Exception as error:
            if strict:
                if isinstance(error, ImportError):
                    raise
                raise ImportError(f"the import overlay of vllm-arm failed: {error!r}") from error
            self._off = True
            warn_once_in_process_tree(f"vLLM is left unpatched, because the import overlay failed: {error!r}")
            return None


def _wanted() -> bool:
    from vllm_arm.activation import is_active

    if not is_active():
        return False
    from vllm_arm import envs

    return envs.VLLM_ARM_PATCHES


def warn_once_in_process_tree(message: str) -> None:
    """Log a warning, unless this process or one that it descends from has given it already."""
    import os
    from zlib import crc32

    from vllm_arm.logs import get_logger

    given = os.environ.get(_WARNED, "").split()
    mark = f"{crc32(message.encode()):08x}"
    if mark in given:
        return
    os.environ[_WARNED] = " ".join([*given, mark])
    get_logger(__name__).warning(message)


def installed_finder() -> OverlayFinder | None:
    """The finder that this interpreter has, if any."""
    for finder in sys.meta_path:
        if isinstance(finder, OverlayFinder):
            return finder
    return None


def find_original_spec(
    fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
) -> "ModuleSpec | None":
    """The spec that Python would find without the overlay; None where there is no such module."""
    for finder in sys.meta_path:
        if isinstance(finder, OverlayFinder):
            continue
        spec = finder.find_spec(fullname, path, target)
        if spec is not None:
            return spec
    return None


def install() -> None:
    """Put the finder before all others, once. If vLLM is already imported, raises as the finder."""
    if installed_finder() is not None:
        return
    finder = OverlayFinder()
    sys.meta_path.insert(0, finder)
    if "vllm" in sys.modules:
        # Decide now, so that modules out of reach are named even if no other is imported.
        finder.find_spec("vllm")
