# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the source distribution is said, and never used."""

from pathlib import Path

import pytest

from tests.conformance import sdist
from tests.downloads import DownloadError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_ARM_CACHE", str(tmp_path))
    return tmp_path


def test_another_archive_than_the_pinned_one_is_refused(cache: Path) -> None:
    archive = cache / "downloads" / f"vllm-{sdist.VERSION}.tar.gz"
    archive.parent.mkdir()
    archive.write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"vllm-0\.32\.0\.tar\.gz: expected the SHA-256 d2c957d5"):
        sdist.read_file("README.md")


def test_a_failed_download_says_why_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(DownloadError, match=r"ERROR: .*vllm==0\.32\.0"):
        sdist.read_file("README.md")
    assert [path.name for path in (cache / "downloads").iterdir()] == [".lock"]
