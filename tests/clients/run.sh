#!/usr/bin/env bash
# Runs programs of other projects under `hfq launch`, in an environment above .venv (`make clients`).
# Usage: tests/clients/run.sh REQUIREMENTS [ARGUMENTS of pytest]
set -euo pipefail
cd "$(dirname "$0")/../.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
python3 -m venv --without-pip .venv-clients
(cd .venv/lib/python3*/site-packages && pwd) > "$(echo .venv-clients/lib/python3*/site-packages)/below.pth"
.venv/bin/pip --python .venv-clients/bin/python install --quiet -c constraints.txt -r "tests/clients/$1"
export PATH="$PWD/.venv-clients/bin:$PWD/.venv/bin:$PATH"  # accelerate and deepspeed are in .venv alone
.venv-clients/bin/python -m pytest -m clients --durations=0 --durations-min=1 tests/clients "${@:2}"
