# SPDX-License-Identifier: Apache-2.0
"""The table of engines for linear layers."""

import pytest

from vllm_arm import ops
from vllm_arm.cli import doctor
from vllm_arm.linear import engines


def test_fp32_goes_to_torch_on_arm() -> None:
    for isa in ("neon", "bf16", "sve"):
        assert engines.choose("float32", 64, 64, isa=isa).engine == "torch"


def test_bf16_and_int8_go_to_our_panels_on_arm_alone() -> None:
    for scheme in ("bfloat16", "int8"):
        for isa in ("neon", "bf16", "sve"):
            choice = engines.choose(scheme, 48, 32, isa=isa)
            assert choice.engine == "vllm_arm"
            assert choice.implementation == f"panel_linear {ops.active_isa('panel_linear')}"
        assert engines.choose(scheme, 48, 32, isa="portable").engine != "vllm_arm"


def test_fp16_goes_to_our_panels_on_arm_where_onednn_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "linear_implementation", lambda *_: "jit")
    assert engines.choose("float16", 48, 32, isa="neon").engine == "onednn"
    monkeypatch.setattr(ops, "linear_implementation", fail)
    assert engines.choose("float16", 48, 32, isa="neon").engine == "vllm_arm"


def fail(*_: object) -> str:
    raise ValueError("it is not optimised")


def test_what_onednn_has_goes_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "linear_implementation", lambda n, k, dtype, rows: f"{n} {k} {dtype} {rows}")
    choice = engines.choose("bfloat16", 48, 32, 5, isa="portable")
    assert choice == ("onednn", "48 32 torch.bfloat16 5", "weights packed once")


def test_what_no_engine_has_is_left_to_vllm_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "linear_implementation", fail)
    assert engines.choose("int8", 48, 32, isa="portable") == ("vllm", "vLLM's own", "it is not optimised")


@pytest.mark.parametrize("isa", ["portable", "neon", "bf16", "sve"])
def test_int4_goes_to_our_op_where_it_takes_the_inputs_and_else_to_int8(
    monkeypatch: pytest.MonkeyPatch, isa: str
) -> None:
    monkeypatch.setattr(ops, "linear_implementation", lambda n, k, dtype, rows: f"{dtype}")
    kernel = f"linear_int4 {ops.active_isa('linear_int4')}"
    assert engines.choose("int4", 48, 96, isa=isa)[:2] == ("vllm_arm", kernel)
    instead = engines.choose("int4", 48, 80, isa=isa)
    assert instead[:2] == engines.choose("int8", 48, 80, isa=isa)[:2]
    assert instead.reason == "in int8, for int4 takes a multiple of 32 inputs"


def test_every_scheme_has_a_dtype() -> None:
    for scheme, dtype in engines.SCHEMES.items():
        assert engines.scheme_of(dtype) == scheme


def test_doctor_shows_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ARM_FORCE", "1")
    monkeypatch.setattr(
        engines,
        "choose",
        lambda scheme, n, k, rows: engines.Choice("onednn", "small" if rows < 9 else "large", "a reason"),
    )
    checks = {check.name: check for check in doctor.examine() if check.section == "Linear layers"}
    assert checks["oneDNN"].value == ops.onednn_version()
    assert checks["bfloat16, 4096 x 4096, up to 8 tokens"].value == "onednn, small"
    assert checks["bfloat16, 4096 x 4096, up to 2048 tokens"].value == "onednn, large"
    assert checks["int4, 4096 x 4096, up to 8 tokens"].value == "onednn, small"
    monkeypatch.setenv("VLLM_ARM_LINEAR", "0")
    off = [check for check in doctor.examine() if check.section == "Linear layers" and check.name != "oneDNN"]
    assert {(check.status, check.reason) for check in off} == {("off", "VLLM_ARM_LINEAR=0")}
