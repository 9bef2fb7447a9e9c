#!/usr/bin/env bash
# Make the environment and the data, train with two processes, save a checkpoint, answer questions, write a report.
# A second call continues the run. Remove runs/quickstart to start again.
source "$(dirname "${BASH_SOURCE[0]}")/../../.ci/environment.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [ ! -e runs/quickstart/data/valid.jsonl ]; then
  python examples/quickstart/stdlib_qa.py runs/quickstart/data
fi
# This module is torchrun, run by the Python of .venv.
python -m torch.distributed.run --nproc_per_node 2 --signals-to-handle SIGTERM,SIGINT,SIGUSR1 \
  pretrain_hybrid.py @examples/quickstart/sft.args "$@"
python examples/quickstart/finish.py @examples/quickstart/sft.args "$@"
