# SPDX-License-Identifier: Apache-2.0
"""Layers as vLLM makes them, for tests of their kernels without a model."""

from typing import Any

import torch

# Activations are rounded to 8 bits.
TOLERANCE = 0.02


def parameter(tensor: torch.Tensor, **attributes: int) -> torch.nn.Parameter:
    made = torch.nn.Parameter(tensor, requires_grad=False)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def make_layer(prefix: str = "model.layers.0.mlp.down_proj", **parameters: torch.nn.Parameter) -> Any:
    layer: Any = torch.nn.Module()
    layer.prefix = prefix
    layer.bias = None
    for name, value in parameters.items():
        layer.register_parameter(name, value)
    return layer


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual.float() - expected).square().mean().sqrt()
    assert error <= TOLERANCE * expected.square().mean().sqrt()
