# SPDX-License-Identifier: Apache-2.0
"""vLLM, fast on Arm Neoverse. Importing this package loads nothing: see plugin.py for what vLLM calls."""

__version__ = "0.1.0"
