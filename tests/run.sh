#!/usr/bin/env bash
# Make the environment, check style and types, run all tests.
environment_extra=dev
source "$(dirname "${BASH_SOURCE[0]}")/../.ci/environment.sh"
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE  # else every process of a test compiles the package again
ruff check .
ruff format --check .
mypy
python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder "$@"  # tests of one file share their runs
