# SPDX-License-Identifier: Apache-2.0
"""mimalloc in place of glibc's malloc: where it is, whether to use it, and how it is tuned.

glibc returns the large tensors of every forward pass to the kernel and faults them in again at the next; mimalloc
keeps them.
"""

import importlib.metadata
from pathlib import Path

from vllm_arm import envs
from vllm_arm.runtime import preload
from vllm_arm.runtime.choice import Choice

DISTRIBUTION = "cmeel-mimalloc"
ALLOCATORS = ("libmimalloc", "libtcmalloc", "libjemalloc")
"""The file names of allocators that someone may have preloaded already."""

TUNING = {
    # Never give memory back: the next forward pass needs the same again. In milliseconds, -1 is never.
    "MIMALLOC_PURGE_DELAY": "-1",
    # Let the kernel back arenas with huge pages by itself: fewer faults and fewer TLB misses.
    "MIMALLOC_ALLOW_THP": "1",
}
"""Settings of mimalloc for large tensors; a value that is in the environment already is left alone."""


def find_mimalloc() -> str | None:
    """Path of the mimalloc that the distribution ``cmeel-mimalloc`` installed, None without it."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    candidates = [file for file in files if file.name.startswith("libmimalloc.so")]
    # The longest name is the library itself, libmimalloc.so.X.Y; the others are copies for the linker.
    for candidate in sorted(candidates, key=lambda file: len(file.name), reverse=True):
        path = Path(str(candidate.locate())).resolve()
        if path.exists():
            return str(path)
    return None


def is_preloaded(ld_preload: str) -> bool:
    """Whether the ``LD_PRELOAD`` value names a mimalloc."""
    return preload.find(ld_preload, ["libmimalloc"]) is not None


def choose(ld_preload: str) -> Choice:
    """What to preload, given the ``LD_PRELOAD`` that the process was started with."""
    if not envs.VLLM_ARM_MIMALLOC:
        return Choice(None, "VLLM_ARM_MIMALLOC=0")
    existing = preload.find(ld_preload, ALLOCATORS)
    mimalloc = find_mimalloc()
    if existing is not None and existing != mimalloc:
        return Choice(None, f"LD_PRELOAD already names an allocator, {existing}")
    if mimalloc is None:
        reason = f"mimalloc is not installed (pip install {DISTRIBUTION}): glibc's malloc is used"
        return Choice(None, reason, is_problem=True)
    return Choice(mimalloc, "mimalloc keeps large tensors mapped between forward passes")
