# SPDX-License-Identifier: Apache-2.0
"""Tensor, pipeline, data and expert parallelism: vLLM's device communicator over our collectives."""
