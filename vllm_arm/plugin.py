# SPDX-License-Identifier: Apache-2.0
"""The entry points that vLLM calls. Both may be called several times in a process, and import nothing heavy."""

from vllm_arm.activation import is_active


def platform() -> str | None:
    """Entry point ``vllm.platform_plugins``: the platform class where vllm-arm acts, None where it steps aside.

    Called in every process at the first look at ``current_platform``. Raises ``ValueError`` on a ``VLLM_ARM_*``
    variable that is not understood.
    """
    if not is_active():
        return None
    from vllm_arm import envs

    envs.validate()
    _register_variables()
    return "vllm_arm.platform.ArmCpuPlatform"


def general() -> None:
    """Entry point ``vllm.general_plugins``: called in the front end, EngineCore and each worker."""
    if not is_active():
        return
    from vllm_arm.runtime import process

    process.prepare()
    from vllm_arm.linear import quantise_on_load

    quantise_on_load.register()
    if process.may_load_a_model():
        from vllm_arm.linear import expert_checkpoints, fp8, int4, int8, unquantised

        for module in (unquantised, int8, int4, fp8, expert_checkpoints):
            module.install()


def _register_variables() -> None:
    """Make vLLM know the ``VLLM_ARM_*`` variables, so that its check for unknown ones accepts them."""
    import vllm.envs

    from vllm_arm import envs

    for name, variable in envs.VARIABLES.items():
        vllm.envs.environment_variables.setdefault(name, lambda name=name, variable=variable: variable.read(name))
