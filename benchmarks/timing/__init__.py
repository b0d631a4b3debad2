# SPDX-License-Identifier: Apache-2.0
"""The parts of the kernels benchmark: timed processes, the allocator's case, and the comparison with the model."""
