# SPDX-License-Identifier: Apache-2.0
"""vLLM's source distribution, which holds the tests that its wheels leave out: fetched once, checked at every use."""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from filelock import FileLock

from tests.emulation.cache import default_cache

VERSION = "0.32.0"
SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
_NAME = f"vllm-{VERSION}.tar.gz"

# pip asks a source distribution for its metadata before it keeps it, and vLLM's takes torch and a Rust tool chain to
# answer. This build backend, found before the real one, answers for it.
_BACKEND = f"""
from pathlib import Path

def prepare_metadata_for_build_wheel(directory, settings=None):
    folder = Path(directory, "vllm-{VERSION}.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\\nName: vllm\\nVersion: {VERSION}\\n")
    return folder.name

def build_wheel(directory, settings=None, metadata=None):
    raise NotImplementedError
"""


class DownloadError(Exception):
    """The source distribution cannot be had; the message is pip's first error line."""


def read_file(path: str) -> bytes:
    """The contents of the file ``path`` of vLLM's sources, for instance ``tests/conftest.py``.

    Raises ``DownloadError`` where they are not in the cache folder and cannot be downloaded, ``ValueError`` where what
    is there is not what is pinned.
    """
    with tarfile.open(_archive()) as archive:
        member = archive.extractfile(f"vllm-{VERSION}/{path}")
        assert member is not None, f"{path} is not a file"
        return member.read()


def _archive() -> Path:
    folder = default_cache().parent / "sdists"
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / _NAME
    with FileLock(folder / ".lock"):
        if not archive.exists():
            _download(folder)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{archive}: expected the SHA-256 {SHA256}, got {digest}; remove it")
    return archive


def _download(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        backend = Path(scratch, "backend/setuptools")
        backend.mkdir(parents=True)
        (backend / "__init__.py").touch()
        (backend / "build_meta.py").write_text(_BACKEND)
        requirements = Path(scratch, "requirements.txt")
        requirements.write_text(f"vllm=={VERSION} --hash=sha256:{SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-build-isolation", "--no-binary=vllm", f"--dest={scratch}", f"--requirement={requirements}"]
        environment = {**os.environ, "PYTHONPATH": str(backend.parent)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["pip failed"]
            raise DownloadError(next((line for line in lines if line.startswith("ERROR")), lines[-1]))
        Path(scratch, _NAME).rename(folder / _NAME)
