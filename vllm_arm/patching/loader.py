# SPDX-License-Identifier: Apache-2.0
"""Loads a module from patched source, and lets everything that shows source lines see it."""

import linecache
import sys
import threading
import traceback
from importlib.machinery import SourceFileLoader
from types import CodeType, TracebackType

from vllm_arm.compat import TRACEBACKS_READ_DISK
from vllm_arm.patching.diff import split_lines


class PatchedSourceLoader(SourceFileLoader):
    """Loads module ``fullname`` from ``text`` in place of the file ``path``, whose name the module
    keeps.
    """

    def __init__(self, fullname: str, path: str, text: str) -> None:
        super().__init__(fullname, path)
        self._text = text

    def get_data(self, path: str) -> bytes:
        """The patched source as UTF-8; any other file, as package data is read so, from disk."""
        return self._text.encode() if path == self.path else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType:
        """The compiled patched source. Bytecode on disk is neither read nor written: it is the
        unpatched file's.
        """
        show_source(self.path, self._text)
        return self.source_to_code(self.get_data(self.path), self.path)


def show_source(path: str, text: str) -> None:
    """Make tracebacks, debuggers and ``inspect`` show ``text`` as the contents of file ``path``."""
    # Without a modification time linecache keeps the entry and does not look at the file.
    linecache.cache[path] = (len(text), None, split_lines(text), path)
    if TRACEBACKS_READ_DISK:
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = _print_uncaught
        if threading.excepthook is threading.__excepthook__:
            threading.excepthook = _print_uncaught_in_thread


def _print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if sys.stderr is not None:
        traceback.print_exception(kind, error, trace)


def _print_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_type is SystemExit or arguments.exc_value is None or sys.stderr is None:
        return
    name = arguments.thread.name if arguments.thread else threading.get_ident()
    print(f"Exception in thread {name}:", file=sys.stderr)
    _print_uncaught(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
