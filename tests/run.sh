#!/usr/bin/env bash
# Make the environment, check style and types, run all tests.
environment_extra=dev
source "$(dirname "${BASH_SOURCE[0]}")/../.ci/environment.sh"
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE  # else every process of a test compiles the package again
ruff check .
ruff format --check .
report=$(mktemp)
mypy > "$report" 2>&1 &  # it uses one processor only, so it runs beside the tests
types=$!
tests=0
python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder "$@" || tests=$?  # tests of one file share their runs
wrong=0
wait "$types" || wrong=$?
cat "$report"
rm "$report"
exit $((tests ? tests : wrong))
