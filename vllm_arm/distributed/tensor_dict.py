# SPDX-License-Identifier: Apache-2.0
"""Dictionaries of tensors over a transport: a length, a description of that length, then the tensors one by one."""

import pickle
from typing import Any, NamedTuple

import torch

from vllm_arm.distributed.transport import Transport


class _Tensor(NamedTuple):
    """Stands for a tensor that follows."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def send(transport: Transport, tensors: dict[str, Any], destination: int) -> None:
    """Give ``tensors`` to rank ``destination``, of the same program: values that are no tensors are pickled."""
    described = {
        key: _Tensor(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value
        for key, value in tensors.items()
    }
    description = torch.frombuffer(bytearray(pickle.dumps(described)), dtype=torch.uint8)
    transport.send(torch.tensor([description.numel()], dtype=torch.int64), destination)
    transport.send(description, destination)
    for value in tensors.values():
        if isinstance(value, torch.Tensor) and value.numel():
            transport.send(value, destination)


def recv(transport: Transport, source: int) -> dict[str, Any]:
    """The dictionary that rank ``source`` sends, its keys in the same order."""
    length = torch.empty(1, dtype=torch.int64)
    transport.recv(length, source)
    description = torch.empty(int(length.item()), dtype=torch.uint8)
    transport.recv(description, source)
    described: dict[str, Any] = pickle.loads(description.numpy().tobytes())
    for key, value in described.items():
        if isinstance(value, _Tensor):
            tensor = torch.empty(value.shape, dtype=value.dtype)
            if tensor.numel():
                transport.recv(tensor, source)
            described[key] = tensor
    return described
