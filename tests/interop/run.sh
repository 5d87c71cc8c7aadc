#!/usr/bin/env bash
# Creates the environments and checkpoints of other projects, loads each checkpoint with hfq, and prints one table (`make interop`).
# Usage: tests/interop/run.sh [MAKER ...]. Makers: gptqmodel, llmcompressor, autoawq, bitsandbytes, torchao, quanto, hqq,
# transformers, modelopt, autoround, quark, mlx, gguf. The default is all of them. Environments and checkpoints are kept in .interop.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
HERE=$PWD/.interop
MADE=$HERE/made
MAKERS=tests/interop/makers
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} GPTQMODEL_CPU_WORKERS=2

environment() {  # environment NAME: creates the environment from its requirements, once
    local home=$HERE/$1
    [ -e "$home/.installed" ] && return
    $PYTHON -m venv "$home"
    if [ "$1" = gptqmodel ]; then
        "$home/bin/pip" install --quiet -c constraints.txt -r tests/interop/requirements.txt -e '.[test]'
        "$home/bin/pip" install --quiet --no-deps -r tests/interop/requirements-no-deps.txt
    else
        "$home/bin/pip" install --quiet -r "$MAKERS/requirements-$1.txt"
    fi
    if [ -e "$MAKERS/requirements-$1-no-deps.txt" ]; then
        "$home/bin/pip" install --quiet --no-deps --no-build-isolation -r "$MAKERS/requirements-$1-no-deps.txt"
    fi
    touch "$home/.installed"
}

mkdir -p "$MADE"
for maker in "${@:-}"; do
    [ -n "$maker" ] || set -- gptqmodel llmcompressor autoawq bitsandbytes torchao quanto hqq transformers modelopt autoround quark mlx gguf
done
for maker in "$@"; do
    case $maker in
        bitsandbytes | torchao | quanto | hqq | transformers) home=peers-b ;;
        *) home=$maker ;;
    esac
    environment "$home"
    "$HERE/$home/bin/python" "$MAKERS/make_$maker.py" "$MADE"
done
make --quiet .venv/.installed
shared=$(for folder in ../shared/checkpoints ../shared/checkpoints_2026; do [ ! -d $folder ] || ls -d $folder/*/; done)
PYTHONPATH=. .venv/bin/python tests/interop/table.py $shared "$MADE"/*/
