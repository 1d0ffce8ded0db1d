# Every target sets itself up: the first call makes .venv from a lock file, a second one installs nothing.
SHELL := /bin/sh
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help train test fast bench soak check lock install clean

UV_VERSION := 0.13.9
BIN := .venv/bin
HARDWARE := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
LOCK := requirements/$(HARDWARE).lock
INSTALLED := .venv/installed-$(HARDWARE)
CONFIG := configs/$(if $(filter gpu,$(HARDWARE)),one_gpu,quickstart).toml

UV := $(BIN)/uv pip
INSTALL := $(UV) install --python $(BIN)/python --no-deps --compile-bytecode
SYNC := $(UV) sync --python $(BIN)/python --compile-bytecode $(LOCK)
# A machine whose package index has no CPU build of torch takes it from PyTorch's own, and the rest as before.
FROM_PYTORCH_INDEX = [ $(HARDWARE) = cpu ] && echo "once more, with torch from PyTorch's own index" && \
	$(INSTALL) --torch-backend cpu $$(grep '^torch==' $(LOCK))
COMPILE := $(UV) compile --quiet --upgrade --no-annotate --no-header --python-version 3.11 \
	--python-platform x86_64-manylinux_2_28 --extra dev --overrides requirements/overrides.txt
# Folders of wheels that pip is told of: a CPU build of torch may lie there, so uv is told of them too.
FIND_LINKS = $$(for key in :env:.find-links global.find-links install.find-links; do \
	$(BIN)/python -m pip config get $$key 2>/dev/null; done | tr -s '[:space:]' ',' | sed 's/,$$//')

help: ## show this list
	@sed -n 's/^\([a-z]*\):[^#]*## /\1	/p' Makefile

train: $(INSTALLED) ## train: quickstart.toml on a CPU, one_gpu.toml on a GPU; ARGS="run.steps=5" overrides keys
	$(BIN)/python launch.py --config $(CONFIG) $(ARGS)

test: check ## everything that this machine can test; what CI runs
	$(BIN)/pytest -q -m "not soak"

fast: $(INSTALLED) ## the tests that start no engine
	$(BIN)/pytest -q -m "not e2e and not gpu and not soak"

bench: $(INSTALLED) ## the benchmarks, one after the other
	$(BIN)/python -m profiling.bench.weight_update
	$(BIN)/python -m profiling.bench.switch_memory
	$(BIN)/python -m profiling.bench.loop_lag
	$(BIN)/python -m profiling.bench.head_dtype
	$(BIN)/python -m profiling.bench.throughput
	$(BIN)/python -m profiling.bench.makespan
	$(BIN)/python -m profiling.bench.evals

soak: $(INSTALLED) ## the tests that run for hours
	@$(BIN)/pytest -q -m soak || { [ $$? -eq 5 ] && echo "there are no soak tests yet"; }

check: $(INSTALLED) ## ruff, pyright, and the lines of code per folder
	$(BIN)/ruff check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
	@$(BIN)/python profiling/lines.py engine evals profiling

install: $(INSTALLED) ## make .venv with everything in it

$(INSTALLED): $(LOCK) requirements/optional.txt pyproject.toml | .venv
	@echo "installing $(LOCK) into .venv"
	@export UV_FIND_LINKS="$(FIND_LINKS)"; $(SYNC) || { $(FROM_PYTORCH_INDEX) && $(SYNC); }
	@$(INSTALL) --quiet --requirements requirements/optional.txt || echo "going on without (is there a C compiler?)"
	@$(INSTALL) --quiet --editable .
	@rm -f .venv/installed-*
	@touch $@

.venv:
	@for python in python3 python3.12 python3.11; do \
		$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null || continue; \
		$$python -m venv .venv && $(BIN)/python -m pip install -qq uv==$(UV_VERSION) && exit 0; \
		rm -rf .venv; \
		echo "$$python could not make .venv: it needs its venv module (Debian: python3-venv) and a package index" >&2; \
		exit 1; \
	done; \
	echo "Farfield needs Python 3.11 or 3.12 as python3, python3.12 or python3.11 on the PATH" >&2; exit 1

lock: .venv ## resolve pyproject.toml anew into the lock files
	@UV_FIND_LINKS="$(FIND_LINKS)" $(COMPILE) --extra cpu --overrides requirements/overrides-cpu.txt \
		--output-file requirements/cpu.lock pyproject.toml
	@$(COMPILE) --extra gpu --output-file requirements/gpu.lock pyproject.toml

clean: ## remove .venv and the tools' caches; runs/ stays
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
