# `make demo` and `make test` work on a fresh clone: each sets up .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 2
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test quick test-serving coverage bench-gpu claim lint format docs dist clean

# An environment that is there already keeps the torch that it has. `make test TORCH=torch==2.13.0` takes another version
# than the newest, and `make test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt` tests the oldest of everything.
TORCH ?= torch
CONSTRAINTS ?= constraints.txt
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint $(CONSTRAINTS)

# torch comes first: other packages would otherwise pull in a build of their own choice.
$(VENV)/.core: setup.py $(CONSTRAINTS)
	test -e $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) "$(TORCH)"
	$(PIP_INSTALL) --editable .
	@touch $@

# torchvision must be of torch's own build: one that is not breaks Transformers, and no extra can say so. Thus what fits
# the torch that is there is installed, and removed again where it cannot be imported; examples that need it are skipped.
$(VENV)/.installed: $(VENV)/.core
	$(PIP_INSTALL) --editable ".[dev]"
	$(PIP_INSTALL) timm torchvision \
	    torch=="$$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))')" \
	    && $(BIN)/python -c "import torchvision" || $(BIN)/python -m pip uninstall --yes timm torchvision
	@touch $@

demo: $(VENV)/.core
	@OMP_NUM_THREADS=1 $(BIN)/python examples/demo.py

test: $(VENV)/.installed lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# What most often finds a mistake, in about a minute on two idle cores: ruff, and of every part the tests that take
# little.
QUICK := common operator generation conversion/test_golden.py eval/test_eval_model.py \
    head_tasks/test_head_tasks_practice.py kernels/test_kernels_native.py kernels/test_kernels_visibility.py \
    models/test_cached_forward.py models/test_configuration.py models/test_modeling.py training/test_training_data.py \
    training/test_training_packing.py training/test_training_recipe.py \
    training/test_training_run.py::test_only_norms_and_biases_do_not_decay_and_rates_are_of_muon_adamw_or_composition \
    "conversion/test_to_maxtext.py::test_architectures_read_back_identically[grouped_query_attention-]" \
    eval/test_eval_report.py::test_holms_rule_and_an_interval_that_ends_at_zero \
    "kernels/test_kernels_decode.py::test_output_equals_the_reference[Q2-S63-H3-D80-win32]" \
    "kernels/test_kernels_decode.py::test_heads_of_published_sizes_equal_the_reference[16]" \
    "kernels/test_kernels.py::test_output_and_gradients_equal_the_reference[left_padding-torch.float32]"
SLOW := hub_names or find_models or pax or grows_linearly or spare_the_work or damaged or too_small \
    or rules_of_torch or finite_differences or padded_batch or log_likelihoods or without_a_row \
    or of_the_harness or every_source_gives or fit_into_memory or rows_hold or hashes or scored_tokens or B3 or triton
quick: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet --numprocesses 2 --dist loadfile -k "not ($(SLOW))" $(addprefix tests/,$(QUICK))

# vLLM asks for older versions of some packages, so it has an environment of its own, .venv-serving.
test-serving:
	@scripts/test_serving --durations 5

# The tests of `make test`; counting lines takes half as long again.
coverage: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal --cov --cov-report term

# For what runs from the working tree without a network: .venv if there is one, else $(PYTHON) with what it has.
ANY_PYTHON := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

# Under nine minutes; a $(PYTHON) without .venv must have torch and Transformers. Every part runs, whatever has failed
# before it.
BENCH := $(ANY_PYTHON) -m benchmarks
FIGURES ?= runs/bench-gpu
bench-gpu:
	@status=0; \
	$(BENCH).attention --device cuda --seconds 140 --json $(FIGURES)/attention.json || status=1; \
	$(BENCH).models --only decode --device cuda --seconds 110 --json $(FIGURES)/decode.json || status=1; \
	$(BENCH).models --only train --device cuda --seconds 90 --json $(FIGURES)/train.json || status=1; \
	$(BENCH).models --only forward --device cuda --seconds 20 --json $(FIGURES)/forward.json || status=1; \
	exit $$status

# The study of language modelling (research/language_modelling): text, sweeps, tables and figures, on the GPU if there is
# one. Stopped at any moment, the same command resumes. TEXT="--code FOLDER --prose FOLDER" takes files of your own. What is
# measured goes to RESULTS, not to what is committed, which is of certain text. PROCESSES of one thread each train a model
# each: models of this size gain nothing from a second thread, and leave most of a GPU to others. OPTIONS go to every run.
PROCESSES ?= 2
OPTIONS ?=
RESULTS ?= runs/language-modelling/results
STUDY := OMP_NUM_THREADS=1 $(ANY_PYTHON) -m research.language_modelling
claim:
	@$(STUDY).prepare $(TEXT)
	@$(STUDY).run --processes $(PROCESSES) --results $(RESULTS) $(OPTIONS)
	@$(STUDY).speed --results $(RESULTS)
	@$(STUDY).report --results $(RESULTS)

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

# What a release uploads; nothing is uploaded here.
dist: $(VENV)/.installed
	scripts/dist

clean:
	rm -rf .venv* docs/_build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage
