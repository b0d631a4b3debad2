# SPDX-License-Identifier: Apache-2.0
"""An emulated Arm server on an x86-64 machine: a Debian arm64 root run by QEMU user emulation."""
