# SPDX-License-Identifier: Apache-2.0
"""The floors of the benchmark, cross-compiled: the state is really read (and written), once, in 16-byte accesses."""

from __future__ import annotations

import pytest

from flashkda.jit.compiler import inspect_kernel


@pytest.mark.compile
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_floors_load_what_they_say(state_dtype: str) -> None:
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from benchmarks import floors

    for function, arguments in floors.specs("sm_90a", state_dtype):
        key, make = function(*arguments)
        resources = inspect_kernel(key, make, sass=True)
        loads = dict(key.params)["loads"] if key.name != "floor_empty" else 0
        stores = loads if key.name == "floor_state_copy" else 0
        sass = resources.sass or ""
        assert resources.ptx.count("ld.global.v4") == sass.count("LDG.E.128") == loads
        assert resources.ptx.count("st.global.v4") == sass.count("STG.E.128") == stores
        assert resources.ptx.count("griddepcontrol.wait") == 1
        assert resources.spill_bytes == resources.local_bytes == 0
