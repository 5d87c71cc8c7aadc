# The verbs a newcomer needs. PYTHON is the interpreter that makes the environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
unexport PYTHONDONTWRITEBYTECODE  # the processes of the tests would compile every module anew

.PHONY: demo test check docs site bench bench-fms tables interop clean

$(VENV)/.installed: setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev,deepspeed,peft]'
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

docs: $(VENV)/.installed  ## write the pages and tables that are made from the sources, the tests and the benchmarks
	PYTHONPATH=docs $(BIN)/python -m generate

site: $(VENV)/.installed  ## build the documentation into build/site; a broken link fails
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: $(VENV)/.installed  ## measure loading, streaming and kernels on this machine, undisturbed; writes docs/benchmarks
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	$(BIN)/python -m benchmarks load --out docs/benchmarks
	$(BIN)/python -m benchmarks stream --out docs/benchmarks
	$(BIN)/python -m benchmarks kernels --out docs/benchmarks
	$(BIN)/python -m benchmarks generate --out docs/benchmarks
	$(BIN)/python -m benchmarks plan --out docs/benchmarks

bench-fms: $(VENV)/.installed  ## measure IBM's FMS by itself and with hfq (Python 3.11 or 3.12); writes docs/benchmarks/fms.md
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench,fms]'
	$(BIN)/python -m benchmarks fms --out docs/benchmarks

tables: $(VENV)/.installed  ## train two small models and make the published tables of quality anew; writes docs/benchmarks/quality.md
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	$(BIN)/python -m benchmarks quality --out docs/benchmarks

interop:  ## make other projects' environments and checkpoints, and load every one with hfq; prints one table
	tests/interop/run.sh

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
