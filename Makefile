# `make demo` and `make test` work on a fresh clone: each sets up .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 2
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-serving coverage bench-gpu claim claim-pairs claim-ablation lint format docs clean

# Twice --quiet leaves out pip's warnings; errors still show.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt

# torch comes first: other packages would otherwise pull in a build of their own choice.
$(VENV)/.installed: setup.py constraints.txt
	@echo "Setting up $(VENV) with torch, Transformers and the tools; the first time takes some minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) torch
	@$(PIP_INSTALL) --editable ".[dev]"
	@touch $@

demo: $(VENV)/.installed
	@OMP_NUM_THREADS=1 $(BIN)/python examples/demo.py

test: $(VENV)/.installed lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2

# vLLM asks for older versions of some packages, so it has an environment of its own, .venv-serving.
test-serving:
	@scripts/test_serving --durations 5

# The tests of `make test`; counting lines takes half as long again.
coverage: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --cov --cov-report term

# For what runs from the working tree without a network: .venv if there is one, else $(PYTHON) with what it has.
ANY_PYTHON := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

# Under nine minutes; a $(PYTHON) without .venv must have torch and Transformers. Every part runs, whatever has failed
# before it.
BENCH := $(ANY_PYTHON) -m dcformer.bench
bench-gpu:
	@status=0; \
	$(BENCH) attention --device cuda --seconds 140 || status=1; \
	$(BENCH) decode --device cuda --seconds 110 || status=1; \
	$(BENCH) train --device cuda --seconds 90 || status=1; \
	$(BENCH) model --device cuda --seconds 20 || status=1; \
	exit $$status

# The claim in miniature (docs/sweeps.md): sweeps of learning rates, of pairs of models and of the ablation, on the GPU if
# there is one. Two processes of one thread each, as models of this size gain nothing from a second one. Stopped at any
# moment, the same command resumes; where all is finished, it prints the tables and draws the figures again. Where there
# is no .venv and $(PYTHON) lacks a package, .venv is set up first.
# DATA_DIR=DIR names a folder with synthetic/synthetic_dataset.jsonl, which is fetched otherwise.
CLAIM_DATA := $(if $(DATA_DIR),--set sweep.data_dir=$(DATA_DIR))
SWEEP := @TTY_COMPATIBLE=0 OMP_NUM_THREADS=1 $(ANY_PYTHON) -m dcformer.training $(CLAIM_DATA)
CLAIM := benchmarks/results/head_tasks
claim:
	@test -x $(BIN)/python || $(PYTHON) -c "import accelerate, datasets, matplotlib, omegaconf, scipy, torch, typer" \
		2> /dev/null || $(MAKE) --no-print-directory $(VENV)/.installed
	@echo "Runs lie in runs/head-tasks-rates, runs/head-tasks-claim and runs/head-tasks-ablation."
	@$(MAKE) --no-print-directory --jobs 2 --keep-going claim-pairs claim-ablation
	@mkdir -p $(CLAIM)
	@for name in rates claim ablation; do \
		cp runs/head-tasks-$$name/results.json $(CLAIM)/$$name.json || exit 1; \
		cp runs/head-tasks-$$name/sweep.png $(CLAIM)/$$name.png || exit 1; \
	done
	@cp runs/head-tasks-claim/curves.png $(CLAIM)/claim_curves.png
	@cp runs/head-tasks-claim/pairs.csv $(CLAIM)/claim.csv
	@cp runs/head-tasks-claim/take_offs.csv $(CLAIM)/claim_take_offs.csv
	@echo "Results, figures, and what was spent by seed are copied to $(CLAIM)."

claim-pairs:
	$(SWEEP) head-tasks-rates
	$(SWEEP) head-tasks-claim

claim-ablation:
	$(SWEEP) head-tasks-ablation

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A warning is an error: a dead link, a page that no list names, a public name without a place in the reference.
docs: $(VENV)/.installed
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs docs/_build
	@echo "Open docs/_build/index.html."

clean:
	rm -rf $(VENV) .venv-serving docs/_build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage
