# Each target works on a bare clone: it makes .venv and installs what it needs, the first time.
#   PYTHON=python3.12   the interpreter to build .venv with (3.10 or newer)
#   ARGS="..."          passed on: Hydra overrides for train, pytest options for test and test-all
#   WORKERS=2           how many tests run at once, or 0: one after the other, as --pdb needs
#   CONSTRAINTS=...     other versions: tests/constraints_oldest.txt, tests/constraints_newest.txt

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2
CONSTRAINTS ?= constraints.txt
CPU_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c $(CONSTRAINTS)
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)

.PHONY: help train bench smoke test test-all netns gpu mutations lint docs build notebook
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1	\2/p' Makefile | expand -t 16

train: $(VENV)/.ready-to-run ## train on the digits with 2 processes: make train ARGS="strategy=ddp"
	$(BIN)/dear-train $(ARGS)

bench: $(VENV)/.ready-to-run ## compare strategies side by side: make bench ARGS="entries=[ddp,dear]"
	$(BIN)/dear-bench $(ARGS)

SMOKE := tests/test_architecture.py tests/test_smoke.py tests/conf/test_groups.py::test_every_choice_composes_and_resolves
smoke: $(VENV)/.ready-to-test ## in a minute: the architecture's rules, every config, every exchange on two ranks
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(SMOKE) $(ARGS)

test: $(VENV)/.ready-to-test ## run the tests, without those marked slow (about 20 minutes on 2 cores)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(ARGS)

test-all: $(VENV)/.ready-to-test ## run every test: full matrices and package builds too
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

netns: $(VENV)/.ready-to-test ## run the tests that need root and iproute2: bytes and overlap on shaped links
	$(BIN)/python -m pytest -m netns $(ARGS)

gpu: $(VENV)/.ready-to-test ## in ten minutes at most: what needs a CUDA device, NCCL between ranks on one too
	$(BIN)/python -m tests.gpu $(ARGS)

mutations: $(VENV)/.ready-to-test ## remove each wait, flush and guard in turn: a test must fail
	$(BIN)/python -m tests.mutations $(ARGS)

lint: $(VENV)/.ready-to-test ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.ready-for-docs ## build the site from the pages and docstrings: docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -q -d docs/_build/doctrees -c docs . docs/_build/html

build: $(VENV)/.ready-to-test ## build the wheel and the source archive: dist/
	$(BIN)/python -m hatchling build

notebook: $(VENV)/.ready-for-notebook ## run docs/dear_notebook.ipynb again and keep its outputs
	$(BIN)/python docs/run_notebook.py

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "lightning-dear needs Python 3.10 or newer, this is %d.%d: use make PYTHON=python3.12 (or another)." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

# Without a GPU, torch comes from PyTorch's CPU index: PyPI's build for Linux brings gigabytes of CUDA.
# Asked for alone, because pip asks every index for every package; where that index cannot be
# reached, pip says so after one retry and takes the build that its other sources offer.
$(VENV)/.torch: $(VENV)/bin/python $(CONSTRAINTS)
ifeq ($(HAS_GPU),yes)
	$(PIP) torch
else
	$(PIP) --no-deps --retries 1 --timeout 15 --extra-index-url $(CPU_INDEX) torch
endif
	@touch $@

$(VENV)/.ready-to-run: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[apps]'
	@touch $@

$(VENV)/.ready-to-test: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[dev,notebook,tensorboard]'
	@touch $@ $(VENV)/.ready-to-run

$(VENV)/.ready-for-docs: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[docs]'
	@touch $@

$(VENV)/.ready-for-notebook: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[apps,notebook]'
	@touch $@ $(VENV)/.ready-to-run
