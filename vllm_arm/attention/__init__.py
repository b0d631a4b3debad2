# SPDX-License-Identifier: Apache-2.0
"""Paged attention for vLLM: our backend under the name of its own, ``CPU_ATTN``."""
