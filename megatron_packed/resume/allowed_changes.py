"""Checks that a run can continue from a checkpoint: same model, precision, data and schedule."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.load import find_checkpoints, newest_metadata
from megatron_packed.checkpoint.run_metadata import (
    DataHashes,
    Metadata,
    holds_only_weights,
    metadata_problem,
    packs_per_step_of,
    progress_of,
)
from megatron_packed.config.options import Stored
from megatron_packed.config.resumed_options import with_implied
from megatron_packed.config.run import RunConfig, keys_deciding
from megatron_packed.config.section import section_fields, unchecked
from megatron_packed.config.sections.data_parts.tokenizer import DATA_RULES
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.config.serialise import changed_options, model_differences, restoring_words
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.run_model import dtype_of
from megatron_packed.resume.phases_and_stored_packs import Resumed, begun_phase

_TOKENIZER = keys_deciding("tokenizer", "tokenizer name")
"""Options that decide the meaning of token ids, which a phase may not change."""
_DECIDES_TOKENS = (*keys_deciding("data", "chat"), *_TOKENIZER)
"""Options that decide which tokens a run trains on."""
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
PHASE_CHANGES = (*_DECIDES_TOKENS, "model", "packing", "optim", "training")
"""Options that a new phase reports if they have changed."""


def model_refusal(metadata: Metadata, model: ModelConfig, *, new_phase: bool = False) -> str | None:
    """Return why weights of a checkpoint do not belong to ``model``; None if they do.

    The options are compared, not only shapes: another activation function has the same shapes.

    Args:
        metadata: metadata of the checkpoint.
        model: model of the run.
        new_phase: the run begins a phase, which may change some options.
    """
    differing_options = model_differences(metadata["config"]["model"], model)
    if new_phase:
        differing_options = [
            problem for problem in differing_options if problem.option not in _PHASE_MODEL
        ]
    if not differing_options:
        return None
    phase = (
        ", or change them in a new phase (--begin-phase NAME)"
        if all(problem.option in _PHASE_MODEL for problem in differing_options)
        else ""
    )
    differences = "; ".join(
        f"{problem.option} is {problem.value}, and {problem.rule}" for problem in differing_options
    )
    return f"belongs to another model: {differences}; give the checkpoint's options, or load another checkpoint{phase}"


def precision_refusal(metadata: Metadata, dtype: torch.dtype) -> str | None:
    """Return why weights of a checkpoint cannot be loaded into a model of ``dtype``; None if they can."""
    was_bf16 = metadata["config"]["training"]["bf16"]
    if was_bf16 == (dtype == torch.bfloat16):
        return None
    stored_flag, cure, other = (
        ("with", "give it", "without") if was_bf16 else ("without", "leave it out", "with")
    )
    # Only runs store how they pack; a checkpoint without it comes from `convert`.
    made, again = "trained", ""
    if "packing" not in metadata["config"]:
        made, again = "converted", f", or convert the weights again {other} --bf16"
    return (
        f"was {made} {stored_flag} --bf16, and a load does not change precisions; "
        f"{cure} in this run too{again}"
    )


def padding_refusal(metadata: Metadata, model: HybridModel) -> str | None:
    """Return why a checkpoint's embedding tables have other padding than ``model``'s; None if equal."""
    stored_multiple, model_config = (
        metadata["config"]["model"].get("make_vocab_size_divisible_by"),
        model.config,
    )
    stored_model = (
        model_config
        if stored_multiple is None
        else replace(model_config, make_vocab_size_divisible_by=stored_multiple)
    )
    if stored_model.padded_vocab_size(model.vocab_size) == model_config.padded_vocab_size(
        model.vocab_size
    ):
        return None
    return (
        "has embedding tables with another number of rows: --make-vocab-size-divisible-by is "
        f"{model_config.make_vocab_size_divisible_by}, and the checkpoint was made with {stored_multiple}; "
        f"give {stored_multiple}"
    )


def _alignment_of(stored: Mapping[str, Any]) -> int:
    """Return the alignment in tokens of document starts in packs of a stored configuration."""
    alignment: int | None = stored["packing"].get("pad_packed_seq_alignment")
    return alignment or unchecked(ParallelConfig, stored.get("parallel", {})).document_alignment


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointRefusals:
    """Comparison of a run with the metadata of checkpoints; arguments are those of `RunState`."""

    model: HybridModel
    plan: PackPlan | None
    plan_hash: str
    hashes: DataHashes
    config: dict[str, Any]
    schedule_units: Collection[str]
    implied: Set[str]
    planned: Resumed | None = None
    """The checkpoint for which the data was planned; None if nothing is resumed."""
    changed_files: str = ""
    """Clause about files that options name and whose content has changed; empty without any."""

    def for_fine_tuning(self, metadata: Metadata) -> str | None:
        """Return why a new run cannot start from the weights of a checkpoint; None if it can."""
        return (
            metadata_problem(metadata)
            or precision_refusal(metadata, self.model.dtype)
            or padding_refusal(metadata, self.model)
        )

    def for_resuming(self, metadata: Metadata) -> str | None:
        """Return why a run cannot resume from a checkpoint; None if it can."""
        problem = metadata_problem(metadata) or precision_refusal(metadata, self.model.dtype)
        if problem is not None:
            return problem
        if holds_only_weights(metadata):
            return "holds converted weights, which no run has trained; give --finetune to start a run from them"
        resumed = Resumed.from_metadata(metadata, begun_phase(self.config))
        return (
            self._phase_refusal(metadata, resumed)
            or model_refusal(metadata, self.model.config, new_phase=resumed.begins)
            or (None if resumed.has_new_packs else self._data_refusal(metadata))
            or self._frozen_refusal(metadata)
            or self._schedule_refusal(metadata)
            or self._optimizer_refusal(metadata)
            or self._state_refusal(metadata, resumed)
        )

    def _frozen_refusal(self, metadata: Metadata) -> str | None:
        """Return why the run cannot continue with other trained parameters; None if it can."""
        keys = keys_deciding("trained parameters")
        # Runs of versions without the option trained all parameters.
        model = {"freeze_params": [], **metadata["config"]["model"]}
        stored = {**metadata["config"], "model": model}
        changed = "; ".join(changed_options(stored, self.config, keys))
        if not changed:
            return None
        return (
            f"trained other parameters, so its optimizer state belongs to them: {changed}; "
            f"{restoring_words(stored, self.config, keys)} to resume, or give --finetune to start a new "
            "run from these weights"
        )

    def _optimizer_refusal(self, metadata: Metadata) -> str | None:
        """Return why the run cannot resume without moments; None if it can, or if they were saved."""
        saved = metadata["config"].get("checkpoint", {}).get("save_optim", True)
        options = self.config.get("checkpoint", {})
        allowed = options.get("dist_ckpt_strictness", "").startswith(("log_", "ignore_"))
        # Without this sentence, the load would list every missing tensor.
        if saved or allowed or not options.get("load_optim", True):
            return None
        return (
            "was saved with --no-save-optim, so it has no optimizer state; give --no-load-optim to resume with new "
            "moments"
        )

    def _state_refusal(self, metadata: Metadata, resumed: Resumed) -> str | None:
        """Return why the run cannot resume with moments of other data types; None if it can."""
        loads = self.config.get("checkpoint", {}).get("load_optim", True)
        if resumed.begins or resumed.imported or not loads:
            return None
        keys = keys_deciding("optimizer state")
        # Moments of versions without these options were float32.
        fp32 = {key.removeprefix("optim."): "fp32" for key in keys}
        stored = {**metadata["config"], "optim": {**fp32, **metadata["config"].get("optim", {})}}
        changed = "; ".join(changed_options(stored, self.config, keys))
        if not changed:
            return None
        return (
            f"has moments of other data types: {changed}; {restoring_words(stored, self.config, keys)} to "
            "resume, or give --begin-phase NAME with a new name to convert them"
        )

    def _phase_refusal(self, metadata: Metadata, resumed: Resumed) -> str | None:
        """Return why the phase of this run cannot begin at a checkpoint, or continue from it."""
        names = [phase.name for phase in resumed.phases]
        earlier, current = names[:-1], names[-1] if names else None
        if current in earlier:
            return (
                f"is of phase {earlier[-1]}, and phase {current} ended before it; give --begin-phase "
                f"{earlier[-1]} to continue, another name to begin a phase, or --ckpt-step for a step of {current}"
            )
        if self.planned is not None and resumed.phase_start != self.planned.phase_start:
            return (
                f"begins the phase of this run at step {resumed.phase_start}, and the newest checkpoint, which cannot "
                f"be loaded, at step {self.planned.phase_start}; give --ckpt-step {resumed.progress.iteration} to "
                "continue from here"
            )
        if not resumed.begins:
            return None
        keys = set(_TOKENIZER)
        same = self.hashes.has_tokenizer_of(resumed.hashes)
        # A moved tokenizer, or its export as a tokenizer.json, has other options.
        if same:
            keys -= set(keys_deciding("tokenizer name"))
        changed = "; ".join(changed_options(metadata["config"], self.config, keys))
        if not changed and same is not False:
            return None
        cure = restoring_words(metadata["config"], self.config, keys)
        if not changed:
            changed = "its options are unchanged, so its files, or the data that it is trained on, have changed"
            cure = (
                "name the earlier tokenizer by --tokenizer-type and --tokenizer-model (a "
                "TrainedBPETokenizer is a HuggingFaceTokenizer in a directory tokenizer-* of the data cache)"
            )
        return (
            f"was trained with another tokenizer, which a phase may not change: {changed}; {cure}, or give "
            f"--finetune and leave out --begin-phase to start a new run from these weights"
        )

    def _data_refusal(self, metadata: Metadata) -> str | None:
        plan_hash, data_hash = metadata["plan_hash"], metadata["data_hash"]
        if data_hash == self.hashes.data_hash and (
            plan_hash == self.plan_hash or plan_hash == self._plan_hash_then(metadata)
        ):
            return None
        stored = with_implied(metadata["config"])
        # Name only options that can have caused the difference.
        others = data_hash != self.hashes.data_hash and not self._shortens_otherwise(stored)
        keys = {*keys_deciding("packs"), *(_DECIDES_TOKENS if others else ())}
        # The parallel layout changes the packs only if it changes the alignment of documents.
        if self.plan is not None and self.plan.alignment != _alignment_of(stored):
            keys |= {"parallel.context_parallel_size", "parallel.cp_comm_type"}
        if not changed_options(stored, self.config, keys):
            # These options include the weights of a blend, which change the order of documents.
            keys |= set(_DECIDES_TOKENS)
        if changed_options(stored, self.config, keys - self.implied):
            keys -= self.implied
        changed = "; ".join(changed_options(stored, self.config, keys))
        cure = restoring_words(stored, self.config, keys)
        if others and not changed and stored["data"]["data_rules"] < DATA_RULES:
            changed, cure = _EARLIER_RULES, _EARLIER_CACHE
        # A phase keeps the tokenizer, so its flag is no cure for another one.
        phase = (
            ""
            if changed_options(stored, self.config, _TOKENIZER)
            else "give --begin-phase NAME with a new name to go on with the changed data or packs, "
        )
        return (
            f"was trained on {'other data' if others else 'another order of the data'}: "
            f"{changed or self.changed_files or _UNNAMED_CHANGE}; "
            f"{cure or 'restore them'} to resume, {phase}give --finetune to start a new run from these weights, or "
            "name another folder by --save and --load to start from scratch"
        )

    def _shortens_otherwise(self, stored: Stored) -> bool:
        """Return True if a changed length limit or policy changes the tokens of documents.

        Only the policy ``truncate_prompt`` does: it shortens documents while they are tokenised.
        """
        rules = ("overlong_policy", "max_document_length")
        stored_limits, limits = (
            [config["packing"].get(name) for name in rules] for config in (stored, self.config)
        )
        return stored_limits != limits and "truncate_prompt" in (stored_limits[0], limits[0])

    def _plan_hash_then(self, metadata: Metadata) -> str:
        """Return the hash of this run's plan with the batch size of the checkpoint's run.

        A run may resume with another batch size, since it does not change the order of documents.
        """
        stored_packs_per_step = packs_per_step_of(metadata)
        return (
            self.plan.hash_with(stored_packs_per_step)
            if self.plan is not None and stored_packs_per_step
            else self.plan_hash
        )

    def _schedule_refusal(self, metadata: Metadata) -> str | None:
        """Return why the learning-rate schedule cannot continue after a change of the batch size.

        Returns None if it can: its lengths are all in iterations or all in samples, or the batch size
        has never changed.
        """
        if self.plan is None or len(self.schedule_units) < 2:
            return None
        done = progress_of(metadata)
        packing = metadata["config"].get("packing", {})
        samples = done.samples(packing.get("micro_batch_size", 1))
        if samples == done.iteration * self.config["packing"]["global_batch_size"]:
            return None
        changed = "; ".join(changed_options(metadata["config"], self.config, ("packing",)))
        return (
            f"was trained with another --global-batch-size{f' ({changed})' if changed else ''}. The learning "
            "rate schedule has lengths in iterations and lengths in samples, which no longer agree. Give all lengths "
            "in samples (--train-samples or --train-epochs, --lr-decay-samples, --lr-warmup-samples, "
            "--lr-wsd-decay-samples, --weight-decay-incr-samples), or all in iterations"
            f"{', or restore the batch size' if changed else ''}"
        )


def refusal_of_stored_model(config: RunConfig) -> str:
    """Return why the model of the checkpoint in ``--load`` is not this model; empty if it is."""
    load = config.checkpoint.load
    if not load or not Path(load).is_dir() or not find_checkpoints(Path(load)):
        return ""
    try:
        metadata = newest_metadata(load, ("config",), problem=metadata_problem)
    except CheckpointError as error:
        return str(error).rstrip(".")
    if metadata is None:
        return ""
    problem = precision_refusal(metadata, dtype_of(config)) or model_refusal(metadata, config.model)
    return f"{load}: {problem}" if problem else ""
