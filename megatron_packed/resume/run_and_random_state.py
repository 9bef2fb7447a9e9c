"""State of a run that its checkpoints store, so that it resumes as if it had never stopped.

Named tensors: ``model/<name>`` (parameters and persistent buffers), ``optimizer/<kind>/<name>`` and
``rng/rank_<r>/<generator>``, and those of callbacks (``callback_state.py``).
JSON object: the position in the data, the hash of the pack plan, random states that are not arrays,
and the configuration.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from megatron_packed.checkpoint.background_save import BackgroundSaves
from megatron_packed.checkpoint.directory import RootLock
from megatron_packed.checkpoint.rank_agreement import Ranks
from megatron_packed.checkpoint.run_metadata import (
    ADAPTERS,
    BEST_STEP,
    EXPERT_BOUNDS,
    FOLDER,
    ORIGINAL,
    PHASES,
    SPIKE_WINDOW,
    BaseWeights,
    Metadata,
    Phase,
    RunProgress,
)
from megatron_packed.checkpoint.save import SavedCheckpoint, save_checkpoint
from megatron_packed.checkpoint.tensor_shard import TensorShard, share_out, whole_tensors
from megatron_packed.config.sections.checkpoint import CheckpointConfig
from megatron_packed.config.serialise import model_hash
from megatron_packed.data.progress_bar import ProgressBar
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.rng import RngState
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.resume.callback_state import CallbackStates, StatefulCallback
from megatron_packed.resume.compared_runs import AskedRun, Resumed
from megatron_packed.resume.held_state import Held, HeldPart, held_state
from megatron_packed.resume.loaded_optimizer_state import LoadedOptimizerState

if TYPE_CHECKING:
    from megatron_packed.checkpoint.load_attempt import LoadedCheckpoint
    from megatron_packed.checkpoint.manifest import Manifest


@dataclass(eq=False)
class RunState:
    """State of one run, which it saves to and restores from checkpoints.

    A load writes model and optimizer in place, and moves the plan to the position of the run.
    """

    model: HybridModel
    optimizer: Optimizer
    groups: ParallelGroups
    """Process groups; all ranks write and all ranks read."""
    run: AskedRun
    _: KW_ONLY
    lock: RootLock | None = None
    """Rank 0's lock on the directory of checkpoints, verified at every save."""
    attached: Mapping[str, str] | None = None
    """Texts that each checkpoint contains, by file name."""
    show: bool = True
    """Show progress and warnings of loads on standard error."""
    callbacks: Sequence[StatefulCallback] = ()
    """Callbacks of the user, whose states are saved and restored."""
    progress: RunProgress = field(default_factory=RunProgress)
    original: Any = None
    """Facts of the Hugging Face model whose weights the run began with; None if there is none."""
    resumed: Resumed | None = None
    """The checkpoint from which the run continues."""
    base: BaseWeights | None = None
    """Weights that the run's adapters belong to; None without adapters, or before they are loaded."""

    def __post_init__(self) -> None:
        self.hashes = self.run.hashes
        phase = self.run.config.checkpoint.begin_phase
        self.phases: tuple[Phase, ...] = () if phase is None else (Phase(phase, 0),)
        """Phases of the run, the current one last."""
        self._device = self.groups.device
        self._ranks = Ranks.from_groups(self.groups)
        self.callback_states = CallbackStates(
            callbacks=self.callbacks, model=self.model, groups=self.groups, layout=self._layout
        )
        self._background = BackgroundSaves()
        self.run_id = str(self._ranks.gather(uuid.uuid4().hex[:12])[0])

    @cached_property
    def _background_ranks(self) -> Ranks:
        """Separate group: collectives of the saving thread must not mix with training's."""
        return replace(self._ranks, group=self.groups.another_world_group())

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """The configuration as a JSON object, stored in checkpoints."""
        return self.run.options

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
        assert options.save is not None
        write = partial(
            save_checkpoint,
            options.save,
            self.progress.iteration,
            metadata=metadata,
            run_id=self.run_id,
            config_hash=model_hash(self.run.config.model),
            keep_last=options.keep_last,
            keep_every=options.save_retain_interval,
            keep_step=metadata[BEST_STEP] if options.save_best else None,
            run_lock=self.lock,
            attached=self.attached,
        )
        if not options.async_save:
            return write(shards, **vars(self._ranks))
        self._background.begin(partial(write, **vars(self._background_ranks)), shards)
        return previous_save

    def saved(self, *, wait: bool = False) -> SavedCheckpoint | None:
        """Return the checkpoint of the last background save, once, after it is published.

        Args:
            wait: wait for a save that is not finished; otherwise None is returned for it.
        Raises:
            CheckpointError: the checkpoint could not be written; the previous one is untouched.
        """
        return self._background.take(wait=wait)

    def _owned_shards(
        self, options: CheckpointConfig, callbacks: Sequence[Held]
    ) -> list[TensorShard]:
        self.optimizer.buffers.wait_params()
        part = HeldPart.ADAPTERS if self.model.config.has_adapters else HeldPart.WHOLE
        saved = held_state(self.model, self.optimizer if options.save_optim else None, part)
        shards = self._shared_out([*saved, *callbacks])
        if options.save_rng:
            shards += self._rng_shards(RngState.capture(self._device))
        return shards

    def _shared_out(self, state: Sequence[Held]) -> list[TensorShard]:
        """Return the shards of this rank; all ranks together have each element exactly once."""
        groups, shards = self.groups, list[TensorShard]()
        owned = [held for held in state if held.owned]
        # Each rank writes a part of the replicated shards, so that a save takes a fraction of the time.
        for expert, axis in ((False, groups.dp_cp), (True, groups.expert_dp)):
            copies = [held.shard for held in owned if held.replicated and held.expert == expert]
            shards += share_out(copies, axis.rank, axis.size)
        return shards + [held.shard for held in owned if not held.replicated]

    def find_base(self, path: os.PathLike[str] | None = None) -> BaseWeights:
        """Record the identity of the weights that the adapters belong to; a collective.

        Args:
            path: checkpoint from which they were loaded; None for random weights.
        """
        from megatron_packed.resume.adapters import found_base

        shards = self._shared_out([*held_state(self.model, part=HeldPart.BASE)])
        seed = self.run.config.training.seed
        self.base = found_base(path, shards, seed=seed, ranks=self._ranks)
        return self.base

    def _rng_shards(self, rng: RngState) -> list[TensorShard]:
        place = f"rng/rank_{self.groups.rank}"
        return whole_tensors({f"{place}/{name}": tensor for name, tensor in rng.tensors.items()})

    def _metadata(self) -> dict[str, Any]:
        spikes, plan = self.optimizer.spikes, self.run.plan
        base = self.base
        if base is None and self.model.config.has_adapters:
            base = self.find_base()
        optional = {
            ADAPTERS: None if base is None else base._asdict(),
            SPIKE_WINDOW: None if spikes is None else spikes.state(),
            EXPERT_BOUNDS: self.model.expert_room.state(self.model.ep.size),
            ORIGINAL: self.original,
        }
        return {
            "progress": vars(self.progress).copy(),
            "plan_hash": "" if plan is None else plan.hash,
            **self.hashes._asdict(),
            "layout": self._layout,
            "rng": self._ranks.gather(dict(RngState.capture(self._device).metadata)),
            "config": self.config,
            "room": None if plan is None else plan.room,
            BEST_STEP: self.progress.best_at or None,
            PHASES: [phase._asdict() for phase in self.phases],
            FOLDER: os.getcwd(),
            **{key: value for key, value in optional.items() if value is not None},
        }

    def load(self, options: CheckpointConfig) -> LoadedCheckpoint:
        """Restore the newest valid checkpoint of ``options.load`` (or ``ckpt_step``); a collective.

        With ``finetune`` only the model's tensors are loaded, and the run starts at iteration 0. Only
        their shapes are compared: options may differ, for example a larger ``rotary_base`` for longer
        documents. A checkpoint written in another layout restores everything except random states,
        which start from the seed. Tensors that the checkpoint lacks keep their values, if
        ``dist_ckpt_strictness`` allows it. Missing masters, and all masters without ``load_optim``,
        are computed from the weights. If the checkpoint holds adapters alone, their base is loaded
        first: from ``pretrained_checkpoint``, else from where the adapters found it.

        Raises:
            NoCheckpointError: there is no checkpoint.
            CheckpointMismatchError: the checkpoint belongs to another model, precision or data, or
                to another order of the data, or its adapters to another base.
            CheckpointError: no checkpoint is valid.
        """
        from megatron_packed.resume.allowed_changes import CheckpointUse, refusal_of_use

        self.optimizer.buffers.wait_params()
        part = HeldPart.WHOLE
        if self.model.config.has_adapters:
            part = self._part_in(options)
        # The load writes random states into these tensors. They are applied only after the whole
        # checkpoint has been verified.
        rng, resumes = RngState.capture(self._device), not options.finetune
        loads_optimizer = options.load_optim and resumes
        state = LoadedOptimizerState(self.model, self.optimizer) if loads_optimizer else None
        wanted = [held.shard for held in held_state(self.model, part=part)]
        if options.load_rng and resumes:
            wanted += self._rng_shards(rng)

        def refused(metadata: Metadata) -> str | None:
            use = CheckpointUse.RESUME if resumes else CheckpointUse.FINE_TUNE
            problem = refusal_of_use(use, self.run, metadata) or self._other_part(part, metadata)
            return problem or (self.callback_states.refusal(metadata) if resumes else None)

        def more_wanted(manifest: Manifest) -> list[TensorShard]:
            of_optimizer = [] if state is None else state.wanted(manifest)
            return [*of_optimizer, *(self.callback_states.wanted(manifest) if resumes else ())]

        unwanted = ("rng/", "callback/", *(() if loads_optimizer else ("optimizer/",)))
        loaded = self._read(options, wanted, unwanted, refused, more_wanted)
        if part is HeldPart.BASE:
            self.find_base(loaded.path)
        if state is None:
            # Masters still hold the start values, which the next step would copy over the weights.
            self.optimizer.reset_masters()
        else:
            self._reset_masters(loaded.missing)
            state.convert()
            self._round_weights(loaded.metadata)
        self.original = loaded.metadata.get(ORIGINAL)
        if resumes:
            self._go_on(loaded, rng if options.load_rng else None)
        return loaded

    def _read(
        self,
        options: CheckpointConfig,
        wanted: Sequence[TensorShard],
        unwanted: Sequence[str],
        accept: Callable[[Metadata], str | None],
        more_wanted: Callable[[Manifest], list[TensorShard]] | None = None,
    ) -> LoadedCheckpoint:
        """Fill tensors from ``options.load``, with a progress bar; see `load_checkpoint`."""
        from megatron_packed.checkpoint.load import load_checkpoint

        assert options.load is not None
        show = self.show and self.groups.rank == 0
        with ProgressBar("reading the checkpoint", 1, show) as bar:
            return load_checkpoint(
                options.load,
                wanted,
                **vars(self._ranks),
                step=options.ckpt_step,
                allow_missing=("",) if options.allows_unexpected else ("rng/",),
                allow_extra=("",) if options.allows_missing else unwanted,
                accept=accept,
                more_wanted=more_wanted,
                warn=None if self.show else lambda line: None,
                on_read=lambda done, total: bar.update(done, total=total),
            )

    def _part_in(self, options: CheckpointConfig) -> HeldPart:
        """Return the part of the model that ``options.load`` holds, in a run with adapters.

        If it holds adapters, load their base first: that of ``pretrained_checkpoint``, else the base
        that the adapters name. A base that is loaded already stays.
        """
        from megatron_packed.resume.adapters import base_folder, refusal_as_base, stored_base
        from megatron_packed.resume.allowed_changes import CheckpointUse, refusal_of_use

        assert options.load is not None
        stored = stored_base(options.load, options.ckpt_step, self._ranks)
        if stored is None:
            return HeldPart.BASE
        if self.base is not None:
            return HeldPart.ADAPTERS
        folder = base_folder(options.load, stored, options.pretrained_checkpoint, self._ranks)
        if folder is None:
            self.find_base()
            return HeldPart.ADAPTERS

        def refused(metadata: Metadata) -> str | None:
            as_base = refusal_as_base(metadata)
            return as_base or refusal_of_use(CheckpointUse.FINE_TUNE, self.run, metadata)

        wanted = [held.shard for held in held_state(self.model, part=HeldPart.BASE)]
        unwanted = ("rng/", "callback/", "optimizer/")
        whole = replace(options, load=folder, ckpt_step=None, pretrained_checkpoint=None)
        self.find_base(self._read(whole, wanted, unwanted, refused).path)
        return HeldPart.ADAPTERS

    def of_adapters(self, options: CheckpointConfig) -> CheckpointConfig:
        """Return the options that load ``load_adapter`` beside the weights that are loaded already.

        Raises:
            CheckpointMismatchError: the folder has no adapters.
        """
        from megatron_packed.resume.adapters import no_adapters, stored_base

        folder = options.load_adapter
        assert folder is not None
        if stored_base(folder, ranks=self._ranks) is None:
            raise no_adapters(folder)
        return replace(options, load=folder, ckpt_step=None, begin_phase=None, finetune=True)

    def _other_part(self, part: HeldPart, metadata: Metadata) -> str | None:
        """Return why a checkpoint does not hold this part of a model, or belongs to another base."""
        from megatron_packed.resume.adapters import base_refusal, refusal_as_base

        if part is HeldPart.WHOLE:
            return None
        if part is HeldPart.BASE:
            return refusal_as_base(metadata)
        assert self.base is not None
        return base_refusal(metadata, self.base)

    def _go_on(self, loaded: LoadedCheckpoint, rng: RngState | None) -> None:
        """Restore position, spike window and random states from a checkpoint.

        Args:
            rng: random states with tensors from the checkpoint; None does not restore them.
        """
        metadata, run, spikes = loaded.metadata, self.run, self.optimizer.spikes
        resumed = Resumed(metadata, run.config.checkpoint.begin_phase)
        self.resumed = resumed
        self.phases = resumed.phases
        self.progress = resumed.progress_in(run.config, run.plan, run.hashes)
        self.hashes = run.hashes.keeping(resumed.hashes)
        self.run_id = loaded.run_id
        # Losses of other data would make every step of a new phase a spike.
        if spikes is not None and SPIKE_WINDOW in metadata and not resumed.begins:
            spikes.load_state(metadata[SPIKE_WINDOW])
        if EXPERT_BOUNDS in metadata:
            sends_parts = self.model.config.moe_token_dispatcher_type == "alltoall"  # noqa: S105
            self.model.expert_room.load_state(
                metadata[EXPERT_BOUNDS], self.model.ep.size, sends_parts=sends_parts
            )
        if run.plan is not None:
            done = self.progress
            samples = done.samples(run.config.packing.micro_batch_size)
            run.plan.resume(done.iteration, done.consumed_packs - done.plan_packs, samples)
        self.callback_states.restore()
        # In another layout, ranks draw other random numbers anyway; their states start from the
        # seed.
        same_layout = metadata.get("layout") == self._layout
        lacks_rng = any(name.startswith("rng/") for name in loaded.missing)
        if rng is not None and same_layout and not lacks_rng:
            replace(rng, metadata=metadata["rng"][self.groups.rank]).restore(self._device)

    @torch.no_grad()
    def _reset_masters(self, missing: Sequence[str]) -> None:
        """Copy this rank's weights to the masters that the checkpoint lacks."""
        starts = self.optimizer.state_starts()
        for name, state in self.optimizer.state_shards().items():
            kind, _, parameter = name.partition("/")
            if f"optimizer/master/{parameter}" not in missing:
                continue
            if kind == "remainder":
                state.zero_()
            elif kind == "master":
                weights = self.model.get_parameter(parameter).view(-1)
                state.copy_(weights[starts[name] : starts[name] + state.numel()])

    def _round_weights(self, metadata: Metadata) -> None:
        """Round the weights again if masters of the run or of the checkpoint may be pairs.

        A pair rounds a master halfway between two bf16 numbers up, and others round it to the even
        number. Ranks that own no master of a weight have loaded the checkpoint's weight.
        """
        stored = Resumed(metadata)
        pairs = stored.imported or stored.config.optim.use_precision_aware_optimizer
        if pairs or self.optimizer.precision.remainders:
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
