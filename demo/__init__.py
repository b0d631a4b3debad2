# SPDX-License-Identifier: Apache-2.0
"""``make demo``: vLLM with vllm-arm, from start to stop."""
