# SPDX-License-Identifier: Apache-2.0
"""The import overlay: patches to vLLM, applied in memory as its modules are imported.

``startup`` installs the finder; ``series`` and ``diff`` read the patches, ``plan`` decides,
``overlay`` and ``loader`` act, ``report`` tells. Only the report is for other packages.
"""

from vllm_arm.patching.diff import PatchError
from vllm_arm.patching.report import PatchStatus, status, validate

__all__ = ["PatchError", "PatchStatus", "status", "validate"]
