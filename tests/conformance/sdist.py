# SPDX-License-Identifier: Apache-2.0
"""vLLM's source distribution, which holds the tests that its wheels leave out."""

import tarfile
import tempfile
from pathlib import Path

from tests.downloads import fetch

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


def read_file(path: str) -> bytes:
    """The contents of the file ``path`` of vLLM's sources, for instance ``tests/conftest.py``.

    Raises ``DownloadError`` where they cannot be had, ``ValueError`` where they are not what is pinned.
    """
    with tempfile.TemporaryDirectory() as scratch:
        backend = Path(scratch, "setuptools")
        backend.mkdir()
        (backend / "__init__.py").touch()
        (backend / "build_meta.py").write_text(_BACKEND)
        archive = fetch(
            f"vllm=={VERSION}",
            _NAME,
            SHA256,
            options=["--no-build-isolation", "--no-binary=vllm"],
            environment={"PYTHONPATH": scratch},
        )
    with tarfile.open(archive) as opened:
        member = opened.extractfile(f"vllm-{VERSION}/{path}")
        assert member is not None, f"{path} is not a file"
        return member.read()
