# SPDX-License-Identifier: Apache-2.0
"""``LD_PRELOAD`` as a list: the order of libraries, without doubles."""

from collections.abc import Iterable
from pathlib import PurePath


def parse(preload: str) -> list[str]:
    """The libraries of an ``LD_PRELOAD`` value; the loader takes both colons and spaces between them."""
    return preload.replace(":", " ").split()


def prepend(preload: str, libraries: Iterable[str]) -> str:
    """``preload`` with ``libraries`` at its front, each once."""
    ordered = dict.fromkeys([*libraries, *parse(preload)])
    return ":".join(ordered)


def remove(preload: str, name: str, directory: str) -> str:
    """``preload`` without the libraries in ``directory`` whose file name begins with ``name``."""
    kept = [
        library
        for library in parse(preload)
        if not (PurePath(library).name.startswith(name) and str(PurePath(library).parent) == directory)
    ]
    return ":".join(kept)


def find(preload: str, names: Iterable[str]) -> str | None:
    """The first library of ``preload`` whose file name begins with one of ``names``."""
    prefixes = tuple(names)
    for library in parse(preload):
        if PurePath(library).name.startswith(prefixes):
            return library
    return None
