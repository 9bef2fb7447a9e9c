#!/usr/bin/env bash
# The quickstart's run in another parallel layout, with the same losses: examples/layouts/run.sh NAME [FLAGS]
# On several machines add torchrun's --nnodes and --rdzv-endpoint. Tensor-parallel ranks have consecutive numbers.
source "$(dirname "${BASH_SOURCE[0]}")/../../.ci/environment.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

name=${1:-}
case $name in
  # two replicas; each updates half of the weights, and communication overlaps with the passes
  data) processes=2 layout=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather) ;;
  # two processes share each matrix
  tensor) processes=2 layout=(--tensor-model-parallel-size 2) ;;
  # two processes share each matrix, and the tokens between the layers: less memory for activations
  tensor-sequence) processes=2 layout=(--tensor-model-parallel-size 2 --sequence-parallel) ;;
  # two replicas of two processes; each replica updates half of the weights
  tensor-data) processes=4 layout=(--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer) ;;
  # two processes share the tokens of each pack, exchange heads for attention, and pass the states of Mamba layers
  context) processes=2 layout=(--context-parallel-size 2) ;;
  # keys and values pass around a ring; documents are padded to multiples of 4, so the packs differ
  context-ring) processes=2 layout=(--context-parallel-size 2 --cp-comm-type p2p --cp-partition-mode zigzag) ;;
  # two processes share each matrix, and two such pairs share each pack
  tensor-context)
    processes=4 layout=(--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2)
    layout+=(--use-distributed-optimizer)
    ;;
  # two processes share the experts, and each trains on other packs
  experts) processes=2 layout=(--expert-model-parallel-size 2) ;;
  # whole experts on four processes; pairs of processes share all other matrices
  tensor-experts)
    processes=4 layout=(--tensor-model-parallel-size 2 --sequence-parallel)
    layout+=(--expert-model-parallel-size 4 --expert-tensor-parallel-size 1)
    ;;
  *)
    names="data|tensor|tensor-sequence|tensor-data|context|context-ring|tensor-context|experts|tensor-experts"
    echo "usage: $0 $names [FLAGS]" >&2
    exit 2
    ;;
esac

megatron-packed quickstart --prepare
exec megatron-packed train --nproc-per-node "$processes" @runs/quickstart/sft.args "${layout[@]}" \
  --save "runs/layouts/$name" --load "runs/layouts/$name" --log-jsonl "runs/layouts/$name/log.jsonl" "${@:2}"
