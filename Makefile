# `make demo` and `make test` are all a newcomer needs; both begin with `make setup`.

PYTHON ?= python3
# The version of torch that CI runs; `make test-torch` tries another one.
TORCH ?= 2.13.0
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Every process of a test imports the package; it is compiled once.
test test-all test-fast test-gpu docs: export PYTHONDONTWRITEBYTECODE :=
# The zoo is compared to the last bit: MKL shall not round by where in memory arrays lie.
zoo: export MKL_CBWR ?= AUTO
# Files in the order of their names: sorted by size, the few long ones came last, one at a time.
PARALLEL := --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

SEEDS ?= 0:200
PROCESSES ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-fast test-gpu lint types types-of-torch format test-torch zoo bench experiments fuzz mutants source-mutants fuzz-files damaged-files schema docs clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(INSTALLED) ## make .venv and install what everything needs; skipped while pyproject.toml stands

$(INSTALLED): pyproject.toml .ci/install-torch
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "shardwright needs Python 3.11 or later; name one: make setup PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	.ci/install-torch $(BIN)/python $(TORCH)
	@# Naming torch again has pip refuse a version that shardwright does not take.
	$(BIN)/python -m pip install --quiet --editable '.[dev]' 'torch==$(TORCH)'
	@# Native kernels are built here, where there is a compiler; without one a warning says so.
	$(BIN)/python -c 'from shardwright.kernels.native.library import load; load()'
	@touch $@

demo: setup ## a real model, cut in two, run on two processes, compared with the whole
	$(BIN)/shardwright demo

test: setup ## lint, types and the tests that need no GPU
	@$(MAKE) --no-print-directory --jobs=2 lint types types-of-torch
	$(BIN)/pytest $(PARALLEL) -m 'not gpu and not processes and not exhaustive'
	@# These watch processes by the clock: two at a time at most. Other files are not even imported.
	$(BIN)/pytest $(PARALLEL) --maxprocesses 2 -m 'processes and not gpu and not exhaustive' \
		$$(grep -rl --include='test_*.py' 'mark\.processes' tests)

test-all: test ## those, and the tests that try everything there is
	$(BIN)/pytest $(PARALLEL) -m 'exhaustive and not gpu'

test-fast: setup ## the tests that need nothing but torch
	$(BIN)/pytest $(PARALLEL) -m 'not gpu and not processes and not workers and not zoo and not exhaustive'

test-torch: ## the fast tests and the demo on another torch, in .venv-torch-VERSION: make test-torch TORCH=2.14.1
	TORCH_ANY_BUILD=1 $(MAKE) VENV=.venv-torch-$(TORCH) TORCH=$(TORCH) demo types-of-torch test-fast

test-gpu: setup ## the tests that need a GPU
	$(BIN)/pytest -m gpu

lint: setup ## ruff: format and rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup ## mypy --strict over shardwright/
	$(BIN)/mypy

# Tests hold generated files to mypy, which is told about torch here, beside `types`.
types-of-torch: setup
	$(BIN)/mypy --strict --config-file= --cache-dir=.mypy_cache/generated -c 'import torch'

format: setup ## rewrite the sources as `make lint` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

zoo: setup ## capture, cut, run, train and compare 25 model families; prints the tables of docs/zoo.md
	$(BIN)/python -m zoo
	$(BIN)/python -m zoo --training

bench: setup ## planning, build time, throughput, messages, training, the simulator against reality, compiled programs, generated stages
	$(BIN)/python -m benchmarks.build
	$(BIN)/python -m benchmarks.runner
	$(BIN)/python -m benchmarks.tensor
	$(BIN)/python -m benchmarks.comm
	$(BIN)/python -m benchmarks.pipeline
	$(BIN)/python -m benchmarks.planning
	$(BIN)/python -m benchmarks.simulator
	$(BIN)/python -m benchmarks.executor
	$(BIN)/python -m benchmarks.synchronous

experiments: setup ## train three models on 1, 2 and 4 devices; writes tables and plots to benchmarks/results/
	$(BIN)/python -m benchmarks.experiments

fuzz: setup ## draw programs, and go every way with each: SEEDS=0:200, PROCESSES=2
	$(BIN)/python -m fuzz --seeds $(SEEDS) --processes $(PROCESSES)

mutants: setup ## 50,000 changed lowered tasks under AddressSanitizer: make mutants FIRST=0 END=50000 AVX512=
	$(BIN)/python -m tests.kernels.legality.mutation $(or $(FIRST),0) $(or $(END),50000) --sanitize $(if $(AVX512),--avx512)

source-mutants: setup ## mutants of the package's own code, and whether its tests detect them: N=80 SEED=17
	MKL_CBWR=AUTO $(BIN)/python -m tests.source_mutants --count $(or $(N),80) --seed $(or $(SEED),17)

fuzz-files: setup ## mutants of pipeline files, refused or legal: make fuzz-files N=20000 SEED=0
	MKL_CBWR=AUTO $(BIN)/python -m tests.pipeline.mutation --count $(or $(N),1000) --seed $(or $(SEED),0)

damaged-files: setup ## mutants of plans, clusters, profiles, checkpoints and logs: make damaged-files N=300 SEED=0
	$(BIN)/python -m tests.runtime.damaged --count $(or $(N),300) --seed $(or $(SEED),0)

schema: setup ## write the file format's JSON Schema after a change of its types
	$(BIN)/shardwright schema --output shardwright/pipeline/schema.json

docs: setup ## run every example of README.md and docs/
	$(BIN)/pytest tests/test_docs.py

clean: ## remove the virtual environment and caches
	rm -rf .venv .venv-torch-* .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
