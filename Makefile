# SPDX-License-Identifier: Apache-2.0
# make demo | test | check | docs | dist | kernels | gpu-evidence | bench | clean
#
# Everything runs in .venv, which is made on first use. CONSTRAINTS= installs without the pinned versions;
# PY=/path/to/python uses an environment that has what is needed, and makes none.

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt

ifdef PY
READY :=
else
PY := .venv/bin/python
READY := .venv/.stamp
endif

.PHONY: venv check test demo docs dist kernels gpu-evidence bench clean

venv: $(READY)

.venv/.stamp: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[dev]'
	touch $@

check: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) tools/check_text.py
	$(PY) -m mkdocs build --quiet

test: $(READY)
	$(PY) -m pytest -q -rs

demo: $(READY)
	$(PY) -m flashkda.demo

docs: $(READY)
	$(PY) -m mkdocs build --quiet
	@echo "open build/docs/index.html"

dist: $(READY)
	rm -rf dist
	$(PY) -m build --no-isolation
	$(PY) tools/smoke_wheel.py dist/*.whl

kernels: $(READY)
	rm -rf build/kimi-k3-tp8
	$(PY) -m flashkda compile --preset kimi-k3 --tp 8 --arch sm_90a --out build/kimi-k3-tp8

gpu-evidence: $(READY)
	$(PY) -m tests.gpu.evidence

bench: $(READY)
	$(PY) -m benchmarks

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
