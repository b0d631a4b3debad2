# SPDX-License-Identifier: Apache-2.0
"""What the kernels and the whole of vLLM cost: modelled on Neoverse, and measured on the host."""
