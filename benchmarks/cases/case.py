# SPDX-License-Identifier: Apache-2.0
"""What a benchmark case is: inputs, implementations to compare, a float64 reference and the least work to be done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

Arithmetic = Literal["bf16", "int8"]


@dataclass(frozen=True)
class Work:
    """The least that the op must do, whatever the implementation.

    ``bytes_read`` and ``bytes_written`` count every input and output element once. ``arithmetic`` names the matrix
    instructions that its multiply-accumulates could use; an op without any has 0 of them.
    """

    bytes_read: int
    bytes_written: int
    multiply_accumulates: int = 0
    arithmetic: Arithmetic = "bf16"


@dataclass(frozen=True)
class Call:
    """One implementation, bound to its inputs.

    ``run`` is what is counted or timed. ``output`` gives the result of the last run, of the reference's shape.
    ``reset`` puts back the inputs that ``run`` overwrites, and what else a run uses up; it is called before a run
    whose result is checked, and before every run of a case that is not repeatable.
    """

    run: Callable[[], object]
    output: Callable[[], torch.Tensor]
    reset: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Implementation:
    """One way to compute a case.

    ``name`` is ``vllm_arm`` (ours), ``upstream`` (the op that vLLM calls) or ``torch``. ``prepare`` takes the case's
    inputs, packs weights and allocates outputs. ``operation``, given for ours only, is the row in our table of
    kernels, whose variants become ``vllm_arm/<isa>``. ``tolerance`` overrides the case's, with the reason beside it.
    """

    name: Literal["vllm_arm", "upstream", "torch"]
    prepare: Callable[[Any], Call]
    operation: str | None = None
    tolerance: float | None = None


@dataclass(frozen=True)
class Case:
    """One shape of one op.

    ``shape`` says in words what it is, which model it comes from, and why it is smaller where it is.
    ``tolerance`` bounds the largest error relative to the largest element of the reference. ``is_repeatable``: runs
    may follow each other without ``reset``, so that wall time can be measured.
    """

    op: str
    name: str
    shape: str
    work: Work
    tolerance: float
    inputs: Callable[[], Any]
    reference: Callable[[Any], torch.Tensor]
    implementations: tuple[Implementation, ...]
    is_repeatable: bool = True

    @property
    def label(self) -> str:
        """``op/name``, unique among all cases."""
        return f"{self.op}/{self.name}"


def max_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest absolute error over the largest element of ``expected``; infinite where a result is not finite."""
    if actual.shape != expected.shape:
        raise ValueError(f"result has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if not bool(actual.isfinite().all()):
        return float("inf")
    return float((actual.double() - expected).abs().max() / expected.abs().max())
