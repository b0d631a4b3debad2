# SPDX-License-Identifier: Apache-2.0
"""The bar of layers that are quantised while they load."""

import io

import pytest

from vllm_arm.linear.progress import LayerProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def quantise(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, is_shown: bool = True) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    progress = LayerProgress()
    for _ in range(2):
        for _ in range(3):
            progress.expect(is_shown)
        for _ in range(3):
            progress.done()
    progress.done()
    return stream.getvalue()


def test_a_terminal_shows_each_load(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = quantise(Terminal(), monkeypatch)
    assert "Quantising layers: 100%" in shown
    assert shown.count("3/3") == 2


def test_it_is_quiet_elsewhere_and_by_vllms_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert quantise(io.StringIO(), monkeypatch) == ""
    assert quantise(Terminal(), monkeypatch, is_shown=False) == ""
