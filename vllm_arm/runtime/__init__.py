# SPDX-License-Identifier: Apache-2.0
"""The process: what the machine offers it and which CPUs and memory its threads use."""
