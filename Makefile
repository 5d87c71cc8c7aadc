# The verbs a newcomer needs. PYTHON is the interpreter that makes the environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
unexport PYTHONDONTWRITEBYTECODE  # the processes of the tests would compile every module anew

.SILENT:  # each verb says in words what it does

.PHONY: demo test check docs site bench bench-fms tables gpu fuzz exhaustive stress interop clients clean

$(VENV)/.installed: setup.py constraints.txt
	echo "Making the environment $(VENV) and installing hfq and its dependencies (minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev,deepspeed,peft]'
	$(BIN)/python -c 'import hfq.integrations, transformers.models.llama.modeling_llama'  # compiles what is used, and once
	touch $@

demo: $(VENV)/.installed  ## create the environment, install, and run a model of 1 GB at a memory limit that it exceeds
	echo "Running hfq demo: a model of 1 GB at a memory limit that it exceeds"
	$(BIN)/hfq demo

test: $(VENV)/.installed  ## install what is needed and run the fast suite
	echo "Running the fast suite in 3 processes"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal --durations=15

check: $(VENV)/.installed  ## style, format, layers, types, spelling
	echo "Checking style, format, layers, types and spelling"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/codespell

docs: $(VENV)/.installed  ## write the pages and tables that are made from the sources, the tests and the benchmarks
	echo "Writing the pages and tables that are made from the sources, the tests and the benchmarks"
	PYTHONPATH=docs $(BIN)/python -m generate

site: $(VENV)/.installed  ## build the documentation into build/site; a broken link fails
	echo "Building the documentation into build/site"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[docs]'
	PYTHONPATH=docs NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: $(VENV)/.installed  ## measure loading, streaming and kernels on this machine, undisturbed; writes docs/benchmarks
	echo "Measuring loading, streaming and kernels; results go to docs/benchmarks"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,plots]'
	$(BIN)/python -m benchmarks load --out docs/benchmarks
	$(BIN)/python -m benchmarks large --out docs/benchmarks
	$(BIN)/python -m benchmarks stream --out docs/benchmarks
	$(BIN)/python -m benchmarks kernels --out docs/benchmarks
	$(BIN)/python -m benchmarks generate --out docs/benchmarks
	$(BIN)/python -m benchmarks plan --out docs/benchmarks

bench-fms: $(VENV)/.installed  ## measure IBM's FMS by itself and with hfq (Python 3.11 or 3.12); writes docs/benchmarks/fms.md
	echo "Measuring IBM FMS alone and with hfq; results go to docs/benchmarks"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,plots,fms]'
	$(BIN)/python -m benchmarks fms --out docs/benchmarks

tables: $(VENV)/.installed  ## train two small models and make the published tables of quality again; writes docs/benchmarks/quality.md
	echo "Training two small models and making the tables of docs/benchmarks/quality.md"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,plots]'
	$(BIN)/python -m benchmarks quality --out docs/benchmarks

gpu:  ## measure everything on one GPU in 9 minutes, with the packages of $(PYTHON); writes docs/benchmarks/gpu.md
	echo "Measuring on a GPU (at most 9 minutes); results go to docs/benchmarks"
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu --out docs/benchmarks

fuzz: $(VENV)/.installed  ## compare the header readers with safetensors, ggml and gguf on 1.5 million mutated headers; fails if they disagree
	echo "Comparing hfq's header reader with safetensors on 1,000,000 mutated headers (2 minutes)"
	PYTHONPATH=. $(BIN)/python tests/programs/fuzz_headers.py
	echo "Comparing hfq's reader of GGUF with ggml and gguf on 500,000 mutated headers (10 minutes)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c tests/interop/requirements.txt libggml-python
	PYTHONPATH=. $(BIN)/python tests/programs/fuzz_gguf_headers.py

exhaustive: $(VENV)/.installed  ## run the tests of many alike cases that .ci/run leaves out (about 20 minutes)
	echo "Running all cases of the accelerator suite, of compilers, and of kernels for other processors"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[compiler]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'exhaustive and not gpu and not peers' tests/kernels tests/regressions tests/benchmarks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'accelerator and slow' tests/accelerator
	if test -x .venv-triton/bin/python; then .venv-triton/bin/python -m pytest -n 2 -m '(every_dialect or exhaustive) and not gpu' tests/contract/test_contract_triton.py tests/kernels/cuda; fi

stress: $(VENV)/.installed  ## load in many processes, kill saves and quantizations, count descriptors; writes the table of SECURITY.md
	echo "Loading, killing and counting (about 10 minutes); the table goes to SECURITY.md"
	PYTHONPATH=. HFQ_DISABLE_CPP=1 $(BIN)/python tests/programs/stress.py --page SECURITY.md

interop:  ## make other projects' environments and checkpoints, and load every one with hfq; prints one table
	echo "Making other projects' environments and checkpoints, and loading each with hfq"
	tests/interop/run.sh

clients: $(VENV)/.installed  ## run transformers serve and chat, lm_eval, trl, sentence-transformers, and launchers under hfq launch
	echo "Installing other projects' programs into .venv-clients, and running them with hfq (about 5 minutes)"
	tests/clients/run.sh requirements.txt

clean:
	echo "Removing $(VENV), build output and caches"
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
