#!/usr/bin/env bash
# Passes the tests: makes the environment, checks style and types, runs the whole suite.
source "$(dirname "${BASH_SOURCE[0]}")/../.ci/environment.sh"
export OMP_NUM_THREADS=1
ruff check .
ruff format --check .
mypy
python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder "$@"  # a file of tests shares its runs
