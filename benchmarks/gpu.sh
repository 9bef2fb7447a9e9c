#!/usr/bin/env bash
# Run tests and benchmarks on a GPU machine, in steps, and collect their output at the end.
#
#     bash benchmarks/gpu.sh tests model ops ...
#
# The names of the steps are in the case statement below. Each step has a time limit; LIMIT_<step>=seconds changes it.
# Logs and result files go to $OUT (default runs/gpu). Compiled kernels are cached in runs/gpu_cache. The cache is packed
# into $OUT/gpu_cache.tar.xz at the end. If runs/gpu_cache.tar.xz exists and the cache is empty, it is unpacked at the
# start, so that a new machine does not compile the kernels again.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
out=${OUT:-runs/gpu}
mkdir -p "$out" runs/gpu_cache
[ -e runs/gpu_cache.tar.xz ] && [ -z "$(ls runs/gpu_cache)" ] && tar xJf runs/gpu_cache.tar.xz -C runs/gpu_cache
export TRITON_CACHE_DIR=$PWD/runs/gpu_cache/triton TORCHINDUCTOR_CACHE_DIR=$PWD/runs/gpu_cache/inductor
export TRITON_CACHE_AUTOTUNING=1 FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=$PWD/runs/gpu_cache/flash_attn_4
export PYTHONPATH=$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

# Run a command with a time limit, write its full log to $OUT, and print the end of the log.
# Arguments: name of the step, limit in seconds, command.
step() {
  local name=$1 limit=LIMIT_$1 begin=$SECONDS
  limit=${!limit:-$2}
  shift 2
  timeout "$limit" "$@" > "$out/$name.log" 2>&1
  local code=$?
  echo "=== $name: exit code $code after $((SECONDS - begin)) s"
  grep -v -i warn "$out/$name.log" | tail -n 14 | cut -c1-260
}

for name in "${@:?which steps?}"; do
  case $name in
    tests) step tests 400 python3 -m pytest tests/gpu -v -p no:cacheprovider --durations=5 ;;
    cuda_graphs) step cuda_graphs 300 python3 -m pytest tests/gpu/test_cuda_graphs.py tests/gpu/test_failed_captures_gpu.py -v -s -p no:cacheprovider --durations=5 ;;
    interpreter) step interpreter 200 python3 -m pytest tests/unit/ops/test_triton_interpreter.py -p no:cacheprovider ;;
    cpu) step cpu 500 python3 -m pytest tests -p no:cacheprovider -x ;;
    ops) step ops 250 python3 benchmarks/op_backends.py ;;
    shard8b) step shard8b 300 python3 benchmarks/model_step.py shard8b ;;
    model) step model 400 python3 benchmarks/model_step.py ;;
    graph_step) step graph_step 400 python3 benchmarks/graph_step.py ;;
    full_step) step full_step 400 python3 benchmarks/full_step.py ;;
    repeatability) step repeatability 400 python3 benchmarks/repeatability.py ;;
    full_iteration) step full_iteration 400 python3 -m pytest tests/gpu/test_full_iteration_gpu.py -v -s -p no:cacheprovider --durations=5 ;;
    graph_runs) step graph_runs 300 python3 benchmarks/graph_runs.py runs/real.zip ;;
    layouts) step layouts 400 torchrun --nproc_per_node "$(nvidia-smi -L | wc -l)" benchmarks/layouts.py ;;
    offload) step offload 300 python3 benchmarks/offload.py ;;
    offload_tests) step offload_tests 200 python3 -m pytest tests/gpu/test_offload_gpu.py -v -s -p no:cacheprovider --durations=5 ;;
    doctor) step doctor 500 python3 -m megatron_packed.cli.main doctor ;;
    tune_hybrid1b) step tune_hybrid1b 500 python3 benchmarks/tune_prediction.py hybrid1b ;;
    tune_shard8b) step tune_shard8b 500 python3 benchmarks/tune_prediction.py shard8b ;;
    capacity_cost) step capacity_cost 300 python3 benchmarks/capacity_cost.py ;;
    metadata) step metadata 330 python3 benchmarks/metadata_sync.py ;;
    generation) step generation 100 python3 benchmarks/generation.py ;;
    elementwise) step elementwise 120 python3 benchmarks/elementwise.py ;;
    step_edge) step step_edge 240 python3 benchmarks/step_edge.py runs/real.zip docs_longtail ;;
    gated_delta_rule) step gated_delta_rule 200 python3 benchmarks/gated_delta_rule.py ;;
    ssd) step ssd 300 python3 benchmarks/ssd.py ;;
    recipe_mfu) step recipe_mfu 240 python3 benchmarks/recipe_mfu.py runs/real.zip docs_longtail --graphs full_iteration local ;;
    beside_megatron) step beside_megatron 240 python3 benchmarks/beside_megatron.py runs/beside.zip ;;
    real_sizes) step real_sizes 580 python3 benchmarks/real_sizes.py runs/packs --gpus "$(nvidia-smi -L | wc -l)" ;;
    padded) step padded 300 python3 benchmarks/packed_vs_padded.py ;;
    real) step real 300 python3 benchmarks/train_real.py runs/real.zip ;;
    quickstart)
      python3 -m megatron_packed quickstart --prepare > "$out/data.log"
      step quickstart 200 torchrun --nproc_per_node 1 pretrain_hybrid.py @runs/quickstart/sft.args --bf16
      cp runs/quickstart/log.jsonl "$out/quickstart.jsonl" ;;
    *) echo "no step $name" >&2; exit 2 ;;
  esac
done
cp benchmarks/results/*.json "$out"
# Leave out the intermediate files of Triton: they are three quarters of the cache and are not read again.
tar cJf "$out/gpu_cache.tar.xz" -C runs/gpu_cache --exclude='*.ttir' --exclude='*.ttgir' --exclude='*.llir' --exclude='*.ptx' \
  --exclude='*.source' . && du -h "$out/gpu_cache.tar.xz"
