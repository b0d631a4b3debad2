# SPDX-License-Identifier: Apache-2.0
"""Install aarch64 wheels as root's pip would on the emulated server, without running it there."""

from __future__ import annotations

import configparser
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from .bytecode import compile_on_host, find_host_python
from .pins import pip_install

GUEST_PYTHON = "/usr/bin/python3.13"
# Both are site directories of Debian's Python: `.pth` files in them are processed at start-up.
SYSTEM_SITE = Path("usr/lib/python3/dist-packages")
LOCAL_SITE = Path("lib/python3.13/dist-packages")
# The guard matters: vLLM spawns processes, and each runs the script again as a module of another name.
SCRIPT = """#!{python}
import sys
from {module} import {function}
if __name__ == "__main__":
    sys.exit({call}())
"""
ENTRY_POINT = re.compile(r"([\w.]+):(\w+)((?:\.\w+)*)")


def console_scripts(site: Path) -> Iterator[tuple[str, str]]:
    """Name and text of every console script of the distributions in `site`."""
    for metadata in sorted(site.glob("*.dist-info/entry_points.txt")):
        parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(metadata.read_text())
        if not parser.has_section("console_scripts"):
            continue
        for name, value in parser.items("console_scripts"):
            match = ENTRY_POINT.match(value.replace(" ", ""))
            if match is None:
                raise ValueError(f"{metadata}: {name}: expected module:function, found {value!r}")
            yield (
                name,
                SCRIPT.format(python=GUEST_PYTHON, module=match[1], function=match[2], call=match[2] + match[3]),
            )


def install_into(site: Path, scripts: Path, requirements: Sequence[str | Path]) -> None:
    """Unpack pins or wheel files into the site directory and write their console scripts.

    RuntimeError with pip's words when one cannot be had for CPython 3.13 on aarch64.
    """
    site.mkdir(parents=True, exist_ok=True)
    scripts.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=site.parent) as scratch:
        pip_install(requirements, site, Path(scratch))
    # pip's scripts in here carry this machine's interpreter.
    shutil.rmtree(site / "bin", ignore_errors=True)
    for name, text in console_scripts(site):
        (scripts / name).write_text(text)
        (scripts / name).chmod(0o755)


def install_wheels(wheels: Sequence[Path], usr_local: Path) -> None:
    """Make `usr_local` the guest's /usr/local with exactly these wheels installed.

    FileNotFoundError names a missing wheel; RuntimeError has pip's words for an unfit one.
    """
    for wheel in wheels:
        if not wheel.is_file():
            raise FileNotFoundError(f"wheel: {wheel} does not exist")
    shutil.rmtree(usr_local, ignore_errors=True)
    install_into(usr_local / LOCAL_SITE, usr_local / "bin", [wheel.resolve() for wheel in wheels])
    if python := find_host_python():
        compile_on_host(python, [usr_local / LOCAL_SITE], usr_local, "/usr/local")
