"""Megatron-LM's flags that are accepted and change nothing, with what this project does instead.

The trained model is the same with and without such a flag. A run prints one line for each given flag.
Flags that are accepted because their effect is always on are in ``flags.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_packed.config.run import RunConfig


@dataclass(frozen=True)
class AcceptedFlag:
    """Flag of Megatron that is no option and is accepted.

    Args:
        reason: the fact that makes the flag unnecessary, or what is done instead.
        values: the accepted values; None for a switch, () for any values unless ``differs``
            returns a problem.
        differs: function of (values, run) that returns the problem of the values; empty if they are
            accepted.
    """

    reason: str
    values: tuple[str, ...] | None = None
    differs: Callable[[tuple[str, ...], RunConfig], str] | None = None


ANY: tuple[str, ...] = ()
"""Any values are accepted."""


def _table(*groups: tuple[str, dict[str, tuple[str, ...] | None]]) -> dict[str, AcceptedFlag]:
    """Return groups of (line, accepted values by flag) as one table; no flag is in two groups."""
    found: dict[str, AcceptedFlag] = {}
    for reason, flags in groups:
        assert not found.keys() & flags.keys()
        found |= {flag: AcceptedFlag(reason, values) for flag, values in flags.items()}
    return found


def _switches(names: str) -> dict[str, tuple[str, ...] | None]:
    return dict.fromkeys(names.split())


def _any(names: str) -> dict[str, tuple[str, ...] | None]:
    return dict.fromkeys(names.split(), ANY)


_FORMATS = ("torch_dist", "torch", "torch_dcp", "zarr", "fsdp_dtensor")
_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")

ACCEPTED: dict[str, AcceptedFlag] = _table(
    (
        "checkpoints are written as safetensors and a JSON manifest; megatron-packed convert "
        "--from-megatron reads those of Megatron",
        _switches(
            "--use-dist-ckpt --auto-detect-ckpt-format --dist-ckpt-save-pre-mcore-014 "
            "--ckpt-convert-update-legacy-dist-opt-format --ckpt-drop-redundant-extra-state "
            "--no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load"
        )
        | {"--ckpt-format": _FORMATS, "--dist-ckpt-format": _FORMATS},
    ),
    (
        "--async-save writes checkpoints with one thread of each process",
        _any("--async-ckpt-cpu-priority --async-ckpt-io-priority --dist-ckpt-workers")
        | {"--async-strategy": ("nvrx", "mcore"), "--async-ckpt-use-cpu-shm": None},
    ),
    (
        "all ranks read and write checkpoints in parallel, and share the work by file",
        _switches(
            "--no-ckpt-fully-parallel-save --ckpt-fully-parallel-load-per-rank-objects "
            "--ckpt-pg-tensors-cache-create --distrib-optim-fully-reshardable-mem-efficient"
        )
        | _any(
            "--ckpt-fully-parallel-load-exchange-algo --ckpt-fully-parallel-load-process-group "
            "--ckpt-fully-parallel-save-process-group --ckpt-pg-tensors-cache-path"
        ),
    ),
    (
        "every file of a checkpoint has a checksum, which is always verified",
        _switches(
            "--verify-integrity --no-ckpt-load-validate-sharding-integrity "
            "--disable-ckpt-load-validate-sharding-integrity"
        ),
    ),
    (
        "checkpoints hold only a tokenizer that the run trained; others are read from --tokenizer-model",
        _switches("--no-save-tokenizer-assets --disable-save-tokenizer-assets"),
    ),
    (
        "--use-checkpoint-args takes only options of the tokenizer that are not given",
        _switches(
            "--no-use-tokenizer-model-from-checkpoint-args "
            "--disable-use-tokenizer-model-from-checkpoint-args"
        ),
    ),
    (
        "each op uses the fastest kernel that supports the run; --explain names the kernels",
        _switches(
            "--use-flash-attn --no-rope-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion "
            "--no-bias-dropout-fusion --use-fused-weighted-squared-relu --moe-router-fusion "
            "--disable-mamba-mem-eff-path --no-persist-layer-norm --fused-residual-rmsnorm "
            "--use-te-activation-func --use-transformer-engine-op-fuser --disable-jit-fuser "
            "--use-grouped-gemm-for-dense-mlp --use-grouped-gemm-for-shared-expert "
            "--moe-single-grouped-weight --moe-single-grouped-bias --moe-use-grouped-tensor "
            "--export-force-local-attention"
        )
        | {"--flash-attention-version": ("2", "3", "4")},
    ),
    (
        "the softmax of attention is computed in fp32, which needs no scale by layer",
        _switches("--apply-query-key-layer-scaling"),
    ),
    (
        "the kernel that computes a weight gradient adds it to the fp32 sum",
        _switches("--no-gradient-accumulation-fusion"),
    ),
    (
        "weight gradients are computed in the backward pass of their layer",
        _switches(
            "--delay-wgrad-compute --overlap-dispatch-backward-with-experts-wgrad "
            "--defer-embedding-wgrad-compute"
        )
        | _any("--wgrad-deferral-limit"),
    ),
    (
        "gradients are summed in fp32 and divided by the target tokens of the global batch",
        _switches(
            "--ddp-average-in-collective --no-gradient-reduce-div-fusion "
            "--ddp-reduce-scatter-with-fp32-accumulation"
        )
        | _any("--ddp-param-name-patterns-for-fp32-local-accumulation"),
    ),
    (
        "--ddp-bucket-size sets the buckets of data-parallel collectives",
        _any("--ddp-num-buckets")
        | _switches(
            "--ddp-pad-buckets-for-high-nccl-busbw --no-align-grad-reduce "
            "--disable-align-grad-reduce --no-align-param-gather "
            "--overlap-param-gather-with-optimizer-step"
        ),
    ),
    (
        "it acts only with Megatron-FSDP, which is not supported",
        {
            "--data-parallel-sharding-strategy": _STRATEGIES,
            "--outer-dp-sharding-strategy": _STRATEGIES,
        },
    ),
    (
        "NCCL's environment variables set up its communicators and streams",
        _switches(
            "--high-priority-a2a-comm-stream --use-sharp --create-all-gather-group "
            "--use-nccl-ub --disable-symmetric-registration"
        )
        | _any(
            "--high-priority-stream-groups --nccl-communicator-config-path --sharp-enabled-group "
            "--symmetric-ar-type"
        ),
    ),
    (
        "decisions of rank 0 are sent over gloo groups, which are always created",
        _switches("--disable-gloo-process-groups"),
    ),
    (
        "LOCAL_RANK of the environment sets the rank",
        _any("--local-rank"),
    ),
    (
        "--tp-comm-overlap has one method, which --disable-tp-comm-overlap-ag and -rs switch off",
        _switches(
            "--no-tp-comm-split-ag --disable-tp-comm-split-ag --no-tp-comm-split-rs "
            "--disable-tp-comm-split-rs"
        ),
    ),
    (
        "--tp-comm-overlap uses no userbuffers of TransformerEngine, which it configures",
        _any("--tp-comm-overlap-cfg --tp-comm-bootstrap-backend"),
    ),
    (
        "there is one pipeline stage",
        _switches(
            "--use-tp-pp-dp-mapping --no-overlap-p2p-communication --use-ring-exchange-p2p "
            "--overlap-p2p-communication-warmup-flush --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split"
        )
        | _any(
            "--microbatch-group-size-per-virtual-pipeline-stage "
            "--pipeline-model-parallel-comm-backend"
        ),
    ),
    (
        "nothing overlaps with the exchange of tokens between experts' ranks",
        _switches("--overlap-moe-expert-parallel-comm --ep-overlap-early-attn-memory-release"),
    ),
    (
        "rows of experts are padded for FP8 only, which is not supported",
        _switches("--moe-router-padding-for-quantization --moe-router-padding-for-fp8"),
    ),
    (
        "without FP8 all layers compute in the same precision",
        _switches("--first-last-layers-bf16")
        | _any("--num-layers-at-start-in-bf16 --num-layers-at-end-in-bf16"),
    ),
    (
        "tokens travel to their experts and back in the dtype of the model",
        {"--moe-dispatch-fwd-dtype": ("bf16",), "--moe-combine-bwd-dtype": ("bf16",)},
    ),
    ("attention uses the usual softmax", {"--softmax-type": ("vanilla",)}),
    ("--position-embedding-type sets the positions", {"--rope-type": ("rope",)}),
    (
        "weights are initialised from --seed, with the same numbers on all ranks and devices",
        _switches("--use-cpu-initialization --init-model-with-meta-device"),
    ),
    (
        "optimizer states are fp32",
        _switches("--use-precision-aware-optimizer"),
    ),
    (
        "gradients, weights and optimizer states stay on the device",
        _switches("--no-pin-cpu-grads --no-pin-cpu-params"),
    ),
    (
        "the memory of the embedding's output cannot be chosen",
        _switches(
            "--no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding"
        ),
    ),
    (
        "an MLP computes its rows in one piece; --recompute-granularity reduces memory",
        _any("--mlp-chunks-for-training"),
    ),
    (
        "pinned buffers of offloaded tensors are kept, and graphs capture the copies",
        _switches("--cpu-offloading-retain-pinned-cpu-buffers --delay-offload-until-cuda-graph"),
    ),
    (
        "--on-nonfinite decides about non-finite values, which are always detected",
        _switches("--no-check-for-nan-in-loss-and-grad"),
    ),
    (
        "no step is repeated; --check-weight-hash-across-dp-replicas-interval finds flipped bits",
        _any("--error-injection-type")
        | {
            "--rerun-mode": ("disabled", "validate_results", "report_stats"),
            "--error-injection-rate": ("0",),
        },
    ),
    (
        "SIGTERM, SIGINT and SIGUSR1 save a checkpoint and stop the run, in all its processes",
        _switches("--exit-signal-handler-for-dataloader --exit-signal-handler-for-training")
        | {"--exit-signal": ("SIGTERM", "SIGINT", "SIGUSR1")},
    ),
    (
        "the host waits for the device only to log, validate and save",
        _any("--train-sync-interval"),
    ),
    (
        "the cache of PyTorch's allocator is never emptied",
        {"--empty-unused-memory-level": ("0", "1", "2")},
    ),
    (
        "no index of samples is built in advance",
        _any("--mid-level-dataset-surplus --per-dataset-sequences-path")
        | _switches("--dataloader-fast-cache-load --dataloader-defer-npy-index-mmap"),
    ),
    (
        "masking never depends on the number of a token",
        _switches("--allow-ambiguous-pad-tokens"),
    ),
    (
        "tokenizers are read from local files, and no remote code is run",
        _switches("--trust-remote-code --use-gigatoken --disable-msc"),
    ),
    (
        "nothing else is measured: the console, --log-jsonl and --tensorboard-dir show all values",
        _switches(
            "--log-straggler --disable-straggler-on-startup --moe-per-layer-logging "
            "--log-world-size-to-tensorboard --log-device-memory-used --log-max-attention-logit "
            "--no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard "
            "--no-barrier-with-level-1-timing"
        )
        | _any(
            "--tensorboard-queue-size --straggler-ctrlr-port --straggler-minmax-count "
            "--log-moe-overload-factor"
        )
        | {
            "--timing-log-option": ("max", "minmax", "all"),
            "--timing-log-level": ("0", "1", "2"),
        },
    ),
    (
        "every logged iteration is written to TensorBoard",
        {"--tensorboard-log-interval": ANY},
    ),
    ("messages have level 20 (INFO) and above", {"--logging-level": ANY}),
    ("energy is not measured", _switches("--log-energy")),
    (
        "phases of a step have labels for torch.profiler only",
        _switches("--nvtx-ranges"),
    ),
    (
        "no telemetry is sent; --wandb-project and --mlflow-experiment choose a service",
        _switches("--no-one-logger --one-logger-async --otel-enabled")
        | _any(
            "--one-logger-project --one-logger-run-name --app-tag-run-name --app-tag-run-version "
            "--otel-service-name --otel-span-groups"
        ),
    ),
    (
        "the last operation of each rank is recorded; variables of the environment set NCCL's "
        "flight recorder",
        _switches(
            "--flight-recorder-include-stack-trace --no-flight-recorder-dump-on-timeout "
            "--disable-flight-recorder-dump-on-timeout --no-flight-recorder-extra-dump-on-exec "
            "--disable-flight-recorder-extra-dump-on-exec "
            "--no-flight-recorder-include-only-active "
            "--disable-flight-recorder-include-only-active"
        )
        | _any("--flight-recorder-dump-path --flight-recorder-trace-buffer-size"),
    ),
    (
        "megatron-packed convert --to-hf exports a trained model; nothing is quantised",
        _switches("--export-te-mcore-model --export-default-te-spec")
        | {"--export-model-type": ("HybridModel", "MambaModel", "GPTModel")},
    ),
)
