# make demo      see VinePPO learn: set-up, SFT, training, held-out accuracy before and after
# make test      all tests (under ten minutes)     make soak   the long trials
# make install   the set-up alone: .venv with what this machine needs
PYTHON ?= python3

.PHONY: demo test soak install
demo: .venv/installed
	.venv/bin/python -m analysis.demo

test: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python -m pytest -q -m "not soak"

soak: .venv/installed
	.venv/bin/python -m pytest -q -s -m soak

install: .venv/installed

.venv/installed: pyproject.toml install.py $(wildcard stubs/*/pyproject.toml)
	$(PYTHON) install.py
