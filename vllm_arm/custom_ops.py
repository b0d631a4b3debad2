# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's C++ ops its layers may call on this CPU."""

from typing import TYPE_CHECKING

from vllm_arm import _host, activation
from vllm_arm.logs import get_logger, info_once

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)


def leave_out(vllm_config: "VllmConfig") -> None:
    """On an Arm CPU without bfloat16 instructions, have layers run torch's ops in place of vLLM's.

    vLLM's wheels for Arm are built for CPUs that have these instructions: its rotary embedding and its activations
    would end the process by SIGILL. An op that the user asks for by ``custom_ops`` stays.
    """
    if not activation.is_arm() or _host.host_features().bfloat16:
        return
    compilation = vllm_config.compilation_config
    if "all" not in compilation.custom_ops:
        return
    compilation.custom_ops = ["none" if name == "all" else name for name in compilation.custom_ops]
    info_once(logger, "vLLM's custom ops are not used: its build needs bfloat16 instructions, which this CPU lacks")
