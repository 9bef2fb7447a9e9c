"""Start values of a run: from its own checkpoint, from pretrained weights, or random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_packed.checkpoint.errors import NoCheckpointError
from megatron_packed.checkpoint.run_metadata import Metadata, packs_per_step_of, tokenizer_warning
from megatron_packed.config.resumed_options import stored_schedule, takes_schedule
from megatron_packed.config.run import RunConfig
from megatron_packed.config.serialise import changed_options
from megatron_packed.resume.allowed_changes import PHASE_CHANGES, model_refusal
from megatron_packed.resume.run_and_random_state import RunState
from megatron_packed.resume.schedule_change import schedule_change

Say = Callable[[str], object]

_REACHED = {
    "--train-iters": "--train-iters {last} is reached",
    "--train-samples": "no whole batch is left of --train-samples {train_samples}",
    "--train-epochs": "--train-epochs {train_epochs:g} (step {last}) is reached",
}
"""Sentence of a run that has nothing left to train, by the flag that gives its length."""


def restore(config: RunConfig, state: RunState, say: Say, warn: Say) -> None:
    """Resume from ``--load`` if it holds a checkpoint, else load ``--pretrained-checkpoint``.

    Args:
        config: configuration of the run.
        state: receives the start values.
        say: prints a line of text.
        warn: prints a warning.
    """
    options, loaded = config.checkpoint, None
    if options.load is not None:
        try:
            loaded = state.load(options)
        except NoCheckpointError:
            # Only the folder to which the run saves may be empty. Any other folder in --load must
            # hold a checkpoint.
            if (
                not options.saves_where_it_loads
                or options.finetune
                or options.ckpt_step is not None
                or options.exit_on_missing_checkpoint
            ):
                raise
            others = "random" if options.pretrained_checkpoint is None else "other"
            say(f"No checkpoint in {options.load} yet: starting from {others} weights.")
    # Load pretrained weights only if there is nothing to resume: a restarted job must not lose its
    # progress.
    if loaded is None and options.pretrained_checkpoint is not None:
        options = replace(
            options,
            load=options.pretrained_checkpoint,
            pretrained_checkpoint=None,
            finetune=True,
            begin_phase=None,
        )
        loaded = state.load(options)
    if loaded is None:
        return
    what = "weights of" if options.finetune else "resuming from"
    say(f"{what} {loaded.path} (iteration {loaded.step})")
    strictness = options.dist_ckpt_strictness
    # Ranks that only one of the two runs has need no random states of the other. States of callbacks
    # have sentences of their own.
    unexpected, unused = (
        [name for name in names if not name.startswith(("rng/", "callback/"))]
        for names in (loaded.missing, loaded.unused)
    )
    if unexpected and strictness.startswith("log_"):
        warn(f"missing in the checkpoint, start values are kept: {_some(unexpected)}")
    if unused and strictness == "log_all":
        warn(f"in the checkpoint but unused: {_some(unused)}")
    if config.checkpoint.finetune and loaded.step and options.saves_where_it_loads:
        warn(
            f"--save is the folder of these weights, and --finetune counts steps from 0: if this run "
            f"saves its step {loaded.step}, it replaces {loaded.path}; give --save another folder to "
            "keep both."
        )
    if not options.finetune:
        _say_changes(config, state, loaded.metadata, say)
        for sentence in state.callback_states.warnings(loaded.metadata):
            warn(sentence)
        return
    # A resumed run gets no warning: its load has raised an error.
    warning = tokenizer_warning(loaded.path, loaded.metadata, state.hashes.tokenizer_hash)
    if warning is not None:
        warn(warning)
    refusal = model_refusal(loaded.metadata, config.model)
    if refusal is not None:
        warn(f"{loaded.path} {refusal}; fine-tuning still loads these weights unchanged.")


def _say_changes(config: RunConfig, state: RunState, metadata: Metadata, say: Say) -> None:
    """Print options that changed since the checkpoint, and the effects of another batch size."""
    assert state.plan is not None and state.resumed is not None
    done, begins = state.progress, state.resumed.begins
    last = config.last_iteration(done.samples_ahead(config.packing))
    if state.phases:
        say(_phase_sentence(state, begins))
    stored_config = metadata["config"]
    if takes_schedule(config):
        stored_config = {
            **stored_config,
            "optim": {**stored_config["optim"], **stored_schedule(stored_config)},
        }
    keys = PHASE_CHANGES if begins else ("optim", "training")
    changed = changed_options(stored_config, state.config, keys)
    # With --train-samples and --train-epochs, these lengths are computed and are not options.
    computed: dict[str, tuple[str, ...]] = {
        "--train-samples": ("--train-iters ",),
        "--train-epochs": ("--train-iters ", "--train-samples "),
    }
    without = computed.get(config.training.length_flag, ())
    changed = [option for option in changed if not option.startswith(without)]
    if changed:
        say(f"changed since the checkpoint: {'; '.join(changed)}")
    if done.iteration < last and not config.training.skip_train:
        jump = schedule_change(config, metadata["config"], done)
        if jump is not None:
            say(jump)
    before_best, patience = state.resumed.progress.best_at, config.training.early_stopping_patience
    if before_best and not done.best_at and not begins and not config.training.skip_train:
        counts = "" if patience is None else " and the count of --early-stopping-patience"
        say(
            f"a validation reads other data than before step {done.iteration + 1:,}, so the search for the "
            f"lowest loss{counts} begins again; --save-retain no longer keeps the best checkpoint so far (step "
            f"{before_best:,})"
        )
    # Another batch size changes the packs of each later step, so it is printed.
    stored_packs, packs = packs_per_step_of(metadata), config.packs_per_step()
    if state.resumed.imported:
        say(
            f"steps and samples of the imported checkpoint continue ({done.plan_samples:,} samples); "
            "its data begins with the first pack"
        )
    elif stored_packs != packs and not begins:
        sizes = "; ".join(changed_options(metadata["config"], state.config, ("packing",)))
        rate = "samples" if config.schedule_units == {"samples"} else "steps"
        onward = (
            f"; step {done.iteration + 1:,} continues with the next pack, with {packs:,} packs a step instead of "
            f"{stored_packs:,}; the learning rate counts {rate}, and the last step is {last:,}"
        )
        say(
            f"{sizes}: {done.consumed_packs:,} packs were trained on in {done.iteration:,} steps"
            f"{onward if done.iteration < last else ''}."
        )
    if done.iteration >= last:
        reached = _REACHED[config.training.length_flag].format(last=last, **vars(config.training))
        totals = " The length of a run includes its earlier phases." if begins else ""
        say(f"{reached}: there is nothing left to train.{totals}")


def _phase_sentence(state: RunState, begins: bool) -> str:
    """Return the name and the first step of the current phase, and where its data begins."""
    *earlier, phase = state.phases
    if not begins:
        return f"phase {phase.name}, which began at step {phase.iteration + 1:,}, continues"
    after = f" after phase {earlier[-1].name}" if earlier else ""
    data = (
        "its data begins with the first pack"
        if state.progress.plan_packs == state.progress.consumed_packs
        else "data and packs are unchanged, so it continues with the next pack"
    )
    return f"phase {phase.name} begins at step {phase.iteration + 1:,}{after}; {data}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
