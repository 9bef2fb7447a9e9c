"""Configuration in the checkpoint that a command line loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_packed.config.environment_variables import apply_environment
from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.options import Stored
from megatron_packed.config.section import unchecked
from megatron_packed.config.sections.training import TrainingConfig


def stored_options(options: Mapping[str, Any]) -> Stored | None:
    """Return the configuration in the newest checkpoint of ``--load``, or if there is none of
    ``--pretrained-checkpoint`` or ``--load-adapter``; see `stored_options.ReadStored`.

    Raises:
        ConfigError: the checkpoint cannot be read.
    """
    training = {key.removeprefix("training."): value for key, value in options.items()}
    # Must precede the import of torch.
    apply_environment(unchecked(TrainingConfig, training))
    from megatron_packed.checkpoint.errors import CheckpointError
    from megatron_packed.checkpoint.load import find_checkpoints, newest_metadata
    from megatron_packed.checkpoint.run_metadata import FOLDER, found_paths, metadata_problem

    for name in ("load", "pretrained_checkpoint", "load_adapter"):
        folder = options.get(f"checkpoint.{name}")
        if folder is None:
            continue
        step = options.get("checkpoint.ckpt_step") if name == "load" else None
        try:
            keys = ("config", FOLDER)
            metadata = newest_metadata(folder, keys, step=step, problem=metadata_problem)
            candidates = find_checkpoints(folder) if metadata is None else []
            fault = next(
                (candidate.problem for candidate in candidates if candidate.problem is not None),
                None,
            )
        except CheckpointError as error:
            fault = str(error).rstrip(".")
        if fault is not None:
            cure = "load another checkpoint"
            if options.get("checkpoint.use_checkpoint_args"):
                cure += ", or leave --use-checkpoint-args out"
            raise ConfigError([Problem(f"--{name.replace('_', '-')}", folder, fault, cure)])
        if metadata is not None:
            config: dict[str, dict[str, Any]] = metadata["config"]
            if "data" in config:
                config["data"] |= found_paths(config["data"], metadata.get(FOLDER))
            return config
    return None
