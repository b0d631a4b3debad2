# SPDX-License-Identifier: Apache-2.0
"""Modelled cycles on Neoverse cores: executed instructions counted under emulation, priced by LLVM's core models."""
