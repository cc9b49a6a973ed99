PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test pytest test-torch fuzz lint bench docs clean

# The package depends on torch, so torch is installed first and on its own: the resolver then has nothing to choose.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy scipy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all,dev]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m lowtide.cli.demo

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Lint and types beside the tests.
test: $(VENV)/.installed
	@$(MAKE) --no-print-directory -j2 lint pytest

# As many processes as cores, of one thread each: tensors in tests are too small for more.
# "worksteal" gives a process neighbouring tests, which share traces and searches. Hypothesis draws the same examples in
# each run; `pytest` without the profile draws others. Compiled files are written, whatever the environment says: without
# them each process compiles lowtide anew, and pytest all tests.
pytest: $(VENV)/.installed
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal --hypothesis-profile=ci

# The canaries of torch's private API and the tests of the engines on another version of torch: make test-torch
# TORCH=2.11.0. The environment is kept, one per version.
TORCH ?= 2.11.0
TORCH_VENV := .venv-torch-$(TORCH)
$(TORCH_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) numpy scipy
	$(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) -e ".[all,dev]"
	touch $@

test-torch: $(TORCH_VENV)/.installed
	OMP_NUM_THREADS=1 $(TORCH_VENV)/bin/python -m pytest -q -n auto --dist worksteal \
		tests/_compat tests/replay tests/eager tests/compiled tests/store

# Random programs under every engine against the plain model; each failure is shrunk and printed with its command.
N ?= 1000
SEED ?= 0
JOBS ?= 2
ENGINES ?= apply
fuzz: $(VENV)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=src:tests $(BIN)/python -m fuzz --num $(N) --seed $(SEED) --jobs $(JOBS) --engines $(ENGINES)

bench: $(VENV)/.installed
	$(BIN)/python bench/checkpoint.py

# The site, into site/: strict, so that a broken link is an error.
docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .venv-torch-* site
