# SPDX-License-Identifier: Apache-2.0
"""What must be shown on a GPU: checks as plain functions, for `python -m tests.gpu.evidence` and for pytest."""
