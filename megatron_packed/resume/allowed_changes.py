"""Comparison of a run with the checkpoint that it starts from: what a change of each option means.

An option declares the subject that it decides (`Option.resume`, ``phase`` and ``training_only``).
`TABLE` has a row for each subject: the options, the refusal of a change, and whether a change is
printed. Options without a row may change freely.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Flag, auto
from pathlib import Path
from typing import Literal, NamedTuple

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.load import newest_metadata
from megatron_packed.checkpoint.run_metadata import ADAPTERS, Metadata, metadata_problem
from megatron_packed.config.resumed_options import implied_keys, with_implied
from megatron_packed.config.run import RunConfig, keys_deciding
from megatron_packed.config.section import section_fields
from megatron_packed.config.sections.data_parts.tokenizer import DATA_RULES
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.model_parts.lora import keys_of_adapters
from megatron_packed.config.serialise import model_differences, section_to_dict
from megatron_packed.resume.compared_runs import COMPARED, AskedRun, Resumed

_TOKENIZER_NAME = keys_deciding("tokenizer name")
_TOKENIZER = (*keys_deciding("tokenizer"), *_TOKENIZER_NAME)
"""Options that decide the meaning of token ids, which a phase may not change."""
_TOKENS = (*keys_deciding("data", "chat"), *_TOKENIZER)
"""Options that decide which tokens a run trains on."""
_PACKS = keys_deciding("packs")
_TRAINED = keys_deciding("trained parameters")
_OF_ADAPTERS = keys_of_adapters()
_STATE = keys_deciding("optimizer state")
_PHASE_MODEL = frozenset(field.flag for field in section_fields(ModelConfig) if field.option.phase)
"""Options of the model that a phase may change: routing, and rotary frequencies for longer packs."""
_EARLIER_RULES = (
    "an earlier version made its tokens, and today's rules make other tokens of the same lines. Masks of other "
    "trainers and a system field count, special tokens in answers act as such, answers have their served history, "
    "and long prompts lose their middle"
)
"""Differences between the values of --data-rules."""
_UNNAMED_CHANGE = "the data options are unchanged, so the data files or the tokenizer have changed"
_EARLIER_CACHE = (
    "give --data-cache-path with the folder that still has the tokens of the earlier version"
)
_UNNAMED_TOKENIZER = (
    "its options are unchanged, so its files, or the data that it is trained on, have changed"
)
_EARLIER_TOKENIZER = (
    "name the earlier tokenizer by --tokenizer-type and --tokenizer-model (a "
    "TrainedBPETokenizer is a HuggingFaceTokenizer in a directory tokenizer-* of the data cache)"
)


class CheckpointUse(Flag):
    """Purposes for which a checkpoint is loaded."""

    RESUME = auto()
    FINE_TUNE = auto()
    INFER = auto()
    ANY = RESUME | FINE_TUNE | INFER
    WARN = auto()
    """Fine-tuning loads the weights, and a refusal becomes a warning."""


class ChangeRule(NamedTuple):
    """Meaning of a change of some options."""

    keys: Collection[str]
    """The options, or whole sections."""
    refusal: Callable[[AskedRun, Resumed], str | None]
    """Return why a checkpoint cannot be used after a change; None if it can."""
    uses: CheckpointUse = CheckpointUse.RESUME
    """Uses for which a change is refused; it is free for the others."""
    noted: Literal["", "in a phase", "always"] = ""
    """Resumed runs that print changes."""


def refusal_of_use(use: CheckpointUse, run: AskedRun, metadata: Metadata) -> str | None:
    """Return why a run cannot use a checkpoint with this metadata; None if it can."""
    problem = metadata_problem(metadata)
    if problem is not None:
        return problem
    phase = None if use is CheckpointUse.WARN else run.config.checkpoint.begin_phase
    stored = Resumed(metadata, phase)
    refusals = (row.refusal(run, stored) for row in TABLE if use in row.uses)
    return next(filter(None, refusals), None)


def noted_keys(*, begins: bool) -> list[str]:
    """Return the options whose changes a resumed run prints."""
    noted = ("in a phase", "always") if begins else ("always",)
    return [key for row in TABLE if row.noted in noted for key in row.keys]


def refusal_of_stored_model(config: RunConfig) -> str:
    """Return why the model of the checkpoint in ``--load`` is not this model; empty if it is."""
    load = config.checkpoint.load
    if not load or not Path(load).is_dir():
        return ""
    try:
        metadata = newest_metadata(load, COMPARED, problem=metadata_problem)
    except CheckpointError as error:
        return str(error).rstrip(".")
    problem = (
        None
        if metadata is None
        else refusal_of_use(CheckpointUse.INFER, AskedRun(config=config), metadata)
    )
    return f"{load}: {problem}" if problem else ""


def _precision_refusal(run: AskedRun, stored: Resumed) -> str | None:
    was_bf16 = stored.config.training.bf16
    if was_bf16 == run.config.training.bf16:
        return None
    stored_flag, cure, other = (
        ("with", "give it", "without") if was_bf16 else ("without", "leave it out", "with")
    )
    made, again = "trained", ""
    if stored.imported:
        made, again = "converted", f", or convert the weights again {other} --bf16"
    return (
        f"was {made} {stored_flag} --bf16, and a load does not change precisions; "
        f"{cure} in this run too{again}"
    )


def _padding_refusal(run: AskedRun, stored: Resumed) -> str | None:
    """Return why a checkpoint's embedding tables have another padding; None if they have the same."""
    models = (run.config.model, stored.config.model)
    rows, stored_rows = (model.padded_vocab_size(run.vocab_size) for model in models)
    multiple, stored_multiple = (model.make_vocab_size_divisible_by for model in models)
    if rows == stored_rows:
        return None
    return (
        "has embedding tables with another number of rows: --make-vocab-size-divisible-by is "
        f"{multiple}, and the checkpoint was made with {stored_multiple}; give {stored_multiple}"
    )


def _adapters_refusal(run: AskedRun, stored: Resumed) -> str | None:
    """Return why a run cannot use the adapters of a checkpoint; None if it can, or if it has none."""
    changed, cure = run.changes(stored.options, _OF_ADAPTERS)
    if ADAPTERS not in stored.metadata or not changed:
        return None
    merges = (
        ""
        if run.config.model.has_adapters
        else ", or merge them with their base first (convert --merge)"
    )
    return f"holds adapters of other trained parameters: {changed}; {cure} to use them{merges}"


def _whole_refusal(run: AskedRun, stored: Resumed) -> str | None:
    """Return why a run with adapters cannot continue whole weights; None if it need not."""
    if not run.config.model.has_adapters or ADAPTERS in stored.metadata:
        return None
    return (
        "holds whole weights, and this run trains adapters (--lora-rank); give --finetune to start "
        "adapters of these weights, or leave out --lora-rank to go on with the weights"
    )


def _weights_refusal(run: AskedRun, stored: Resumed) -> str | None:
    if not stored.untrained:
        return None
    return "holds converted weights, which no run has trained; give --finetune to start a run from them"


def _phase_refusal(run: AskedRun, stored: Resumed) -> str | None:
    """Return why the phase of a run cannot begin at a checkpoint, or continue from it."""
    planned = run.planned
    *earlier, current = [phase.name for phase in stored.phases] or [""]
    if current in earlier:
        return (
            f"is of phase {earlier[-1]}, and phase {current} ended before it; give --begin-phase "
            f"{earlier[-1]} to continue, another name to begin a phase, or --ckpt-step for a step of {current}"
        )
    if planned is None or stored.phase_start == planned.phase_start:
        return None
    return (
        f"begins the phase of this run at step {stored.phase_start}, and the newest checkpoint, which cannot "
        f"be loaded, at step {planned.phase_start}; give --ckpt-step {stored.progress.iteration} to "
        "continue from here"
    )


def _tokenizer_refusal(run: AskedRun, stored: Resumed) -> str | None:
    """Return why a phase cannot begin with the tokenizer of a run; None if it can."""
    same = run.hashes.has_tokenizer_of(stored.hashes)
    # A moved tokenizer, or its export as a tokenizer.json, has other options.
    keys = {*_TOKENIZER}.difference(_TOKENIZER_NAME if same else ())
    changed, cure = run.changes(stored.options, keys)
    if not stored.begins or (not changed and same is not False):
        return None
    return (
        "was trained with another tokenizer, which a phase may not change: "
        f"{changed or _UNNAMED_TOKENIZER}; {cure or _EARLIER_TOKENIZER}, or give "
        "--finetune and leave out --begin-phase to start a new run from these weights"
    )


def _model_refusal(run: AskedRun, stored: Resumed) -> str | None:
    """Return why weights of a checkpoint do not belong to the model of a run; None if they do.

    The options are compared, not only shapes: another activation function has the same shapes.
    """
    differing_options = [
        problem
        for problem in model_differences(stored.options["model"], run.config.model)
        if not (stored.begins and problem.option in _PHASE_MODEL)
    ]
    if not differing_options:
        return None
    in_phase = _PHASE_MODEL.issuperset(problem.option for problem in differing_options)
    phase = ", or change them in a new phase (--begin-phase NAME)" if in_phase else ""
    differences = "; ".join(
        f"{problem.option} is {problem.value}, and {problem.rule}" for problem in differing_options
    )
    return f"belongs to another model: {differences}; give the checkpoint's options, or load another checkpoint{phase}"


def _data_refusal(run: AskedRun, stored: Resumed) -> str | None:
    """Return why the packs of a checkpoint's run cannot continue; None if they can, or need not."""
    implied = implied_keys(run.config)
    same_data = run.hashes.data_hash == stored.hashes.data_hash
    if stored.has_new_packs or (same_data and stored.is_of(run.plan)):
        return None
    options = with_implied(stored.options)
    # Name only options that can have caused the difference. Limits on lengths change tokens if
    # documents are shortened while they are tokenised.
    others = not same_data and run.config.shorten_to == stored.config.shorten_to
    keys = {*_PACKS, *(_TOKENS if others else ())}
    # The parallel layout changes the packs only if it changes the alignment of documents.
    if run.plan is not None and run.plan.alignment != stored.config.document_alignment:
        names = ("context_parallel_size", "cp_comm_type", "cp_partition_mode")
        keys |= {f"parallel.{name}" for name in names}
    if not run.changes(options, keys)[0]:
        # These options include the weights of a blend, which change the order of documents.
        keys |= {*_TOKENS}
    if run.changes(options, keys - implied)[0]:
        keys -= implied
    changed, cure = run.changes(options, keys)
    if others and not changed and stored.config.data.data_rules < DATA_RULES:
        changed, cure = _EARLIER_RULES, _EARLIER_CACHE
    # A phase keeps the tokenizer, so its flag is no cure for another one.
    phase = (
        ""
        if run.changes(options, _TOKENIZER)[0]
        else "give --begin-phase NAME with a new name to go on with the changed data or packs, "
    )
    return (
        f"was trained on {'other data' if others else 'another order of the data'}: "
        f"{changed or run.changed_files or _UNNAMED_CHANGE}; "
        f"{cure or 'restore them'} to resume, {phase}give --finetune to start a new run from these weights, or "
        "name another folder by --save and --load to start from scratch"
    )


def _frozen_refusal(run: AskedRun, stored: Resumed) -> str | None:
    # Runs of versions without an option trained all parameters, as its default says.
    changed, cure = run.changes({"model": section_to_dict(stored.config.model)}, _TRAINED)
    if not changed:
        return None
    return (
        f"trained other parameters, so its optimizer state belongs to them: {changed}; "
        f"{cure} to resume, or give --finetune to start a new run from these weights"
    )


def _schedule_refusal(run: AskedRun, stored: Resumed) -> str | None:
    """Return why the learning-rate schedule cannot continue after a change of the batch size.

    Returns None if it can: its lengths are all in iterations or all in samples, or the batch size
    has never changed.
    """
    config = run.config
    steps = stored.progress.iteration * config.packing.global_batch_size
    if run.plan is None or len(config.schedule_units) < 2 or stored.samples == steps:
        return None
    changed, _ = run.changes(stored.options, ("packing",))
    return (
        f"was trained with another --global-batch-size{f' ({changed})' if changed else ''}. The learning "
        "rate schedule has lengths in iterations and lengths in samples, which no longer agree. Give all lengths "
        "in samples (--train-samples or --train-epochs, --lr-decay-samples, --lr-warmup-samples, "
        "--lr-wsd-decay-samples, --weight-decay-incr-samples), or all in iterations"
        f"{', or restore the batch size' if changed else ''}"
    )


def _optimizer_refusal(run: AskedRun, stored: Resumed) -> str | None:
    """Return why a run cannot resume without moments; None if it can, or if they were saved."""
    options = run.config.checkpoint
    saved = stored.config.checkpoint.save_optim
    # Without this sentence, the load would list every missing tensor.
    if saved or options.allows_unexpected or not options.load_optim:
        return None
    return (
        "was saved with --no-save-optim, so it has no optimizer state; give --no-load-optim to resume with new "
        "moments"
    )


def _state_refusal(run: AskedRun, stored: Resumed) -> str | None:
    """Return why a run cannot resume with moments of other data types; None if it can."""
    if stored.begins or stored.imported or not run.config.checkpoint.load_optim:
        return None
    # Moments of versions without these options were float32.
    fp32 = {key.removeprefix("optim."): "fp32" for key in _STATE}
    changed, cure = run.changes({"optim": {**fp32, **stored.options["optim"]}}, _STATE)
    if not changed:
        return None
    return (
        f"has moments of other data types: {changed}; {cure} to resume, or give --begin-phase NAME with "
        "a new name to convert them"
    )


TABLE = (
    ChangeRule(("training.bf16",), _precision_refusal, CheckpointUse.ANY),
    ChangeRule(("model.make_vocab_size_divisible_by",), _padding_refusal, CheckpointUse.FINE_TUNE),
    ChangeRule(_OF_ADAPTERS, _adapters_refusal, CheckpointUse.ANY),
    ChangeRule(("model.lora_rank",), _whole_refusal),
    ChangeRule(("checkpoint.finetune",), _weights_refusal),
    ChangeRule(("checkpoint.begin_phase",), _phase_refusal),
    ChangeRule(_TOKENIZER, _tokenizer_refusal),
    ChangeRule(
        ("model",),
        _model_refusal,
        CheckpointUse.RESUME | CheckpointUse.INFER | CheckpointUse.WARN,
        noted="in a phase",
    ),
    ChangeRule((*_TOKENS, "packing"), _data_refusal, noted="in a phase"),
    ChangeRule(_TRAINED, _frozen_refusal),
    ChangeRule(("optim", "training"), _schedule_refusal, noted="always"),
    ChangeRule(("checkpoint.save_optim",), _optimizer_refusal),
    ChangeRule(_STATE, _state_refusal),
)
"""Meaning of changes, in the order in which they are refused."""
