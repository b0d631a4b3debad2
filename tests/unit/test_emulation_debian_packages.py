# SPDX-License-Identifier: Apache-2.0
"""Single Debian packages: what the index says, and which packages belong together."""

from __future__ import annotations

import hashlib
import lzma
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.emulation.debian_packages import parse_index, unpack, with_exact_dependencies

INDEX = """Package: libx-dev
Version: 1.2-3
Depends: libx4 (= 1.2-3), libc6 (>= 2.38)
Description: headers
 Package: not a field
Filename: pool/x/libx-dev.deb

Package: libx4
Version: 1.2-3
Filename: pool/x/libx4.deb
"""


def test_a_library_comes_with_its_headers_and_nothing_else() -> None:
    packages = parse_index(INDEX)
    assert packages["libx-dev"]["Filename"] == "pool/x/libx-dev.deb"
    assert with_exact_dependencies(["libx-dev"], packages) == ["libx-dev", "libx4"]
    with pytest.raises(LookupError, match="liby-dev: not in Debian sid for arm64"):
        with_exact_dependencies(["liby-dev"], packages)


def make_mirror(folder: Path, checksum: str | None) -> str:
    """A mirror with one package that holds one file; `checksum` None: the true one."""
    tree = folder / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(
        "Package: libz-dev\nVersion: 1\nArchitecture: arm64\nMaintainer: a <a@b>\nDescription: c\n"
    )
    (tree / "usr").mkdir()
    (tree / "usr/z.h").write_text("// z\n")
    archive = folder / "pool.deb"
    subprocess.run(["dpkg-deb", "--build", tree, archive], check=True, capture_output=True)
    index = folder / "dists/sid/main/binary-arm64/Packages.xz"
    index.parent.mkdir(parents=True)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    text = f"Package: libz-dev\nVersion: 1\nFilename: pool.deb\nSHA256: {checksum or found}\n"
    index.write_bytes(lzma.compress(text.encode()))
    return folder.as_uri()


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not installed")
def test_a_package_is_unpacked_where_its_checksum_is_right(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    mirror = make_mirror(tmp_path / "mirror", None)
    assert unpack(["libz-dev"], mirror, root, tmp_path) == ["libz-dev 1"]
    assert (root / "usr/z.h").exists()
    assert not list(tmp_path.glob("*.deb"))
    with pytest.raises(RuntimeError, match=r"pool\.deb: another checksum than the index has"):
        unpack(["libz-dev"], make_mirror(tmp_path / "bad", "0" * 64), root, tmp_path)
