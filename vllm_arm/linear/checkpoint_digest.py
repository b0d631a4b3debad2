# SPDX-License-Identifier: Apache-2.0
"""A digest of what a checkpoint holds, that need not be computed again while its files stay as they are."""

import json
import os
import tempfile
import time
from pathlib import Path

import blake3

# A file that changes again this soon may keep its times, for the clock of a file system is coarse.
_SETTLED_SECONDS = 2.0
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def checkpoint_digest(checkpoint: Path, memory: Path) -> str | None:
    """The digest of the bytes of ``checkpoint``'s weights and configuration; None where it has no weights.

    ``memory`` is a folder that remembers the digest of each file, with its size, times and inode. The kernel sets the
    time of a change itself, so that no write leaves all of them alone.
    """
    weights = next(filter(None, (sorted(checkpoint.glob(pattern)) for pattern in _WEIGHTS)), None)
    if weights is None:
        return None
    hasher = blake3.blake3()
    for file in (*weights, checkpoint / "config.json"):
        if file.exists():
            hasher.update(f"{file.name} {file_digest(file, memory)}\n".encode())
    return str(hasher.hexdigest())


def file_digest(file: Path, memory: Path) -> str:
    """The digest of ``file``'s bytes, which ``memory`` may remember."""
    file = file.resolve()
    status = file.stat()
    state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
    record = memory / f"{blake3.blake3(os.fsencode(file)).hexdigest(length=16)}.json"
    try:
        known = json.loads(record.read_text())
        if known["state"] == state:
            return str(known["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # nothing that can be used: it is written again
    digest = _read_digest(file)
    if time.time() - max(status.st_mtime, status.st_ctime) > _SETTLED_SECONDS:
        write_atomically(record, json.dumps({"file": str(file), "state": state, "digest": digest}).encode())
    return digest


def _read_digest(file: Path) -> str:
    return str(blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(file).hexdigest())


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``, which holds all of the old or of the new at every moment.

    Processes that write at once do not disturb each other: the last one's stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
