# SPDX-License-Identifier: Apache-2.0
"""The benchmark cases, one module per family of ops, for modelled cycles and for wall time alike.

They import torch only; vLLM's operators and ours are loaded when an implementation is prepared.
"""

from benchmarks.cases import activation, all_reduce, attention, cache_write, linear, linear_int4, norm, quantise, rope
from benchmarks.cases.case import Call, Case, Implementation, Work, max_error

FAMILIES = (attention, cache_write, linear, linear_int4, quantise, norm, rope, activation, all_reduce)
CASES: tuple[Case, ...] = tuple(case for family in FAMILIES for case in family.CASES)

__all__ = ["CASES", "Call", "Case", "Implementation", "Work", "max_error", "select"]


def select(op: str | None = None, case: str | None = None) -> list[Case]:
    """The cases of the family ``op`` and of the name ``case``; None stands for all.

    Raises ``ValueError`` listing what there is where nothing fits.
    """
    ops = sorted({known.op for known in CASES})
    if op is not None and op not in ops:
        raise ValueError(f"op {op!r}: expected one of {', '.join(ops)}")
    chosen = [known for known in CASES if op in (None, known.op) and case in (None, known.name)]
    if not chosen:
        names = ", ".join(known.name for known in CASES if op in (None, known.op))
        raise ValueError(f"case {case!r}: expected one of {names}")
    return chosen
