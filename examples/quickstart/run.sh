#!/usr/bin/env bash
# The main job from nothing: environment, data, training with two processes, checkpoint, an answer, a report.
# Run it again and it goes on where it stopped; remove runs/quickstart to begin anew.
source "$(dirname "${BASH_SOURCE[0]}")/../../.ci/environment.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [ ! -e runs/quickstart/data/valid.jsonl ]; then
  python examples/quickstart/stdlib_qa.py runs/quickstart/data
fi
# torchrun by its module: the torch of an outer environment leaves no command in this one.
python -m torch.distributed.run --nproc_per_node 2 --signals-to-handle SIGTERM,SIGINT,SIGUSR1 \
  pretrain_hybrid.py @examples/quickstart/sft.args "$@"
python examples/quickstart/finish.py @examples/quickstart/sft.args "$@"
