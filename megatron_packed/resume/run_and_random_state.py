"""State of a run that its checkpoints store, so that it resumes as if it had never stopped.

Named tensors: ``model/<name>`` (parameters and persistent buffers), ``optimizer/<kind>/<name>`` and
``rng/rank_<r>/<generator>``, and those of callbacks (``callback_state.py``).
JSON object: the position in the data, the hash of the pack plan, random states that are not arrays,
and the configuration.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from megatron_packed.checkpoint.background_save import BackgroundSaves
from megatron_packed.checkpoint.directory import RootLock
from megatron_packed.checkpoint.rank_agreement import Ranks
from megatron_packed.checkpoint.run_metadata import (
    BEST_STEP,
    FOLDER,
    NO_HASHES,
    ORIGINAL,
    PHASES,
    SPIKE_WINDOW,
    DataHashes,
    Metadata,
    Phase,
    RunProgress,
)
from megatron_packed.checkpoint.save import SavedCheckpoint, save_checkpoint
from megatron_packed.checkpoint.tensor_shard import TensorShard, share_out, whole_tensors
from megatron_packed.config.sections.checkpoint import CheckpointConfig
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.data.progress_bar import ProgressBar
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.rng import RngState
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.resume.callback_state import CallbackStates, StatefulCallback
from megatron_packed.resume.held_state import Held, held_state
from megatron_packed.resume.loaded_optimizer_state import LoadedOptimizerState
from megatron_packed.resume.phases_and_stored_packs import Resumed, begun_phase
from megatron_packed.resume.stored_expert_bounds import restore_bounds, stored_bounds

if TYPE_CHECKING:
    from megatron_packed.checkpoint.load_attempt import LoadedCheckpoint
    from megatron_packed.checkpoint.manifest import Manifest
    from megatron_packed.resume.allowed_changes import CheckpointRefusals


class RunState:
    """State of one run, which it saves to and restores from checkpoints.

    Args:
        model, optimizer: written in place by a load.
        groups: process groups; all ranks write and all ranks read.
        plan: order of the packs. A load moves the plan to the position of the run.
        hashes: hashes of the data.
        config: the resolved configuration as a JSON object, stored in the checkpoint.
        model_hash: hash of the options that decide shapes.
        schedule_units: units of the learning-rate schedule, see `RunConfig`.
        implied: options that checkpoints decide (`implied_keys`).
        lock: rank 0's lock on the directory of checkpoints, verified at every save.
        planned: the checkpoint for which the plan was made.
        attached: texts that each checkpoint contains, by file name.
        changed_files: see `CheckpointRefusals`.
        show: show progress and warnings of loads on standard error.
        callbacks: callbacks of the user, whose states are saved and restored.
    """

    def __init__(
        self,
        model: HybridModel,
        optimizer: Optimizer,
        groups: ParallelGroups,
        *,
        plan: PackPlan | None = None,
        config: dict[str, Any],
        model_hash: str,
        hashes: DataHashes = NO_HASHES,
        schedule_units: Collection[str] = (),
        implied: Collection[str] = (),
        lock: RootLock | None = None,
        planned: Resumed | None = None,
        attached: Mapping[str, str] | None = None,
        changed_files: str = "",
        show: bool = True,
        callbacks: Sequence[StatefulCallback] = (),
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.groups = groups
        self.plan = plan
        self.plan_hash = "" if plan is None else plan.hash
        self.hashes = hashes
        self.config = config
        self.model_hash = model_hash
        self.attached = dict(attached or {})
        self._schedule_units = schedule_units
        self._implied = set(implied)
        self._planned = planned
        self._changed_files = changed_files
        self.progress = RunProgress()
        phase = begun_phase(config)
        self.phases: tuple[Phase, ...] = () if phase is None else (Phase(phase, 0),)
        """Phases of the run, the current one last."""
        self.original: Any = None
        """Facts of the Hugging Face model whose weights the run began with; None if there is none."""
        self.resumed: Resumed | None = None
        """The checkpoint from which the run continues."""
        self._show = show
        self._device = groups.device
        self._lock = lock
        self._ranks = Ranks.from_groups(groups)
        self.callback_states = CallbackStates(
            callbacks, model, groups.device, self._layout, self._ranks
        )
        self._background: BackgroundSaves | None = None
        self._background_ranks = self._ranks
        self.run_id = str(self._ranks.gather(uuid.uuid4().hex[:12])[0])

    @cached_property
    def refusals(self) -> CheckpointRefusals:
        """Comparison of this run with a checkpoint that it loads."""
        from megatron_packed.resume.allowed_changes import CheckpointRefusals

        return CheckpointRefusals(
            model=self.model,
            plan=self.plan,
            plan_hash=self.plan_hash,
            hashes=self.hashes,
            config=self.config,
            schedule_units=self._schedule_units,
            implied=self._implied,
            planned=self._planned,
            changed_files=self._changed_files,
        )

    def save(self, options: CheckpointConfig) -> SavedCheckpoint | None:
        """Write a checkpoint of the current iteration; a collective.

        With ``async_save`` the method waits for the previous save, copies the state, and returns;
        a thread writes the checkpoint. ``saved`` reports when that checkpoint is published.

        Returns:
            The checkpoint that has been published by this call: the new checkpoint, or with
            ``async_save`` the previous checkpoint, if ``saved`` has not yet returned it.
        Raises:
            CheckpointError: on all ranks; the previous checkpoint is untouched.
        """
        # One save at a time: the copies of the previous save are in memory that this save would
        # overwrite.
        previous_save = self.saved(wait=True)
        # The update of the last step may still be queued, and shards are views of the tensors that
        # it writes.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        callbacks, callback_metadata = self.callback_states.save()
        shards = self._owned_shards(options, callbacks)
        metadata = self._metadata() | callback_metadata
        if not options.async_save:
            return self._write(shards, metadata, options, self.progress.iteration, self._ranks)
        if self._background is None:
            self._background = BackgroundSaves()
            # A separate group: collectives of the saving thread must not mix with training's.
            self._background_ranks = replace(self._ranks, group=self.groups.another_world_group())
        write = partial(
            self._write,
            metadata=metadata,
            options=options,
            step=self.progress.iteration,
            ranks=self._background_ranks,
        )
        self._background.begin(write, shards)
        return previous_save

    def saved(self, *, wait: bool = False) -> SavedCheckpoint | None:
        """Return the checkpoint of the last background save, once, after it is published.

        Args:
            wait: wait for a save that is not finished; otherwise None is returned for it.
        Raises:
            CheckpointError: the checkpoint could not be written; the previous one is untouched.
        """
        return None if self._background is None else self._background.take(wait=wait)

    def _owned_shards(
        self, options: CheckpointConfig, callbacks: Sequence[Held]
    ) -> list[TensorShard]:
        groups = self.groups
        self.optimizer.buffers.wait_params()
        saved = held_state(self.model, self.optimizer if options.save_optim else None)
        owned = [held for held in (*saved, *callbacks) if held.owned]
        dense_shards = [held.shard for held in owned if held.replicated and not held.expert]
        experts = [held.shard for held in owned if held.replicated and held.expert]
        # Each rank writes a part of the replicated shards, so that a save takes a fraction of the time.
        shards = share_out(dense_shards, groups.dp_cp.rank, groups.dp_cp.size)
        shards += share_out(experts, groups.expert_dp.rank, groups.expert_dp.size)
        shards += [held.shard for held in owned if not held.replicated]
        rng = RngState.capture(self._device).tensors if options.save_rng else {}
        return shards + whole_tensors(
            {f"rng/rank_{groups.rank}/{name}": tensor for name, tensor in rng.items()}
        )

    def _metadata(self) -> dict[str, Any]:
        spikes = self.optimizer.spikes
        return {
            "progress": vars(self.progress).copy(),
            "plan_hash": self.plan_hash,
            **self.hashes._asdict(),
            "layout": self._layout,
            "rng": self._ranks.gather(dict(RngState.capture(self._device).metadata)),
            "config": self.config,
            **({} if spikes is None else {SPIKE_WINDOW: spikes.state()}),
            **stored_bounds(self.model),
            "room": None if self.plan is None else self.plan.room,
            BEST_STEP: self.progress.best_at or None,
            PHASES: [phase._asdict() for phase in self.phases],
            FOLDER: os.getcwd(),
            **({} if self.original is None else {ORIGINAL: self.original}),
        }

    def _write(
        self,
        shards: Sequence[TensorShard],
        metadata: dict[str, Any],
        options: CheckpointConfig,
        step: int,
        ranks: Ranks,
    ) -> SavedCheckpoint:
        assert options.save is not None
        return save_checkpoint(
            options.save,
            step,
            shards,
            metadata,
            rank=ranks.rank,
            world_size=ranks.world_size,
            group=ranks.group,
            run_id=self.run_id,
            config_hash=self.model_hash,
            keep_last=options.keep_last,
            keep_every=options.save_retain_interval,
            keep_step=metadata[BEST_STEP] if options.save_best else None,
            run_lock=self._lock,
            attached=self.attached,
        )

    def load(self, options: CheckpointConfig) -> LoadedCheckpoint:
        """Restore the newest valid checkpoint of ``options.load`` (or ``ckpt_step``); a collective.

        With ``finetune`` only the model's tensors are loaded, and the run starts at iteration 0. Only
        their shapes are compared: options may differ, for example a larger ``rotary_base`` for longer
        documents. A checkpoint written in another layout restores everything except random states,
        which start from the seed. Tensors that the checkpoint lacks keep their values, if
        ``dist_ckpt_strictness`` allows it. Missing masters, and all masters without ``load_optim``,
        are computed from the weights.

        Raises:
            NoCheckpointError: there is no checkpoint.
            CheckpointMismatchError: the checkpoint belongs to another model, precision or data, or
                to another order of the data.
            CheckpointError: no checkpoint is valid.
        """
        from megatron_packed.checkpoint.load import load_checkpoint

        # The load writes random states into these tensors. They are applied only after the whole
        # checkpoint has been verified.
        rng = RngState.capture(self._device)
        with_optimizer, with_rng = (
            x and not options.finetune for x in (options.load_optim, options.load_rng)
        )
        self.optimizer.buffers.wait_params()
        wanted = [held.shard for held in held_state(self.model)]
        state = LoadedOptimizerState(self.model, self.optimizer) if with_optimizer else None
        if with_rng:
            wanted += whole_tensors(
                {f"rng/rank_{self.groups.rank}/{name}": t for name, t in rng.tensors.items()}
            )

        def more_wanted(manifest: Manifest) -> list[TensorShard]:
            of_optimizer = [] if state is None else state.wanted(manifest)
            of_callbacks = [] if options.finetune else self.callback_states.wanted(manifest)
            return [*of_optimizer, *of_callbacks]

        unwanted = () if with_optimizer else ("optimizer/",)
        assert options.load is not None
        show = self._show and self.groups.rank == 0
        with ProgressBar("reading the checkpoint", 1, show) as bar:
            loaded = load_checkpoint(
                options.load,
                wanted,
                rank=self.groups.rank,
                world_size=self.groups.world_size,
                group=self.groups.world_group,
                step=options.ckpt_step,
                allow_missing=("",) if options.allows_unexpected else ("rng/",),
                allow_extra=("",) if options.allows_missing else ("rng/", "callback/", *unwanted),
                accept=self.refusals.for_fine_tuning if options.finetune else self._refusal,
                more_wanted=more_wanted,
                warn=None if self._show else lambda line: None,
                on_read=lambda done, total: bar.update(done, total=total),
            )
        if state is None:
            # Masters still hold the start values, which the next step would copy over the weights.
            self.optimizer.reset_masters()
        else:
            self._reset_masters(loaded.missing)
            state.convert()
            self._round_weights(loaded.metadata)
        self.original = loaded.metadata.get(ORIGINAL)
        if options.finetune:
            return loaded
        self._go_on(loaded, rng if with_rng else None)
        return loaded

    def _refusal(self, metadata: Metadata) -> str | None:
        """Return why a run cannot resume from a checkpoint; None if it can."""
        return self.refusals.for_resuming(metadata) or self.callback_states.refusal(metadata)

    def _go_on(self, loaded: LoadedCheckpoint, rng: RngState | None) -> None:
        """Restore position, spike window and random states from a checkpoint.

        Args:
            rng: random states with tensors from the checkpoint; None does not restore them.
        """
        resumed = Resumed.from_metadata(loaded.metadata, begun_phase(self.config))
        self.resumed = resumed
        self.phases = resumed.phases
        self.progress = resumed.progress_in(self.config, self.plan, self.hashes)
        self.hashes = self.hashes.keeping(resumed.hashes)
        spikes = self.optimizer.spikes
        # Losses of other data would make every step of a new phase a spike.
        if spikes is not None and SPIKE_WINDOW in loaded.metadata and not resumed.begins:
            spikes.load_state(loaded.metadata[SPIKE_WINDOW])
        restore_bounds(self.model, loaded.metadata)
        if self.plan is not None:
            done = self.progress
            samples = done.samples(self.config["packing"]["micro_batch_size"])
            self.plan.resume(done.iteration, done.consumed_packs - done.plan_packs, samples)
        self.run_id = loaded.run_id
        self.callback_states.restore()
        # In another layout, ranks draw other random numbers anyway; their states start from the
        # seed.
        same_layout = loaded.metadata.get("layout") == self._layout
        if (
            rng is not None
            and same_layout
            and not any(n.startswith("rng/") for n in loaded.missing)
        ):
            metadata = loaded.metadata["rng"][self.groups.rank]
            RngState(tensors=rng.tensors, metadata=metadata).restore(self._device)

    @torch.no_grad()
    def _reset_masters(self, missing: Sequence[str]) -> None:
        """Copy this rank's weights to the masters that the checkpoint lacks."""
        masters, starts = self.optimizer.state_shards(), self.optimizer.state_starts()
        for name in (
            name.removeprefix("optimizer/")
            for name in missing
            if name.startswith("optimizer/master/")
        ):
            parameter = name.removeprefix("master/")
            if name not in masters:  # The master is a pair.
                masters[f"remainder/{parameter}"].zero_()
                continue
            weights = self.model.get_parameter(parameter).view(-1)
            masters[name].copy_(weights[starts[name] : starts[name] + masters[name].numel()])

    def _round_weights(self, metadata: Metadata) -> None:
        """Round the weights again if masters of the run or of the checkpoint may be pairs.

        A pair rounds a master halfway between two bf16 numbers up, and others round it to the even
        number. Ranks that own no master of a weight have loaded the checkpoint's weight.
        """
        config = metadata["config"]
        stored = config.get("optim", {}).get("use_precision_aware_optimizer", False)
        imported = "packing" not in config
        if stored or imported or self.optimizer.precision.remainders:
            self.optimizer.write_params()

    @property
    def _layout(self) -> dict[str, int]:
        """Sizes that decide which random numbers each rank draws."""
        groups = self.groups
        return {
            "world_size": groups.world_size,
            "tp_size": groups.tp.size,
            "cp_size": groups.cp.size,
            "sequence_parallel": int(self.model.tp.sequence_parallel),
        }
