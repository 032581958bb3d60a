# Two commands on a fresh machine with Python >= 3.11, git and make: `make run` and `make test`.
# Each sets up .venv the first time; afterwards only a changed setup.py or constraints.txt installs anything.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# PyPI's torch for Linux brings gigabytes of CUDA libraries; `make TORCH_INDEX=URL …` takes it from an index of CPU wheels.
TORCH_FLAGS := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# As in an activated environment: Metaflow starts the other nodes of a local gang as `python`.
INSIDE := PATH="$(BIN):$$PATH"

.PHONY: run test lint clean
run: $(VENV)/.installed-run
	$(INSIDE) python flows/train_flow.py run $(ARGS)

test: $(VENV)/.installed-dev
	$(INSIDE) python -m pytest $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .hypothesis src/*.egg-info

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "flextrain needs Python >= 3.11, not " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv --clear $(VENV)

$(VENV)/.installed-torch: $(VENV)/pyvenv.cfg constraints.txt
	@echo "installing into $(VENV), once, about a minute"
	@$(PIP) install --quiet --no-deps $(TORCH_FLAGS) -c constraints.txt setuptools torch
	@touch $@

$(VENV)/.installed-run: $(VENV)/.installed-torch setup.py
	@$(PIP) install --quiet --no-build-isolation -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-torch setup.py
	@$(PIP) install --quiet --no-build-isolation -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.installed-run $@
