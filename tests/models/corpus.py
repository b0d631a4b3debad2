# SPDX-License-Identifier: Apache-2.0
"""Text to train and judge a small model on: the sources of Python's own standard library.

Every Python installation has them, so nothing has to be downloaded and no text has to be kept here.
"""

import ast
import hashlib
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path

HELD_OUT_ONE_IN = 25
"""One module in this many, 4 %, is kept out of training."""

SYSTEM_MESSAGE = "You explain the standard library of Python."
"""Opens every fourth conversation, so that models know the role."""

# Tests, tables of data, and what Linux distributions ship in packages of their own.
_SKIPPED_NAMES = {
    *("test", "tests", "idlelib", "lib2to3", "turtledemo"),
    *("__phello__", "encodings", "pydoc_data", "stringprep"),
    *("distutils", "ensurepip", "msilib", "tkinter", "turtle"),
}
_SKIPPED_MODULES = {"html.entities", "re._casefix"}
_SHORTEST_ANSWER = 12
_LONGEST_ANSWER = 400
_MOST_TURNS = 3
_SYSTEM_MESSAGE_ONE_IN = 4

_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_Documented = ast.Module | _Definition
Conversation = list[dict[str, str]]
"""Chat messages in the form that chat templates take: `role` and `content`."""


@dataclass(frozen=True)
class Module:
    """One module of the standard library: its import name and its source text."""

    name: str
    source: str


@dataclass(frozen=True)
class Corpus:
    """The modules of one standard library, split by name into `train` and `held_out`."""

    train: tuple[Module, ...]
    held_out: tuple[Module, ...]

    def sha256(self) -> str:
        """Digest of every name and text, in order: equal digests mean equal training data."""
        digest = hashlib.sha256()
        for module in (*self.train, *self.held_out):
            digest.update(f"{module.name}\0{module.source}\0".encode())
        return digest.hexdigest()


def stable_hash(text: str) -> int:
    """Return a hash of `text` that is the same in every process and on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def is_held_out(module_name: str) -> bool:
    """Whether a module is kept out of training; depends on its name alone."""
    return stable_hash(f"tiny-llama {module_name}") % HELD_OUT_ONE_IN == 0


def load_corpus(root: Path | None = None) -> Corpus:
    """Read the standard library under `root` (by default the running interpreter's).

    Raises FileNotFoundError when `root` holds no module sources, as in a stripped installation.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    modules = sorted(_modules(root), key=lambda module: module.name)
    if not modules:
        raise FileNotFoundError(f"root: expected standard library sources, found none in {root}")
    return Corpus(
        train=tuple(module for module in modules if not is_held_out(module.name)),
        held_out=tuple(module for module in modules if is_held_out(module.name)),
    )


def conversations(modules: Iterable[Module]) -> Iterator[Conversation]:
    """Yield chats about what the modules' docstrings explain, each of one to three questions."""
    for module in modules:
        if any(part.startswith("_") for part in module.name.split(".")):
            continue
        pairs = list(_questions_and_answers(module))
        while pairs:
            turns = 1 + stable_hash(pairs[0][0]) % _MOST_TURNS
            yield _as_messages(pairs[:turns])
            del pairs[:turns]


def _as_messages(pairs: Sequence[tuple[str, str]]) -> Conversation:
    messages: Conversation = []
    if stable_hash(pairs[0][1]) % _SYSTEM_MESSAGE_ONE_IN == 0:
        messages.append({"role": "system", "content": SYSTEM_MESSAGE})
    for question, answer in pairs:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages


def _modules(root: Path) -> Iterator[Module]:
    for path in root.rglob("*.py"):
        parts = list(path.relative_to(root).with_suffix("").parts)
        if parts[-1] == "__init__" and len(parts) > 1:
            parts.pop()
        name = ".".join(parts)
        if _is_skipped(parts) or name in _SKIPPED_MODULES:
            continue
        with tokenize.open(path) as file:
            source = file.read()
        if source.strip():
            yield Module(name, source)


def _is_skipped(parts: Sequence[str]) -> bool:
    """Whether a path is no module of this library (`site-packages`) or one that is left out."""
    return any(
        not part.isidentifier()
        or part in _SKIPPED_NAMES
        or part.startswith(("_sysconfigdata", "_sysconfig_vars", "test_"))
        for part in parts
    )


def _questions_and_answers(module: Module) -> Iterator[tuple[str, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old sources hold escapes that newer compilers warn of
        tree = ast.parse(module.source)
    for name, node in _public_definitions(module.name, tree):
        answer = _first_paragraph(ast.get_docstring(node, clean=False))
        if answer.endswith(".") and _SHORTEST_ANSWER <= len(answer) <= _LONGEST_ANSWER:
            yield _question(name, node), answer


def _public_definitions(name: str, node: ast.Module | ast.ClassDef) -> Iterator[tuple[str, _Documented]]:
    yield name, node
    for child in node.body:
        if not isinstance(child, _Definition) or child.name.startswith("_"):
            continue
        if isinstance(child, ast.ClassDef):
            yield from _public_definitions(f"{name}.{child.name}", child)
        else:
            yield f"{name}.{child.name}", child


def _first_paragraph(docstring: str | None) -> str:
    return " ".join(cleandoc(docstring or "").split("\n\n")[0].split())


def _question(name: str, node: _Documented) -> str:
    match node:
        case ast.Module():
            return f"What is the module `{name}` for?"
        case ast.ClassDef():
            return f"What is `{name}`?"
        case _:
            return f"What does `{name}` do?"
