# SPDX-License-Identifier: Apache-2.0
"""The steps of the throughput benchmark and the environment of each."""

import pytest

from benchmarks.serving import steps
from vllm_arm import envs

SWITCHES = ["VLLM_ARM_PATCHES", "VLLM_ARM_MIMALLOC", "VLLM_ARM_OPENMP", "VLLM_ARM_BINDING", "VLLM_ARM_NORM"]


def test_every_switch_there_is_has_its_step() -> None:
    found = steps.steps()
    assert found[0] == steps.START
    assert sorted(name for step in found for name in step.switches) == sorted(envs.switches())
    assert len({step.name for step in found}) == len(found)


def test_steps_follow_the_table_and_leave_out_what_does_not_exist() -> None:
    assert [step.name for step in steps.steps(SWITCHES, quantise=False)] == ["stock", "mimalloc", "openmp", "norm"]
    with_more = steps.steps([*SWITCHES, "VLLM_ARM_LINEAR"])
    assert [step.name for step in with_more] == ["stock", "mimalloc", "openmp", "norm", "linear", "int8", "int4"]


def test_weights_are_quantised_with_everything_on_and_one_way_at_a_time() -> None:
    available = steps.steps(SWITCHES)
    int8, int4 = steps.select(available, ["int8", "int4"], is_arm=False)
    assert (int8.arguments, int4.arguments) == (("--quantization", "arm_int8"), ("--quantization", "arm_int4"))
    variables = steps.environment(int4, available, is_arm=False, needs_amx_tiles=False)
    assert variables == dict.fromkeys([*SWITCHES, "VLLM_ARM_FORCE"], "1")


def test_a_switch_that_the_table_does_not_know_comes_last() -> None:
    last = steps.steps([*SWITCHES, "VLLM_ARM_KV_CACHE"], quantise=False)[-1]
    assert last == steps.Step("kv_cache", "+ kv cache", ("VLLM_ARM_KV_CACHE",))


def test_a_step_has_the_switches_before_it_on_and_those_after_it_off() -> None:
    available = steps.steps(SWITCHES)
    chosen = steps.select(available, ["openmp"], is_arm=False)
    assert steps.environment(chosen[0], available, is_arm=True, needs_amx_tiles=False) == {
        "VLLM_ARM_PATCHES": "1",
        "VLLM_ARM_MIMALLOC": "1",
        "VLLM_ARM_OPENMP": "1",
        "VLLM_ARM_BINDING": "1",
        "VLLM_ARM_NORM": "0",
    }


@pytest.mark.parametrize(
    ("step", "needs_amx_tiles", "force"),
    [("stock", False, "0"), ("stock", True, "1"), ("mimalloc", False, "1"), ("norm", True, "1")],
)
def test_vllm_arm_is_forced_where_it_is_not_active_by_itself(step: str, needs_amx_tiles: bool, force: str) -> None:
    available = steps.steps(SWITCHES)
    (chosen,) = steps.select(available, [step], is_arm=True)
    variables = steps.environment(chosen, available, is_arm=False, needs_amx_tiles=needs_amx_tiles)
    assert variables["VLLM_ARM_FORCE"] == force


def test_at_the_start_on_arm_every_switch_is_off() -> None:
    available = steps.steps()
    variables = steps.environment(steps.START, available, is_arm=True, needs_amx_tiles=False)
    assert variables == dict.fromkeys(envs.switches(), "0")


def test_int4_is_picked_by_itself_on_arm_only() -> None:
    available = steps.steps(SWITCHES)
    assert steps.select(available, None, is_arm=True)[-1].name == "int4"
    assert steps.select(available, None, is_arm=False)[-1].name == "int8"
    assert [step.name for step in steps.select(available, ["int4"], is_arm=False)] == ["int4"]


def test_select_keeps_the_order_and_refuses_unknown_names() -> None:
    available = steps.steps(SWITCHES, quantise=False)
    assert [step.name for step in steps.select(available, ["norm", "stock"], is_arm=True)] == ["stock", "norm"]
    assert steps.select(available, None, is_arm=True) == available
    with pytest.raises(ValueError, match="--steps: expected some of stock, mimalloc, openmp, norm, got fast"):
        steps.select(available, ["norm", "fast"], is_arm=True)
