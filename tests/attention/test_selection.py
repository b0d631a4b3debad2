# SPDX-License-Identifier: Apache-2.0
"""When attention runs on our kernels, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from vllm_arm import activation, ops
from vllm_arm.attention import selection, transfer
from vllm_arm.logs import info_once, warning_once
from vllm_arm.platform import ArmCpuPlatform

VLLM_BACKEND = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"


def describe(**settings: Any) -> AttentionSelectorConfig:
    usual = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None}
    return AttentionSelectorConfig(**(usual | settings))


def describe_model(**settings: Any) -> SimpleNamespace:
    usual = {"head_size": 64, "dtype": torch.bfloat16, "use_mla": False, "is_attention_free": False}
    usual |= {"cache_dtype": "auto", "block_size": 128, "user_specified_block_size": False}
    given = usual | settings
    return SimpleNamespace(
        model_config=SimpleNamespace(get_head_size=lambda: given["head_size"], **given),
        cache_config=SimpleNamespace(**given),
    )


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.delenv("VLLM_ARM_ATTENTION", raising=False)
    monkeypatch.setenv("VLLM_ARM_ISA", ops.active_isa("paged_attention"))
    warning_once.cache_clear()
    info_once.cache_clear()


def backend(**settings: Any) -> str:
    selection.register()
    return ArmCpuPlatform.get_attn_backend_cls(None, describe(**settings))


def test_ours_takes_the_place_of_vllms() -> None:
    assert backend() == selection.BACKEND
    assert AttentionBackendEnum.CPU_ATTN.get_class().__name__ == "ArmAttentionBackend"
    assert selection.choice() == (True, f"{ops.active_isa('paged_attention')} kernel")


def test_which_kernel_runs_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(selection.logger, "info", lines.append)
    backend()
    backend(head_size=128)
    assert lines == [f"attention runs on vllm-arm's {ops.active_isa('paged_attention')} kernel"]


def test_switched_off_leaves_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ARM_ATTENTION", "0")
    assert backend(head_size=72) == VLLM_BACKEND
    selection.check_model(describe_model(head_size=72, cache_dtype="nvfp4"))
    assert selection.choice() == (False, "VLLM_ARM_ATTENTION=0")


def test_off_arm_it_has_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ARM_ISA")
    monkeypatch.setattr(activation, "is_arm", lambda: False)
    assert backend() == VLLM_BACKEND
    assert "VLLM_ARM_ISA=portable" in selection.choice()[1]
    monkeypatch.setattr(activation, "is_arm", lambda: True)
    assert backend() == selection.BACKEND


def test_latent_attention_is_not_ours() -> None:
    assert backend(use_mla=True, head_size=576).endswith("MLABackend")
    selection.check_model(describe_model(use_mla=True, head_size=576))
    selection.check_model(describe_model(is_attention_free=True, head_size=0))


@pytest.mark.parametrize(
    "settings",
    [
        *(
            {"kv_cache_dtype": name}
            for name in ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head")
        ),
        {"kv_cache_dtype": "float16", "dtype": torch.float16},
        {"kv_cache_dtype": None, "dtype": torch.float32},
        *({"head_size": size} for size in (32, 48, 80, 256, 512)),
        *({"block_size": size} for size in (16, 48, 128)),
        {"has_sink": True, "has_sliding_window": True},
        {"use_non_causal": True},
        {"attn_type": "encoder_only"},
        {"attn_type": "encoder_decoder"},
        {"use_kv_connector": True},
        {"use_adaptive_verification": True},
    ],
    ids=str,
)
def test_what_is_supported(settings: dict[str, Any]) -> None:
    assert backend(**settings) == selection.BACKEND


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head_size": 72}, "head size 72: expected a multiple of 16 up to 512"),
        ({"head_size": 528}, "head size 528: expected"),
        ({"dtype": torch.float64}, r"dtype torch.float64: expected bfloat16, float16 or float32"),
        ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4: expected one of auto, .*, int8_per_token_head"),
        ({"kv_cache_dtype": "float16"}, r"--kv-cache-dtype float16: expected auto, .* torch.bfloat16"),
        ({"block_size": 24}, "--block-size 24: expected a multiple of 16"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"head_size": 72, "block_size": 24}, "head size 72: .*; --block-size 24"),
    ],
)
def test_what_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"attention on CPU: {message}"):
        backend(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head_size": 72}, "head size 72"),
        ({"cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4"),
        ({"block_size": 24, "user_specified_block_size": True}, "--block-size 24"),
    ],
)
def test_a_model_is_refused_in_the_front_end(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"attention on CPU: {message}"):
        selection.check_model(describe_model(**settings))


def test_attention_within_images_is_announced_once_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(selection.logger, "warning", warnings.append)
    assert backend(use_mm_prefix=True) == selection.BACKEND
    assert backend(use_mm_prefix=True, has_sliding_window=True) == selection.BACKEND
    (warning,) = warnings
    assert "the tokens of an image" in warning


def test_kv_transfer_goes_to_our_layout_unless_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(transfer, "pack_kv_cache", lambda *_: taken.append("ours"))
    monkeypatch.setattr(CpuPlatform, "pack_kv_cache", classmethod(lambda *_: taken.append("vllm")))
    blocks = torch.tensor([0])
    ArmCpuPlatform.pack_kv_cache(torch.zeros(1, 1, 16, 32), blocks)
    ArmCpuPlatform.pack_kv_cache(torch.zeros(1, 16, 576), blocks)
    monkeypatch.setenv("VLLM_ARM_ATTENTION", "0")
    ArmCpuPlatform.pack_kv_cache(torch.zeros(1, 1, 16, 32), blocks)
    assert taken == ["ours", "vllm", "vllm"]
