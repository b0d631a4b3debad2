# SPDX-License-Identifier: Apache-2.0
"""The parts of the throughput benchmark: steps, workloads, the measured process, results and reports."""
