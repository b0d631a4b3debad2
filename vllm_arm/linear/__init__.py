# SPDX-License-Identifier: Apache-2.0
"""Linear layers: which engine multiplies, and vLLM's layers on top of it."""
