# SPDX-License-Identifier: Apache-2.0
"""Timings. `python -m benchmarks.verify` is what `make bench` runs."""
