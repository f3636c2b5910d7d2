# SPDX-License-Identifier: Apache-2.0
"""Tensors in, launch out: validation and binding, the custom ops, and the plain torch backend."""
