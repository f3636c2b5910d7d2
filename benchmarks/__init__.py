# SPDX-License-Identifier: Apache-2.0
"""Timings. `python -m benchmarks` is what `make bench` runs."""
