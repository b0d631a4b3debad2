# SPDX-License-Identifier: Apache-2.0
"""The steps of the throughput benchmark: which switches of vllm-arm are on at each, and what it quantises."""

from collections.abc import Iterable
from typing import NamedTuple

from vllm_arm import envs


class Step(NamedTuple):
    """``name`` is what ``--steps`` takes; ``switches`` come on at this step and stay on at the later ones.

    ``arguments`` are more of ``vllm serve``, at this step only.
    """

    name: str
    title: str
    switches: tuple[str, ...]
    arguments: tuple[str, ...] = ()


START = Step("stock", "stock vLLM", ())

_NAMED = (
    # The patches come with the first step that has the plugin: they mend vLLM, and make nothing faster.
    Step("mimalloc", "+ mimalloc", ("VLLM_ARM_PATCHES", "VLLM_ARM_MIMALLOC")),
    Step("openmp", "+ OpenMP runtime, binding", ("VLLM_ARM_OPENMP", "VLLM_ARM_BINDING")),
    Step("norm", "+ norm kernels", ("VLLM_ARM_NORM",)),
    Step("linear", "+ pre-packed linear", ("VLLM_ARM_LINEAR",)),
    Step("attention", "+ attention", ("VLLM_ARM_ATTENTION",)),
    Step("collectives", "+ collectives", ("VLLM_ARM_COLLECTIVES",)),
)

# Everything on, and the weights quantised while they load.
_QUANTISED = (
    Step("int8", "all, weights in int8", (), ("--quantization", "arm_int8")),
    Step("int4", "all, weights in int4", (), ("--quantization", "arm_int4")),
)


def steps(switches: Iterable[str] | None = None, *, quantise: bool = True) -> list[Step]:
    """The steps that these ``switches`` make up (None: all that vllm-arm has), the start first.

    A step whose switches do not exist is left out; a switch that no step names is a step of its own, after them. Last
    come those that ``quantise`` the weights.
    """
    existing = list(envs.switches() if switches is None else switches)
    found = [START]
    for step in _NAMED:
        own = tuple(name for name in step.switches if name in existing)
        if own:
            found.append(step._replace(switches=own))
    named = {name for step in _NAMED for name in step.switches}
    for name in existing:
        if name not in named:
            short = name.removeprefix("VLLM_ARM_").lower()
            found.append(Step(short, f"+ {short.replace('_', ' ')}", (name,)))
    return [*found, *_QUANTISED] if quantise else found


def select(available: list[Step], names: Iterable[str] | None, *, is_arm: bool) -> list[Step]:
    """The steps that ``names`` picks, in their own order; None: all, without int4 where ``is_arm`` is false.

    There its kernel is the portable one, which is made to be right and not to be fast. Each still has the switches of
    every step before it. Raises ``ValueError`` on a name that there is not.
    """
    if names is None:
        return [step for step in available if is_arm or step.name != "int4"]
    wanted = list(names)
    known = [step.name for step in available]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise ValueError(f"--steps: expected some of {', '.join(known)}, got {', '.join(unknown) or 'none'}")
    return [step for step in available if step.name in wanted]


def environment(step: Step, available: list[Step], *, is_arm: bool, needs_amx_tiles: bool) -> dict[str, str]:
    """The ``VLLM_ARM_*`` variables for ``step``: its switches and those of the steps before it on, the others off.

    Where vllm-arm is not active by itself (``is_arm`` false), the start runs without it, and the other steps force
    it. ``needs_amx_tiles``: vLLM on x86 with AMX needs vllm-arm even at the start, for it dies without the tiles that
    vllm-arm requests.
    """
    on = {name for each in available[: available.index(step) + 1] for name in each.switches}
    variables = {name: str(int(name in on)) for each in available for name in each.switches}
    if not is_arm:
        variables["VLLM_ARM_FORCE"] = str(int(bool(on) or needs_amx_tiles))
    return variables
