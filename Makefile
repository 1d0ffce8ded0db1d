# Every target sets itself up: .venv is made from a lock file on the first call, a second call installs nothing.
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
# A CPU build of torch may lie in a folder that pip is told of: uv is told of it too.
FIND_LINKS = $$(for key in :env:.find-links global.find-links install.find-links; do \
	$(BIN)/python -m pip config get $$key 2>/dev/null; done | tr -s '[:space:]' ',' | sed 's/,$$//')

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile

train: $(INSTALLED) ## train a model: the quickstart on a CPU, one_gpu.toml on a GPU; ARGS="run.steps=5" overrides keys
	$(BIN)/torchrun --nproc-per-node 1 launch.py --config $(CONFIG) $(ARGS)

test: check ## everything this machine can test; what CI runs
	$(BIN)/pytest -q

fast: $(INSTALLED) ## the tests that need no engine, in about two minutes
	$(BIN)/pytest -q -m "not e2e and not gpu and not soak"

bench: $(INSTALLED) ## the benchmarks, one after the other
	@set -e; for script in profiling/bench/*.py; do \
		[ -e "$$script" ] || { echo "no benchmarks yet"; break; }; \
		[ "$${script##*/}" != __init__.py ] || continue; \
		echo "== $$script"; $(BIN)/python "$$script"; done

soak: $(INSTALLED) ## the tests that run for hours
	@$(BIN)/pytest -q -m soak || { code=$$?; [ $$code -eq 5 ] && echo "no soak tests yet" || exit $$code; }

check: $(INSTALLED) ## ruff, pyright, and the lines of code per folder
	$(BIN)/ruff check .
	$(BIN)/pyright
	@$(BIN)/python profiling/lines.py engine evals profiling

install: $(INSTALLED) ## .venv with everything in it

$(INSTALLED): $(LOCK) pyproject.toml | .venv
	@echo "installing $(LOCK)"
	@export UV_FIND_LINKS="$(FIND_LINKS)" VIRTUAL_ENV=.venv; \
	sync="$(BIN)/uv pip sync --quiet --compile-bytecode $(LOCK)"; \
	$$sync $(if $(filter cpu,$(HARDWARE)),|| { echo "trying PyTorch's own index"; $$sync --torch-backend cpu; })
	@VIRTUAL_ENV=.venv $(BIN)/uv pip install --quiet --no-deps --editable .
	@rm -f .venv/installed-*
	@touch $@

.venv:
	@for python in python3 python3.12 python3.11; do \
		$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null || continue; \
		$$python -m venv .venv && $(BIN)/python -m pip install --quiet uv==$(UV_VERSION) && exit 0; \
		rm -rf .venv; \
		echo "$$python cannot make .venv: it needs its venv module (on Debian: python3-venv) and a package index" >&2; \
		exit 1; \
	done; \
	echo "no Python 3.11 or 3.12 on the PATH: install one as python3, python3.12 or python3.11" >&2; exit 1

lock: .venv ## resolve pyproject.toml anew into the lock files
	@export UV_FIND_LINKS="$(FIND_LINKS)" VIRTUAL_ENV=.venv; \
	compile="$(BIN)/uv pip compile --quiet --upgrade --python-version 3.11 --no-annotate --no-header pyproject.toml"; \
	$$compile --extra cpu --extra dev --overrides requirements/overrides.txt --output-file requirements/cpu.lock && \
	$$compile --extra gpu --extra dev --python-platform x86_64-manylinux_2_28 --output-file requirements/gpu.lock

clean: ## remove .venv and the tools' caches; runs/ stays
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
