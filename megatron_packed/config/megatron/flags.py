"""Megatron-LM's flags that are not options of this project.

``ALWAYS`` holds flags that are accepted because their effect is always on. ``ACCEPTED`` holds flags
that change nothing: the trained model is the same with and without such a flag, and a run prints one
line for each. ``REFUSED`` holds groups of flags that are not supported, each with a reason and the
nearest alternative. A flag may be accepted with some values: for example, ``--moe-router-dtype fp32``
is accepted and other values are refused. Every other flag of Megatron is an option of a section.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_packed.config.layer_pattern import LAYERS_OF_A_DEPTH, STAGE
from megatron_packed.config.megatron.gpt_layers import gpt_layer_count, gpt_pattern
from megatron_packed.config.run import RunConfig
from megatron_packed.config.table_rows import table_rows

_MOST_SHOWN = 64
"""Maximum number of GPT layers whose pattern a message shows."""
Differs = Callable[[tuple[str, ...], RunConfig], str]
"""Function of (values, run) that returns the problem of the values; empty if they are accepted."""


@dataclass(frozen=True)
class AcceptedFlag:
    """Flag of Megatron that is no option and is accepted.

    Args:
        reason: the fact that makes the flag unnecessary, or what is done instead.
        values: the accepted values; None for a switch, () for any values unless ``differs``
            returns a problem.
        has_effect: False for a flag that changes nothing here; True if its effect is always on.
    """

    reason: str
    values: tuple[str, ...] | None = None
    differs: Differs | None = None
    has_effect: bool = True


@dataclass(frozen=True)
class RefusedFlags:
    """Flags that are refused for the same reason."""

    reason: str
    nearest: str
    flags: tuple[str, ...]


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
    layers = gpt_layer_count(values)
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


def _bf16_gradients(values: tuple[str, ...], run: RunConfig) -> str:
    """Return a problem if the optimizer would read bf16. `--grad-reduce-in-bf16` has priority."""
    if run.parallel.main_grads_dtype != "bf16":
        return ""
    return "contradicts --main-grads-dtype bf16; give one of the two flags"


def _spikes_ignored(values: tuple[str, ...], run: RunConfig) -> str:
    if run.training.loss_spike_policy != "off":
        return ""
    return "contradicts --loss-spike-policy off; remove that option, its default is warn"


def _schedule_of_checkpoint(values: tuple[str, ...], run: RunConfig) -> str:
    if not run.checkpoint.use_checkpoint_opt_param_scheduler:
        return ""
    return "contradicts --use-checkpoint-opt_param-scheduler; give one of the two flags"


_DIFFERS: Mapping[str, Differs] = {
    "--num-layers": _other_number_of_layers,
    "--group-query-attention": _no_query_groups,
    "--spec": _other_spec,
    "--optimizer-cuda-graph": _eager_update,
    LAYERS_OF_A_DEPTH: lambda values, run: "" if len(values) == 1 else "takes one value",
    "--accumulate-allreduce-grads-in-fp32": _bf16_gradients,
    "--null-tokenizer-pad-id": lambda values, run: "",
    "--check-for-spiky-loss": _spikes_ignored,
    "--check-for-large-grads": _spikes_ignored,
    "--override-opt-param-scheduler": _schedule_of_checkpoint,
    "--override-opt_param-scheduler": _schedule_of_checkpoint,
}
"""Functions that return the problem of given values; see `AcceptedFlag`."""
ALWAYS = {
    flag: AcceptedFlag(
        row["reason"], tuple(row["values"]) if "values" in row else None, _DIFFERS.get(flag)
    )
    for flag, row in table_rows("megatron/always_flags.json").items()
}
ANY: tuple[str, ...] = ()
"""Any values are accepted."""


ACCEPTED = {
    flag: AcceptedFlag(group["reason"], None if values is None else tuple(values), has_effect=False)
    for group in table_rows("megatron/accepted_flags.json")
    for flag, values in group["flags"].items()
}
TAKEN: dict[str, AcceptedFlag] = ALWAYS | ACCEPTED
"""Flags that are no options and are accepted."""
REFUSED = tuple(
    RefusedFlags(row["reason"], row["nearest"], tuple(row["flags"]))
    for row in table_rows("megatron/refused_flags.json")
)
REFUSAL_OF: dict[str, RefusedFlags] = {flag: group for group in REFUSED for flag in group.flags}
