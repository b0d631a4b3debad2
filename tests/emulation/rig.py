# SPDX-License-Identifier: Apache-2.0
"""The one call that tests and the command line use: the root for the present inputs."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from .cache import default_cache, digest_inputs, ensure_root
from .pins import REQUIREMENTS_DIRECTORY, read_pins
from .qemu import qemu_version
from .recipe import Recipe, missing_prerequisites

# What decides the root's contents; the other modules only run it.
RECIPE_FILES = tuple(
    Path(__file__).with_name(name)
    for name in ("bytecode.py", "cuda_stubs.py", "debian_packages.py", "install.py", "pins.py", "recipe.py")
)


def root_digest(requirements: Path = REQUIREMENTS_DIRECTORY) -> str:
    """Hash over what decides the root's contents: the recipe, the pins and QEMU's version."""
    return digest_inputs(RECIPE_FILES, [*read_pins(requirements), qemu_version()])


def existing_root(cache: Path | None = None, requirements: Path = REQUIREMENTS_DIRECTORY) -> Path:
    """Path of the root for the present inputs; LookupError when it has not been built."""
    root = (cache or default_cache()) / root_digest(requirements)
    if not root.is_dir():
        raise LookupError(f"{root} is not built yet: run `python -m tests.emulation make-root`")
    return root


def make_root(
    cache: Path | None = None,
    requirements: Path = REQUIREMENTS_DIRECTORY,
    mirror: str | None = None,
) -> Path:
    """Path of the root for the present inputs, built when there is none.

    Progress goes to stderr. RuntimeError says in one line what the machine lacks.
    """
    if missing := missing_prerequisites():
        raise RuntimeError(missing)
    begin = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f} s] {line}", file=sys.stderr, flush=True)

    steps = Recipe(mirror, read_pins(requirements)).steps()
    return ensure_root(cache or default_cache(), root_digest(requirements), steps, say)
