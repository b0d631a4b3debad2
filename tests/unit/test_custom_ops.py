# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's own C++ ops are left out."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_arm import _host, activation, custom_ops


def after(names: list[str]) -> list[str]:
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(custom_ops=names))
    custom_ops.leave_out(config)
    found: list[str] = config.compilation_config.custom_ops
    return found


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> _host.Features:
    features = _host.Features()
    monkeypatch.setattr(activation, "is_arm", lambda: True)
    monkeypatch.setattr(_host, "host_features", lambda: features)
    return features


def test_all_become_none_where_bfloat16_is_missing(cpu: _host.Features) -> None:
    cpu.bfloat16 = False
    assert after(["all", "+quant_fp8"]) == ["none", "+quant_fp8"]
    assert after(["none"]) == ["none"]


def test_others_keep_them(cpu: _host.Features, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu.bfloat16 = True
    assert after(["all"]) == ["all"]
    cpu.bfloat16 = False
    monkeypatch.setattr(activation, "is_arm", lambda: False)
    assert after(["all"]) == ["all"]
