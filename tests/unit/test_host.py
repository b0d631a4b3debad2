# SPDX-License-Identifier: Apache-2.0
"""The Python side of _host: selection as a pure function, and what it says of this process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_arm import _host
from vllm_arm.runtime import allocator

ALL = ["portable", "neon", "bf16", "sve"]


def features(**present: bool) -> _host.Features:
    result = _host.Features()
    for name, value in present.items():
        setattr(result, name, value)
    return result


N1 = {"asimd_half": True, "dot_product": True, "lse_atomics": True}
BF16 = {**N1, "bfloat16": True, "int8_matmul": True}
SVE = {**BF16, "sve": True, "sve_bfloat16": True}


@pytest.mark.parametrize(("cpu", "expected"), [({}, "portable"), (N1, "neon"), (BF16, "bf16"), (SVE, "sve")])
def test_the_best_variant_is_selected(cpu: dict[str, bool], expected: str) -> None:
    assert _host.select_isa(ALL, features(**cpu)) == expected
    for isa in ALL[: ALL.index(expected) + 1]:
        assert _host.select_isa(ALL, features(**cpu), isa) == isa
    for isa in ALL[ALL.index(expected) + 1 :]:
        with pytest.raises(ValueError, match=f"VLLM_ARM_ISA={isa}: this CPU lacks"):
            _host.select_isa(ALL, features(**cpu), isa)


def test_a_table_without_the_variant_falls_back_to_the_next() -> None:
    assert _host.select_isa(["portable", "neon"], features(**SVE)) == "neon"


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of portable, neon, bf16, sve"):
        _host.select_isa(["avx"], features())


def test_every_operation_has_a_portable_kernel() -> None:
    operations = _host.operations()
    assert "rms_norm" in operations
    assert all(variants[0] == "portable" for variants in operations.values())


def test_the_allocator_of_this_process_is_named() -> None:
    mimalloc = allocator.find_mimalloc()
    assert mimalloc is not None
    code = "from vllm_arm import _host; s = _host.mimalloc_statistics(); print(_host.malloc_library(), s and s.version)"
    for preload, expected in (("", "libc.so.6 None"), (mimalloc, f"{Path(mimalloc).name} 3")):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "LD_PRELOAD": preload},
            capture_output=True,
            text=True,
            check=True,
        )
        assert expected in result.stdout.strip()


def test_atomics_of_a_missing_file_name_it() -> None:
    with pytest.raises(RuntimeError, match=r"/nonexistent\.so: cannot be read"):
        _host.count_atomics("/nonexistent.so")
