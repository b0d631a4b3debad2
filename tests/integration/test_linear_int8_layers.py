# SPDX-License-Identifier: Apache-2.0
"""vLLM's W8A8 layers on our kernel."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_arm import envs, ops
from vllm_arm.linear import engines, int8

pytestmark = pytest.mark.usefixtures("patched_vllm")
NAMES = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]


@pytest.fixture(params=engines.PACKED)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each engine in turn, whatever the table says for this CPU."""
    rules = [rule._replace(isas=envs.ISA_NAMES) for rule in engines.TABLE if rule.engine == request.param]
    monkeypatch.setattr(engines, "TABLE", rules)
    if not int8.available()[0]:
        pytest.skip(f"{request.param} has no optimised int8 product for this CPU")
    return str(request.param)


def make_layer(n: int = 48, k: int = 64, **parameters: torch.Tensor | None) -> Any:
    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randint(-127, 128, (n, k), dtype=torch.int8), requires_grad=False)
    layer.logical_widths = [n // 3, n - n // 3]
    for name in NAMES[1:]:
        value = parameters.get(name)
        layer.register_parameter(name, None if value is None else torch.nn.Parameter(value, requires_grad=False))
    return layer


def process(layer: Any, *, channelwise: bool, static: bool, symmetric: bool) -> Any:
    config = SimpleNamespace(is_channelwise=channelwise, is_static_input_scheme=static, input_symmetric=symmetric)
    kernel = int8.kernel_class()(config, NAMES)
    kernel.process_weights_after_loading(layer)
    return kernel


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("channelwise", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_dynamic_activations(channelwise: bool, symmetric: bool) -> None:
    scales = torch.rand(48, 1) if channelwise else torch.tensor([0.5, 2.0])
    layer = make_layer(weight_scale=scales)
    weight = layer.weight.double()
    dequantised = weight * (
        scales.double() if channelwise else scales.double().repeat_interleave(torch.tensor([16, 32]))[:, None]
    )
    kernel = process(layer, channelwise=channelwise, static=False, symmetric=symmetric)
    x, bias = torch.randn(2, 5, 64) + 1, torch.randn(48)
    quantised, x_scales, zero_points = ops.quantise(x.flatten(0, 1), symmetric)
    shifted = quantised.double() - (0 if zero_points is None else zero_points.double()[:, None])
    expected = (shifted * x_scales.double()[:, None]) @ dequantised.t() + bias.double()
    actual = kernel.apply_weights(layer, x, bias)
    assert actual.shape == (2, 5, 48)
    torch.testing.assert_close(actual.double().flatten(0, 1), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("engine")
def test_static_activations_of_layers_computed_as_one() -> None:
    """Symmetric: the largest scale. Asymmetric: the range that holds both."""
    layer = make_layer(weight_scale=torch.ones(48, 1), input_scale=torch.tensor([0.01, 0.03]))
    weight, x = layer.weight.double(), torch.randn(4, 64)
    kernel = process(layer, channelwise=True, static=True, symmetric=True)
    quantised = (x / 0.03).round().clamp(-128, 127).double()
    torch.testing.assert_close(
        kernel.apply_weights(layer, x).double(), quantised @ weight.t() * 0.03, rtol=1e-5, atol=1e-4
    )

    zero_points = torch.tensor([-20, 30], dtype=torch.int8)
    layer = make_layer(
        weight_scale=torch.ones(48, 1), input_scale=torch.tensor([0.01, 0.02]), input_zero_point=zero_points
    )
    weight = layer.weight.double()
    kernel = process(layer, channelwise=True, static=True, symmetric=False)
    scale, point = float(layer.input_scale), int(layer.input_zero_point)
    assert scale * (127 - point) >= max(0.01 * 147, 0.02 * 97) - scale
    assert scale * (-128 - point) <= min(0.01 * -108, 0.02 * -158) + scale
    shifted = ((x / scale).round() + point).clamp(-128, 127).double() - point
    torch.testing.assert_close(
        kernel.apply_weights(layer, x).double(), shifted @ weight.t() * scale, rtol=1e-5, atol=1e-4
    )


@pytest.mark.usefixtures("engine")
def test_the_layer_keeps_a_weight_where_lora_looks_for_one_and_no_copy() -> None:
    layer = make_layer(n=128, k=512, weight_scale=torch.rand(128, 1))
    plain = layer.weight.nbytes
    process(layer, channelwise=True, static=False, symmetric=True)
    assert layer.weight.device.type == "cpu"
    assert sum(parameter.nbytes for parameter in layer.parameters()) <= 1.05 * plain


def test_our_kernel_is_first_once_and_obeys_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    kernels: list[type] = [object]
    monkeypatch.setitem(linear._POSSIBLE_INT8_KERNELS, PlatformEnum.CPU, kernels)
    monkeypatch.setenv("VLLM_ARM_LINEAR", "0")
    int8.install()
    assert kernels == [object]
    monkeypatch.setenv("VLLM_ARM_LINEAR", "1")
    int8.install()
    int8.install()
    assert kernels == [int8.kernel_class(), object]
    unavailable = engines.Choice("vllm", "vLLM's own", "no luck here")
    monkeypatch.setattr(engines, "choose", lambda *_: unavailable)
    assert int8.kernel_class().is_supported() == (False, "no luck here")  # type: ignore[attr-defined]
