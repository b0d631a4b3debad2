# SPDX-License-Identifier: Apache-2.0
"""Find a Debian mirror in the machine's own apt sources."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

APT_DIRECTORY = Path("/etc/apt")
# A mirror that carries one of Debian's suites carries them all; other archives use other names.
DEBIAN_SUITES = frozenset(
    ["oldoldstable", "oldstable", "stable", "testing", "unstable", "sid", "bullseye", "bookworm", "trixie", "forky"]
)
SUITE_POCKETS = ("", "-updates", "-backports")


@dataclass(frozen=True)
class AptSource:
    """One enabled archive: where it is, and the suites and components taken from it."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]

    def is_debian_mirror(self) -> bool:
        """Whether this is a full Debian archive (not a security or third-party one)."""
        names = {suite + pocket for suite in DEBIAN_SUITES for pocket in SUITE_POCKETS}
        return "main" in self.components and any(suite in names for suite in self.suites)


def parse_one_line_style(text: str) -> Iterator[AptSource]:
    """Sources of a `.list` file: `deb [options] URI SUITE COMPONENT...`."""
    for raw in text.splitlines():
        line = raw.split("#", 1)[0].strip()
        match = re.match(r"deb\s+(?:\[[^\]]*\]\s+)?(\S+)\s+(\S+)\s*(.*)$", line)
        if match:
            yield AptSource(match[1], (match[2],), tuple(match[3].split()))


def parse_deb822_style(text: str) -> Iterator[AptSource]:
    """Sources of a `.sources` file: stanzas of `Field: values`, continued by indented lines."""
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, list[str]] = {}
        values: list[str] = []
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace():
                values.extend(line.split())
            elif ":" in line:
                name, _, rest = line.partition(":")
                values = fields.setdefault(name.strip().lower(), [])
                values.extend(rest.split())
        if fields.get("enabled", ["yes"]) == ["no"] or "deb" not in fields.get("types", []):
            continue
        for uri in fields.get("uris", []):
            yield AptSource(uri, tuple(fields.get("suites", [])), tuple(fields.get("components", [])))


def read_sources(apt_directory: Path = APT_DIRECTORY) -> Iterator[AptSource]:
    """All enabled binary sources, in apt's own order of files."""
    parts = apt_directory / "sources.list.d"
    files = [apt_directory / "sources.list", *(sorted(parts.iterdir()) if parts.is_dir() else [])]
    for file in files:
        if not file.is_file():
            continue
        if file.suffix == ".list":
            yield from parse_one_line_style(file.read_text())
        elif file.suffix == ".sources":
            yield from parse_deb822_style(file.read_text())


def resolve_mirror_list(uri: str) -> str:
    """The first mirror of a `mirror+file:/path` list; any other URI as it is."""
    if not uri.startswith("mirror+file:"):
        return uri
    listing = Path("/" + uri.removeprefix("mirror+file:").lstrip("/"))
    for line in listing.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            return line.split()[0]
    raise LookupError(f"{listing}: no mirror listed")


def find_debian_mirror(apt_directory: Path = APT_DIRECTORY) -> str:
    """URI of a Debian archive among the machine's apt sources.

    Raises LookupError when none is configured (on Ubuntu, for instance).
    """
    for source in read_sources(apt_directory):
        if source.is_debian_mirror():
            return resolve_mirror_list(source.uri)
    raise LookupError(f"no Debian archive among the apt sources in {apt_directory}: give one with --mirror URI")
