# SPDX-License-Identifier: Apache-2.0
"""The OpenMP runtime: whether torch's has LSE atomics, and what to preload in its place where it has none.

A runtime built for Armv8.0 alone takes the next loop iteration by a load-exclusive loop, which collapses when many
threads contend for it; one with LSE atomics (directly, or by GCC's outline atomics) does it by one instruction.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from vllm_arm import _host, envs
from vllm_arm.runtime import preload
from vllm_arm.runtime.choice import Choice

RUNTIMES = ("libgomp", "libomp", "libiomp")
LIBRARY_DIRECTORIES = (
    "/usr/lib/aarch64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib64",
    "/usr/local/lib",
)
_VERSION_NODE = re.compile(rb"\0((?:GOMP|OMP)_\d+(?:\.\d+)*)(?=\0)")


def torch_runtime(torch_directory: Path) -> Path | None:
    """The libgomp that torch brings, None where it uses the system's."""
    for directory in (torch_directory / "lib", torch_directory.parent / "torch.libs"):
        found = sorted(directory.glob("libgomp*.so*"))
        if found:
            return found[0]
    return None


def system_runtimes() -> list[Path]:
    """The libgomp.so.1 of the distribution, in the loader's usual directories."""
    paths = (Path(directory, "libgomp.so.1") for directory in LIBRARY_DIRECTORIES)
    return list(dict.fromkeys(path.resolve() for path in paths if path.exists()))


def _interface_versions(library: Path) -> set[bytes]:
    return set(_VERSION_NODE.findall(library.read_bytes()))


def choose(
    ld_preload: str,
    torch_directory: Path,
    *,
    has_lse: bool | None = None,
    candidates: Iterable[Path] | None = None,
    count_atomics: Callable[[str], _host.AtomicCounts] = _host.count_atomics,
) -> Choice:
    """What to preload in place of torch's OpenMP runtime.

    ``has_lse`` says whether the CPU has LSE atomics (None: ask this one), ``candidates`` are the other runtimes there
    are (None: the system's). A candidate must have LSE atomics, torch's file name (so that the loader maps only one of
    them) and every interface version that torch's runtime has.
    """
    if not envs.VLLM_ARM_OPENMP:
        return Choice(None, "VLLM_ARM_OPENMP=0")
    existing = preload.find(ld_preload, RUNTIMES)
    if existing is not None:
        return Choice(None, f"LD_PRELOAD already names an OpenMP runtime, {existing}")
    if not (_host.host_features().lse_atomics if has_lse is None else has_lse):
        return Choice(None, "this CPU has no LSE atomics: torch's runtime is as good as any")
    bundled = torch_runtime(torch_directory)
    if bundled is None or count_atomics(str(bundled)).lse:
        return Choice(None, "torch's OpenMP runtime has LSE atomics" if bundled else "torch brings no OpenMP runtime")
    rejected = []
    for candidate in system_runtimes() if candidates is None else candidates:
        objection = _objection(candidate, bundled, count_atomics)
        if objection is None:
            return Choice(str(candidate), "it has LSE atomics, torch's has none")
        rejected.append(objection)
    found = "; ".join(rejected) or "no libgomp.so.1 in the system (install libgomp1)"
    return Choice(None, f"torch's OpenMP runtime has no LSE atomics: {found}", is_problem=True)


def _objection(candidate: Path, bundled: Path, count_atomics: Callable[[str], _host.AtomicCounts]) -> str | None:
    """Why ``candidate`` cannot stand in for torch's ``bundled`` runtime; None where it can."""
    if not count_atomics(str(candidate)).lse:
        return f"{candidate} has no LSE atomics either"
    if not bundled.name.startswith("libgomp.so"):
        return f"{candidate} would be mapped beside torch's {bundled.name}"
    missing = _interface_versions(bundled) - _interface_versions(candidate)
    if missing:
        return f"{candidate} lacks {', '.join(sorted(version.decode() for version in missing))}"
    return None


def bundled_copies(site_directory: Path) -> list[Path]:
    """The renamed copies of libgomp that other packages bring in their ``*.libs`` folders (sentencepiece does)."""
    return sorted(site_directory.glob("*.libs/libgomp-*.so*"))


def link_as(runtime: Path, copies: Iterable[Path], cache_directory: Path) -> Path | None:
    """A folder in which ``runtime`` goes by the names of ``copies`` too; None where there are no copies.

    With that folder in ``LD_LIBRARY_PATH`` and the names in ``LD_PRELOAD``, the loader takes the one runtime for all
    of them, and no process maps two thread pools. A copy that has an interface version which ``runtime`` lacks is
    left out. Raises ``OSError`` where the folder cannot be written.
    """
    provided = _interface_versions(runtime)
    names = sorted({copy.name for copy in copies if _interface_versions(copy) <= provided})
    if not names:
        return None
    key = hashlib.sha256("\n".join([str(runtime), *names]).encode()).hexdigest()[:16]
    folder = cache_directory / f"openmp-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        # Another process may make the same link at the same time.
        with contextlib.suppress(FileExistsError):
            os.symlink(runtime, folder / name)
    return folder
