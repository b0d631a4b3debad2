# SPDX-License-Identifier: Apache-2.0
"""Whether vllm-arm acts on this machine. Read at interpreter start, so it imports only what is loaded already."""

import os
import sys


def is_arm() -> bool:
    """Whether this is aarch64 Linux."""
    return sys.platform == "linux" and os.uname().machine == "aarch64"


def is_active() -> bool:
    """True on aarch64 Linux; elsewhere only where ``VLLM_ARM_FORCE=1`` asks for the portable kernels."""
    if is_arm():
        return True
    from vllm_arm import envs

    return envs.VLLM_ARM_FORCE
