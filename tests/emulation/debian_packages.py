# SPDX-License-Identifier: Apache-2.0
"""Single packages of Debian's development suite, unpacked into the root without the ones that they depend on."""

from __future__ import annotations

import hashlib
import lzma
import re
import subprocess
import urllib.request
from collections.abc import Iterable
from pathlib import Path

SUITE = "sid"
ARCHITECTURE = "arm64"
_SECONDS_TO_CONNECT = 60


def parse_index(text: str) -> dict[str, dict[str, str]]:
    """The packages of a `Packages` file by name, each with its fields of one line."""
    packages = {}
    for stanza in text.split("\n\n"):
        fields = dict(re.findall(r"^([\w-]+): (.*)$", stanza, re.MULTILINE))
        if "Package" in fields:
            packages[fields["Package"]] = fields
    return packages


def with_exact_dependencies(names: Iterable[str], packages: dict[str, dict[str, str]]) -> list[str]:
    """`names`, and what they need in one exact version: a library beside its headers, whose name has a version.

    LookupError names a package that the index lacks.
    """
    found: list[str] = []
    waiting = list(names)
    while waiting:
        name = waiting.pop(0)
        if name not in packages:
            raise LookupError(f"{name}: not in Debian {SUITE} for {ARCHITECTURE}")
        if name not in found:
            found.append(name)
            waiting += re.findall(r"([\w.+-]+) \(= [^)]*\)", packages[name].get("Depends", ""))
    return found


def unpack(names: Iterable[str], mirror: str, root: Path, scratch: Path) -> list[str]:
    """Download `names` and their libraries from `mirror`, unpack them into `root`; return names and versions.

    RuntimeError names a file that is not what the index says, or that dpkg cannot unpack.
    """
    base = mirror.rstrip("/")
    packages = parse_index(
        lzma.decompress(_download(f"{base}/dists/{SUITE}/main/binary-{ARCHITECTURE}/Packages.xz")).decode()
    )
    unpacked = []
    for name in with_exact_dependencies(names, packages):
        fields = packages[name]
        archive = _download(f"{base}/{fields['Filename']}")
        if hashlib.sha256(archive).hexdigest() != fields["SHA256"]:
            raise RuntimeError(f"{fields['Filename']}: another checksum than the index has")
        file = scratch / f"{name}.deb"
        file.write_bytes(archive)
        done = subprocess.run(["dpkg-deb", "-x", file, root], capture_output=True, text=True, check=False)
        file.unlink()
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr.strip()}")
        unpacked.append(f"{name} {fields['Version']}")
    return unpacked


def _download(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_SECONDS_TO_CONNECT) as answer:
        return bytes(answer.read())
