"""Start values of a run: from its own checkpoint, from pretrained weights, or random."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from megatron_packed.checkpoint.errors import CheckpointError, NoCheckpointError
from megatron_packed.checkpoint.load_attempt import LoadedCheckpoint
from megatron_packed.checkpoint.run_metadata import tokenizer_warning
from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.resumed_options import stored_schedule, takes_schedule
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.checkpoint import CheckpointConfig
from megatron_packed.config.serialise import changed_options
from megatron_packed.resume.allowed_changes import CheckpointUse, noted_keys, refusal_of_use
from megatron_packed.resume.run_and_random_state import RunState
from megatron_packed.resume.schedule_change import schedule_change

Say = Callable[[str], object]

_REACHED = {
    "--train-iters": "--train-iters {last} is reached",
    "--train-samples": "no whole batch is left of --train-samples {train_samples}",
    "--train-epochs": "--train-epochs {train_epochs:g} (step {last}) is reached",
}
"""Sentence of a run that has nothing left to train, by the flag that gives its length.

A run computes the lengths before that flag. They are no options.
"""


def restore(config: RunConfig, state: RunState, say: Say, warn: Say) -> None:
    """Resume from ``--load`` if it holds a checkpoint, else load ``--pretrained-checkpoint``.

    A run that resumes nothing then loads ``--load-adapter``.

    Args:
        config: configuration of the run.
        state: receives the start values.
        say: prints a line of text.
        warn: prints a warning.
    Raises:
        CheckpointError: see `RunState.load`.
        ConfigError: adapters would be trained on random weights.
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
    if loaded is not None:
        _report_load(config, state, options, loaded, say, warn)
    if options.load_adapter is not None and (loaded is None or options.finetune):
        options = state.of_adapters(options)
        loaded = state.load(options)
        _report_load(config, state, options, loaded, say, warn)
    if config.model.has_adapters:
        _check_base(config, state, say, resumes=loaded is not None and not options.finetune)


def refuse_random_base(config: RunConfig) -> None:
    """Refuse adapters of random weights, except in a run with ``--mock-data``.

    Raises:
        ConfigError: the run would train such adapters.
    """
    if config.model.has_adapters and not config.data.mock_data:
        rule = "trains adapters of existing weights, and no weights are loaded"
        cure = "give --pretrained-checkpoint with the folder of the weights"
        raise ConfigError([Problem("--lora-rank", str(config.model.lora_rank), rule, cure)])


def _check_base(config: RunConfig, state: RunState, say: Say, *, resumes: bool) -> None:
    """Refuse adapters of random weights, and new ones in the folder of their base; name the base."""
    base, options = state.base or state.find_base(), config.checkpoint
    if base.path is None:
        refuse_random_base(config)
    if options.saves_where_it_loads and not resumes and base.path is not None:
        saves = Path(str(options.save)).resolve()
        if saves in (Path(base.path).resolve(), *Path(base.path).resolve().parents[:1]):
            raise CheckpointError(
                f"is the folder of the base {base.path}, which a checkpoint of adapters could replace",
                path=saves,
                cure="give --save another folder",
            )
    say(f"adapters of {base.name} (hash {base.hash[:8]})")


def _report_load(
    config: RunConfig,
    state: RunState,
    options: CheckpointConfig,
    loaded: LoadedCheckpoint,
    say: Say,
    warn: Say,
) -> None:
    """Print what was loaded, and warnings about it.

    Args:
        options: those of the load, see `RunState.load`.
    """
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
        for note in _notes(config, state):
            say(note)
        for sentence in state.callback_states.warnings(loaded.metadata):
            warn(sentence)
        return
    # A resumed run gets no warning: its load has raised an error.
    warning = tokenizer_warning(loaded.path, loaded.metadata, state.hashes.tokenizer_hash)
    if warning is not None:
        warn(warning)
    other_model = refusal_of_use(CheckpointUse.WARN, state.run, loaded.metadata)
    if other_model is not None:
        warn(f"{loaded.path} {other_model}; fine-tuning still loads these weights unchanged.")


def _notes(config: RunConfig, state: RunState) -> Iterator[str]:
    """Yield the options that changed since the checkpoint, and the effects of changes."""
    done, stored = state.progress, state.resumed
    assert stored is not None
    last = config.last_iteration(done.samples_ahead(config.packing))
    is_over, trains = done.iteration >= last, not config.training.skip_train
    if state.phases:
        yield _phase_sentence(state, stored.begins)
    options = stored.options
    if takes_schedule(config):
        options = {**options, "optim": {**options["optim"], **stored_schedule(options)}}
    length = config.training.length_flag
    computed = set(takewhile(lambda flag: flag != length, _REACHED))
    changed = [
        option
        for option in changed_options(options, state.config, noted_keys(begins=stored.begins))
        if option.split()[0] not in computed
    ]
    if changed:
        yield f"changed since the checkpoint: {'; '.join(changed)}"
    if trains and not is_over and (jump := schedule_change(config, stored.options, done)):
        yield jump
    before_best = stored.progress.best_at
    if before_best and not done.best_at and not stored.begins and trains:
        stops = config.training.early_stopping_patience is not None
        counts = " and the count of --early-stopping-patience" * stops
        yield (
            f"a validation reads other data than before step {done.iteration + 1:,}, so the search for the "
            f"lowest loss{counts} begins again; --save-retain no longer keeps the best checkpoint so far (step "
            f"{before_best:,})"
        )
    # Another batch size changes the packs of each later step, so it is printed.
    packs = config.packs_per_step()
    if stored.imported:
        yield (
            f"steps and samples of the imported checkpoint continue ({done.plan_samples:,} samples); "
            "its data begins with the first pack"
        )
    elif stored.packs_per_step != packs and not stored.begins:
        sizes, _ = state.run.changes(stored.options, ("packing",))
        rate = "samples" if config.schedule_units == {"samples"} else "steps"
        onward = (
            f"; step {done.iteration + 1:,} continues with the next pack, with {packs:,} packs a step instead of "
            f"{stored.packs_per_step:,}; the learning rate counts {rate}, and the last step is {last:,}"
        )
        yield (
            f"{sizes}: {done.consumed_packs:,} packs were trained on in {done.iteration:,} steps"
            f"{'' if is_over else onward}."
        )
    if is_over:
        reached = _REACHED[length].format(last=last, **vars(config.training))
        totals = " The length of a run includes its earlier phases." * stored.begins
        yield f"{reached}: there is nothing left to train.{totals}"


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
