# SPDX-License-Identifier: Apache-2.0
"""Keep one finished root per set of inputs in a cache folder outside the repository."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from filelock import FileLock, Timeout

CACHE_VARIABLE = "VLLM_ARM_CACHE"
BUILD_PREFIX = ".building-"
LOCK_NAME = ".lock"
DIGEST_LENGTH = 16

Say = Callable[[str], None]
Step = tuple[str, Callable[[Path, Say], None]]


def default_cache() -> Path:
    """Where roots are kept: $VLLM_ARM_CACHE or ~/.cache/vllm-arm, below it `arm-root`."""
    base = os.environ.get(CACHE_VARIABLE) or "~/.cache/vllm-arm"
    return Path(base).expanduser() / "arm-root"


def digest_inputs(files: Iterable[Path], texts: Iterable[str]) -> str:
    """A short hash over the files' names and contents and over the texts."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()[:DIGEST_LENGTH]


def remove_tree(path: Path) -> bool:
    """Delete a root unless a guest runs in it or something is mounted below it."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    if any(Path(mount).is_relative_to(path.resolve()) for mount in mounts):
        return False
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def ensure_root(cache: Path, digest: str, steps: Iterable[Step], say: Say) -> Path:
    """The root for `digest`, built by `steps` unless it is there; older ones are removed.

    It is built beside its place and moved there when complete, so what is found is whole. Other
    processes wait. `say` gets one line per step. A step's exception is passed on, with the
    half-built root removed.
    """
    root = cache / digest
    if root.is_dir():
        return root
    cache.mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache / LOCK_NAME)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"waiting for another process that builds in {cache}")
        lock.acquire()
    try:
        if not root.is_dir():
            _build(cache, root, steps, say)
        _remove_others(cache, root, say)
    finally:
        lock.release()
    return root


def _build(cache: Path, root: Path, steps: Iterable[Step], say: Say) -> None:
    building = Path(tempfile.mkdtemp(prefix=BUILD_PREFIX, dir=cache))
    building.chmod(0o755)
    begin = time.monotonic()
    try:
        for title, step in steps:
            say(f"{title} ...")
            start = time.monotonic()
            step(building, lambda remark: say(f"    {remark}"))
            say(f"    {time.monotonic() - start:.1f} s")
        building.rename(root)
    except BaseException:
        remove_tree(building)
        raise
    say(f"built {root} in {time.monotonic() - begin:.0f} s")


def _remove_others(cache: Path, root: Path, say: Say) -> None:
    for other in sorted(cache.iterdir()):
        is_root = len(other.name) == DIGEST_LENGTH or other.name.startswith(BUILD_PREFIX)
        if other != root and is_root and other.is_dir():
            done = remove_tree(other)
            say(f"removed the old {other}" if done else f"kept the old {other}: it is in use")
