"""Megatron-LM's flags that are not options of this project.

``ALWAYS`` holds flags that are accepted because their effect is always on, ``ACCEPTED`` flags that
change nothing. ``REFUSED`` holds groups of flags that are not supported, each with a reason and the
nearest alternative. A flag may be accepted with some values: for example, ``--moe-router-dtype fp32``
is accepted and other values are refused. Every other flag of Megatron is an option of a section.
"""

from __future__ import annotations

from megatron_packed.config.layer_pattern import STAGE
from megatron_packed.config.megatron.accepted import ACCEPTED
from megatron_packed.config.megatron.accepted import AcceptedFlag as Always
from megatron_packed.config.megatron.gpt_layers import gpt_pattern, number_of_layers
from megatron_packed.config.megatron.refused_kinds import OTHER_LAYERS, OTHER_PROGRAMS, RefusedFlags
from megatron_packed.config.megatron.refused_model import MODEL
from megatron_packed.config.megatron.refused_run import RUN
from megatron_packed.config.megatron.refused_tools import TOOLS
from megatron_packed.config.megatron.refused_variants import VARIANTS
from megatron_packed.config.run import RunConfig

_MOST_SHOWN = 64
"""Maximum number of GPT layers whose pattern a message shows."""


def _other_number_of_layers(values: tuple[str, ...], run: RunConfig) -> str:
    pattern = run.model.hybrid_layer_pattern
    if not isinstance(pattern, str):
        return _of_gpt(values, run)
    # Megatron counts the layers of the main model only: no stage marks, no multi-token prediction.
    layers = len(pattern.partition("/")[0].replace(STAGE, ""))
    if values == (str(layers),):
        return ""
    return (
        f"must be the length of --hybrid-layer-pattern ({layers}), which sets the number of layers"
    )


def _of_gpt(values: tuple[str, ...], run: RunConfig) -> str:
    """Return the pattern of a GPT model of that many layers as a problem, or no problem."""
    layers = number_of_layers(values)
    if layers is None:
        return ""
    experts = run.model.num_experts is not None
    pattern = f"'{gpt_pattern(layers, experts=experts)}'"
    if layers > _MOST_SHOWN:
        pattern = f"{layers} times '{gpt_pattern(1, experts=experts)}'"
    return (
        "sets no layers here; each layer of a GPT model is attention and an MLP, so give "
        f"--hybrid-layer-pattern {pattern}"
    )


def _no_query_groups(values: tuple[str, ...], run: RunConfig) -> str:
    """Return a problem unless ``--num-query-groups`` is given and is not the number of heads.

    Megatron's default number of query groups is 1 (multi-query attention). A user should not get it
    by omitting a number.
    """
    model = run.model
    grouped = (
        model.num_query_groups is not None and model.num_query_groups != model.num_attention_heads
    )
    return (
        ""
        if grouped
        else ("needs --num-query-groups with a smaller number than --num-attention-heads")
    )


def _eager_update(values: tuple[str, ...], run: RunConfig) -> str:
    return (
        ""
        if run.cuda_graph.captures_steps
        else "needs --cuda-graph-impl full_iteration, which captures the update"
    )


def _other_spec(values: tuple[str, ...], run: RunConfig) -> str:
    if values and values[-1] in ("hybrid_stack_spec", "mamba_stack_spec"):
        return ""
    return (
        "only the hybrid stack (hybrid_stack_spec) is supported; choose layers with "
        "--hybrid-layer-pattern"
    )


def _spikes_ignored(values: tuple[str, ...], run: RunConfig) -> str:
    if run.training.loss_spike_policy != "off":
        return ""
    return "contradicts --loss-spike-policy off; remove that option, its default is warn"


def _schedule_of_checkpoint(values: tuple[str, ...], run: RunConfig) -> str:
    if not run.checkpoint.use_checkpoint_opt_param_scheduler:
        return ""
    return "contradicts --use-checkpoint-opt_param-scheduler; give one of the two flags"


ALWAYS: dict[str, Always] = {
    "--num-layers": Always(
        "--hybrid-layer-pattern sets the number of layers", (), _other_number_of_layers
    ),
    "--group-query-attention": Always("--num-query-groups sets the groups", None, _no_query_groups),
    "--spec": Always("only the hybrid stack is supported", (), _other_spec),
    "--is-hybrid-model": Always("every model is a hybrid stack"),
    "--model-provider": Always("every model is a hybrid stack", ("hybrid", "mamba")),
    "--use-mcore-models": Always("there is only one implementation of the model"),
    "--enable-experimental": Always("no option needs this switch"),
    "--experimental-attention-variant": Always(
        "G layers are gated delta nets", ("gdn", "gated_delta_net")
    ),
    "--linear-cp-mode": Always(
        "context-parallel ranks exchange the heads of gated delta nets", ("headwise",)
    ),
    "--no-position-embedding": Always("positions have no learned embedding"),
    "--no-masked-softmax-fusion": Always(
        "no attention kernel needs Megatron's fused mask and softmax"
    ),
    "--attention-softmax-in-fp32": Always("every attention kernel computes its softmax in fp32"),
    "--moe-grouped-gemm": Always("all experts are computed in one grouped matrix product"),
    "--moe-permute-fusion": Always("one kernel permutes the tokens on every GPU"),
    "--moe-router-dtype": Always("the router computes in fp32", ("fp32",)),
    "--moe-upcycling-granularity": Always("each expert is initialised independently", ("1",)),
    "--num-distributed-optimizer-instances": Always(
        "optimizer state is sharded over all data-parallel ranks or none", ("1",)
    ),
    "--min-dynamic-context-parallel-size": Always(
        "every pack is split over the same number of ranks", ("1",)
    ),
    "--calculate-per-token-loss": Always(
        "the loss is the mean over the target tokens of the global batch"
    ),
    "--cuda-graph-granularity": Always("graphs are captured per layer", ("layer",)),
    "--optimizer-cuda-graph": Always(
        "full_iteration captures the optimizer update too", None, _eager_update
    ),
    "--cuda-graph-dynamic-microbatches": Always(
        "each graph covers one micro-batch, so the number of micro-batches may vary"
    ),
    "--te-rng-tracker": Always("captured modules draw no random numbers"),
    "--reset-position-ids": Always("positions restart in every document"),
    "--reset-attention-mask": Always("attention stays inside each document"),
    "--dataloader-inter-document-masking": Always("attention stays inside each document"),
    "--eod-mask-loss": Always(
        "no target follows the last token of a document; the token itself is a target"
    ),
    "--dataloader-type": Always(
        "--seed sets the order, and a resumed run continues where it stopped", ("single",)
    ),
    "--num-dataset-builder-threads": Always("no sample index is built", ()),
    "--no-create-attention-mask-in-dataloader": Always(
        "attention uses document offsets instead of a mask"
    ),
    "--vocab-extra-ids": Always("only the tokenizer's file can add tokens", ("0",)),
    "--null-tokenizer-pad-id": Always(
        "masking never depends on the number of a token", (), lambda values, run: ""
    ),
    "--exit-signal-handler": Always(
        "on SIGTERM, SIGINT and SIGUSR1 a run always saves a checkpoint and stops"
    ),
    "--cross-entropy-loss-fusion": Always(
        "the output projection and the loss are computed together, in chunks"
    ),
    "--cross-entropy-fusion-impl": Always("the fused loss is part of this package", ("native",)),
    "--check-for-spiky-loss": Always(
        "--loss-spike-policy reports loss spikes", None, _spikes_ignored
    ),
    "--check-for-large-grads": Always(
        "--loss-spike-policy reports spikes of the gradient norm", None, _spikes_ignored
    ),
    "--optimizer": Always("the optimizer is AdamW", ("adam",)),
    "--override-opt-param-scheduler": Always(
        "the options of the current run set the schedule", None, _schedule_of_checkpoint
    ),
    "--override-opt_param-scheduler": Always(
        "the options of the current run set the schedule", None, _schedule_of_checkpoint
    ),
    "--main-grads-dtype": Always("gradients accumulate in fp32", ("fp32",)),
    "--main-params-dtype": Always("master weights are fp32", ("fp32",)),
    "--exp-avg-dtype": Always("moments are fp32", ("fp32",)),
    "--exp-avg-sq-dtype": Always("moments are fp32", ("fp32",)),
    "--accumulate-allreduce-grads-in-fp32": Always("gradients are accumulated and reduced in fp32"),
    "--ckpt-fully-parallel-save": Always(
        "ranks that hold the same tensors share the work of writing them"
    ),
    "--ckpt-fully-parallel-load": Always(
        "all ranks read in parallel: each checks some of the files and loads its part"
    ),
    "--ckpt-assume-constant-structure": Always(
        "the options fix the contents of a checkpoint, which never change during a run"
    ),
    "--dist-ckpt-optim-fully-reshardable": Always("every checkpoint can be loaded into any layout"),
    "--use-persistent-ckpt-worker": Always(
        "a single thread writes all checkpoints of --async-save"
    ),
    "--log-throughput": Always("throughput is always logged"),
    "--log-memory-interval": Always("peak memory is printed with every logged iteration", ()),
    "--log-timers-to-tensorboard": Always("the time of each iteration is written to TensorBoard"),
    "--log-memory-to-tensorboard": Always(
        "peak memory is written to TensorBoard with every logged iteration"
    ),
    "--log-validation-ppl-to-tensorboard": Always(
        "the validation perplexity is written to TensorBoard with the validation loss"
    ),
    "--cpu-offloading-num-layers": Always("the number of offloaded layers cannot be set", ("0",)),
    "--activation-offload-fraction": Always(
        "all tensors that the selected modules save are offloaded", ("1", "1.0")
    ),
    "--delta-offload-bytes-across-pp-ranks": Always(
        "there are no pipeline stages to balance", ("0",)
    ),
}

TAKEN: dict[str, Always] = ALWAYS | ACCEPTED
"""Flags that are no options and are accepted."""
REFUSED = MODEL + RUN + OTHER_LAYERS + OTHER_PROGRAMS + VARIANTS + TOOLS
REFUSAL_OF: dict[str, RefusedFlags] = {flag: group for group in REFUSED for flag in group.flags}
