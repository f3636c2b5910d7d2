# SPDX-License-Identifier: Apache-2.0
"""CuTe DSL kernels: device functions by stage, then one file per kernel.

Stages, each standing once and used by every kernel that needs it:
``numerics`` (rounded arithmetic, exp, sigmoid), ``memory`` (pointers, vector access, bulk copies, clusters),
``window`` (which rows, slot and record belong to a request), ``conv``, ``gate``, ``token`` (norms of q and k, dots),
``delta_rule`` (the recurrence) and ``norm`` (the gated RMSNorm).

``place``, ``prologue`` and ``epilogue`` are the parts of ``verify`` around the rule.

Kernels: ``short_conv``, ``gated_rms_norm`` and ``verify`` (``fused_verify`` and ``record``, one body). ``specs`` turns
a geometry and a tile into a cache key and a compile recipe. Only ``specs`` may be imported where the DSL is absent.
"""
