# The verbs a newcomer needs. PYTHON is the interpreter that makes the environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
UV := $(VENV)/uv/bin/uv
# uv installs in a fifth of pip's time; it reads no PIP_…, and what these say is passed on (where pip.conf says it, set UV_DEFAULT_INDEX)
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
export UV_HTTP_TIMEOUT ?= 180
unexport PYTHONDONTWRITEBYTECODE  # the processes of the tests would compile every module anew

.PHONY: demo test check docs bench interop clean

$(VENV)/.installed: setup.py constraints.txt
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt --target $(VENV)/uv uv
	$(UV) pip install --quiet --python $(BIN)/python -c constraints.txt pip -e '.[dev,deepspeed,peft]'
	$(BIN)/python -c 'import hfq.integrations, transformers.models.llama.modeling_llama'  # compiles what is used, and once
	touch $@

demo: $(VENV)/.installed  ## create the environment, install, and run the main job on a small real model
	$(BIN)/hfq demo

test: $(VENV)/.installed  ## install what is needed and run the fast suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

check: $(VENV)/.installed  ## style, layers, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

docs: $(VENV)/.installed  ## write docs/formats.md from the registry
	$(BIN)/hfq formats --markdown > docs/formats.md

bench: $(VENV)/.installed  ## measure loading, streaming and kernels on this machine, undisturbed; writes docs/benchmarks
	$(UV) pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[dev,bench]'
	$(BIN)/hfq bench load --out docs/benchmarks
	$(BIN)/hfq bench stream --out docs/benchmarks
	$(BIN)/hfq bench kernels --out docs/benchmarks
	$(BIN)/hfq bench generate --out docs/benchmarks

interop:  ## make other projects' environments and checkpoints, and load every one with hfq; prints one table
	tests/interop/run.sh

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
