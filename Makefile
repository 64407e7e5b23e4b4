# Everything from nothing but Python 3.11 or newer: each target makes the virtual environment it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_EVALUATION := $(VENV)/.ready-evaluation
READY_DOCS := $(VENV)/.ready-docs
TRAINERS := .venv-integrations
READY_TRAINERS := $(TRAINERS)/.ready
NEWEST := .venv-newest
READY_NEWEST := $(NEWEST)/.ready
OLDEST := .venv-oldest
READY_OLDEST := $(OLDEST)/.ready
MINUTES ?= 5
SEED ?= 0

.PHONY: help demo check test fuzz test-newest test-oldest test-evaluation test-integrations docs pictures wheel lint format bench clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

demo: $(READY)  ## see what MuSe is for, then train a tiny model with and without it (about 5 minutes on two idle cores; goes on if stopped)
	$(BIN)/muse demo

check: $(READY)  ## one case of each quick test, from every part (3 minutes on two quiet ARM cores)
	$(BIN)/python -m pytest -n 2 --dist worksteal -q --quick

test: $(READY)  ## the tests that need no GPU (12 minutes on two quiet ARM cores)
	$(BIN)/python -m pytest -n 2 --dist worksteal -q

fuzz: $(READY)  ## random calls of every attention: make fuzz MINUTES=5 SEED=0
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED)

test-newest: $(READY_NEWEST)  ## the tests of torch.compile, with the newest torch of the index instead of the pinned one: gigabytes
	$(NEWEST)/bin/python -c 'import torch; print("torch", torch.__version__)'
	$(NEWEST)/bin/python -m pytest -n 2 --dist worksteal -q -k compil

test-oldest: $(READY_OLDEST)  ## one case of each quick test, with the oldest torch that the package allows: gigabytes
	$(OLDEST)/bin/python -c 'import torch; print("torch", torch.__version__)'
	$(OLDEST)/bin/python -m pytest -n 2 --dist worksteal -q --quick -W 'ignore:Conversion of an array:DeprecationWarning'

test-evaluation: $(READY_EVALUATION)  ## the tests of examples/standard_tasks.py and of Parquet files, which need lm-eval: 620 MB
	$(BIN)/python -m pytest -q tests/lab/test_standard_tasks.py tests/lab/test_paper_data.py

test-integrations: $(READY_TRAINERS)  ## the tests of MuSe in torchtitan, OLMo-core, Megatron-core, the Trainer of transformers, Accelerate and TRL, which `make test` skips without them
	$(TRAINERS)/bin/python -m pytest -q tests/library/test_torchtitan.py tests/library/test_olmo_core.py tests/library/test_megatron.py tests/library/test_trainer_example.py tests/library/test_accelerate.py tests/library/test_sft_example.py

docs: $(READY_DOCS)  ## the documentation site, in out/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "look at it: $(BIN)/python -m http.server --directory out/site, then open http://localhost:8000"

pictures: $(READY)  ## the pictures of README.md and docs/, README's table, docs/paper.md and the tables of docs/scaling.md, docs/context-extension.md and docs/evidence/pretraining.md, from the records and from seeded data
	$(BIN)/python -m docs_build.speed_picture
	$(BIN)/python -m docs_build.quality_picture
	$(BIN)/python -m docs_build.seconds_picture
	$(BIN)/python -m docs_build.far_gain_picture
	$(BIN)/python -m docs_build.trained_table
	$(BIN)/python -m docs_build.extension_table
	$(BIN)/python -m docs_build.readme_table
	$(BIN)/python -m docs_build.algorithm_pictures
	$(BIN)/python -m docs_build.error_pictures
	$(BIN)/python -m docs_build.error_map
	$(BIN)/python -m docs_build.tutorial_output
	$(BIN)/python -m docs_build.paper_page
	$(BIN)/python -m docs_build.scaling_tables

wheel: $(READY)  ## the sdist and the wheel, in dist, after the tests of what they hold and say
	$(BIN)/python -m pytest -q tests/repository/test_release.py
	rm -rf dist
	$(BIN)/python -m hatchling build --directory dist

lint: $(READY)  ## formatting, lint, types, and the direction of imports
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(READY)  ## rewrite the sources as `make lint` wants them
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(READY)  ## time, memory and error on this machine, into out/bench (about eight minutes)
	$(BIN)/muse bench --device cpu --length 8k,16k,32k,64k --repeats 5

clean:  ## remove the virtual environments, results in out/, and caches
	rm -rf $(VENV) $(TRAINERS) $(NEWEST) $(OLDEST) out dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): requirements-dev.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(READY)

$(READY_EVALUATION): requirements-evaluation.txt $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-evaluation.txt
	touch $(READY_EVALUATION)

$(READY_DOCS): requirements-docs.txt $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	touch $(READY_DOCS)

$(READY_TRAINERS): requirements-dev.txt requirements-integrations.txt pyproject.toml
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -r requirements-integrations.txt
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(READY_TRAINERS)

$(READY_NEWEST): requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(NEWEST)
	sed -E '/^(torch|triton)==/d' requirements-dev.txt > $(NEWEST)/requirements.txt
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check torch -r $(NEWEST)/requirements.txt
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(READY_NEWEST)

# The interpreter of the Triton that comes with it takes arrays for numbers, which numpy 2.4 refuses and earlier ones warn of.
$(READY_OLDEST): requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	sed -E '/^(torch|triton|setuptools|numpy)==/d' requirements-dev.txt > $(OLDEST)/requirements.txt
	echo 'numpy<2.4' >> $(OLDEST)/requirements.txt
	sed -nE 's/^dependencies = .*"torch>=([0-9.]+)".*/torch==\1.*/p' pyproject.toml >> $(OLDEST)/requirements.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -r $(OLDEST)/requirements.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(READY_OLDEST)
