# SPDX-License-Identifier: Apache-2.0
"""``case`` runs a test over the kernels of tests/compile/cases.py; ``examiner`` compiles what the tests ask for.

pytest tests/compile --compile=full takes every row of the table with every tile on every architecture.
"""

from __future__ import annotations

import contextlib
import os

import pytest

from flashkda.errors import KernelBuildError
from flashkda.jit.resources import find_cuobjdump
from tests.compile.cases import full_cases, quick_cases
from tests.compile.examine import Examiner


def pytest_addoption(parser):
    parser.addoption("--compile", choices=("quick", "full"), default="quick", help="which kernels to compile")


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        # Unknown to a run that started outside this folder, which collects this file late.
        chosen = metafunc.config.getoption("--compile", default="quick")
        cases = full_cases() if chosen == "full" else quick_cases()
        metafunc.parametrize("case", cases, ids=lambda case: case.id)


@pytest.fixture(scope="session")
def examiner(request, tmp_path_factory):
    """An Examiner. It compiles ahead, in the order of the tests, with a worker a core."""
    try:
        find_cuobjdump()
    except KernelBuildError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.getbasetemp()
    in_xdist = "PYTEST_XDIST_WORKER" in os.environ
    if in_xdist:
        folder = folder.parent  # that of the whole run
    folder = folder / "examined"
    folder.mkdir(exist_ok=True)
    examiner = Examiner(folder, workers=1 if in_xdist else len(os.sched_getaffinity(0)))
    if not in_xdist:  # there, who runs which test is decided later
        for item in request.session.items:
            case = getattr(item, "callspec", None) and item.callspec.params.get("case")
            if case is not None and "examiner" in item.fixturenames:
                examiner.submit(case.spec)
    yield examiner
    examiner.close()


@pytest.fixture(scope="session", autouse=True)
def _start_compiling(request):
    """Lets the workers begin while tests that need none of them run."""
    if any("examiner" in getattr(item, "fixturenames", ()) for item in request.session.items):
        with contextlib.suppress(pytest.skip.Exception):  # the tests that ask for it will say so
            request.getfixturevalue("examiner")
