#!/usr/bin/env bash
# Make the environment, train a small model with two processes, ask the model ten questions, and write a report.
# A second call continues the run. Remove runs/quickstart to start again.
source "$(dirname "${BASH_SOURCE[0]}")/../../.ci/environment.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec megatron-packed quickstart "$@"
