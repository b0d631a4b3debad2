# SPDX-License-Identifier: Apache-2.0
"""The Debian mirror is taken from the machine's apt sources, in either format."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulation.apt_sources import (
    find_debian_mirror,
    parse_deb822_style,
    parse_one_line_style,
)

ONE_LINE = """
# deb http://commented.example/debian bookworm main
deb-src http://source.example/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/x.gpg] https://tool.example/apt tool-bookworm main
deb http://updates.example/debian-security bookworm-security main
deb http://partial.example/debian bookworm contrib
deb http://mirror.example/debian bookworm-updates main contrib # a remark
"""
DEB822 = """
Types: deb
# a remark
URIs: https://node.example/x
Suites: nodistro
Components: main

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: trixie
Components: main

Types: deb-src
URIs: http://source.example/debian
Suites: trixie
Components: main

Types: deb deb-src
URIs: http://one.example/debian
  http://two.example/debian
Suites: trixie
 trixie-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""


def write_apt(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def test_one_line_style() -> None:
    sources = list(parse_one_line_style(ONE_LINE))
    assert [source.uri for source in sources] == [
        "https://tool.example/apt",
        "http://updates.example/debian-security",
        "http://partial.example/debian",
        "http://mirror.example/debian",
    ]
    assert sources[3].suites == ("bookworm-updates",)
    assert sources[3].components == ("main", "contrib")
    assert [source.is_debian_mirror() for source in sources] == [False, False, False, True]


def test_deb822_style() -> None:
    sources = list(parse_deb822_style(DEB822))
    assert [(source.uri, source.is_debian_mirror()) for source in sources] == [
        ("https://node.example/x", False),
        ("http://one.example/debian", True),
        ("http://two.example/debian", True),
    ]
    assert sources[1].suites == ("trixie", "trixie-updates")


@pytest.mark.parametrize(
    ("files", "mirror"),
    [
        ({"sources.list": ONE_LINE}, "http://mirror.example/debian"),
        ({"sources.list.d/debian.sources": DEB822}, "http://one.example/debian"),
        (
            {"sources.list": "", "sources.list.d/a.list": ONE_LINE, "sources.list.d/b.txt": DEB822},
            "http://mirror.example/debian",
        ),
    ],
)
def test_mirror_is_found(tmp_path: Path, files: dict[str, str], mirror: str) -> None:
    assert find_debian_mirror(write_apt(tmp_path, files)) == mirror


def test_mirror_list_is_followed(tmp_path: Path) -> None:
    listing = tmp_path / "mirrors" / "debian.list"
    source = f"deb mirror+file:{listing} trixie main\n"
    files = {"sources.list": source, "mirrors/debian.list": "# best first\nhttp://m.example/d p:1\n"}
    assert find_debian_mirror(write_apt(tmp_path, files)) == "http://m.example/d"


def test_machine_without_a_debian_source(tmp_path: Path) -> None:
    write_apt(tmp_path, {"sources.list": "deb http://ubuntu.example/ubuntu noble main universe\n"})
    with pytest.raises(LookupError, match=r"no Debian archive .* give one with --mirror URI"):
        find_debian_mirror(tmp_path)
