# SPDX-License-Identifier: Apache-2.0
"""kill -9 at 200 random moments leaves a cache that the next process uses or repairs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_cache_survives_kills_at_any_moment():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tests.crash", "--kills", "200"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert (found["kills"], found["failed"], found["errors"]) == (200, 0, "")
    assert found["damaged"] == [] and found["temporary"] == []
    assert found["entries"] == 8
    # The kills have met every part of it.
    assert {"compile", "lock", "write", "rename", "evict"} <= set(found["phases"]), found["phases"]
