"""Facts about a run for its log, from which the report page says what was run."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from megatron_packed import __version__
from megatron_packed.checkpoint.run_metadata import Phase
from megatron_packed.config.optional_packages import PACKAGES, version_of
from megatron_packed.config.run import RunConfig
from megatron_packed.config.serialise import given_flags
from megatron_packed.distributed.collectives import all_gather_json
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.estimate.parameter_count import count_parameters
from megatron_packed.models.trace import complete_model
from megatron_packed.models.trained_share import trained_by_part
from megatron_packed.reporting.log_file import STARTS, RunIdentity


def opening_of(
    config: RunConfig,
    groups: ParallelGroups,
    kernels: dict[str, str],
    *,
    vocab_size: int,
    packing: Sequence[str],
    accounts: Mapping[str, Mapping[str, int]],
    identity: RunIdentity,
    iteration: int,
    last_iteration: int,
    phases: Sequence[Phase] = (),
) -> dict[str, Any]:
    """Return the fields that the first line of the log adds to a step; a collective.

    Args:
        config: configuration of the run.
        groups: process groups of this rank.
        kernels: names of the kernels, by op.
        vocab_size: entries of the vocabulary.
        packing: sentences about the packs (`RunData.sentences`).
        accounts: counts of kept and dropped tokens and targets (`RunData.accounts`).
        identity: identity of the run, by which a later start recognises its log.
        iteration: finished steps of the run.
        last_iteration: step at which the run ends.
        phases: phases of the run, the current one last.
    """
    run = {
        "id": identity.run_id,
        "folder": identity.folder,
        "log": identity.log,
        "last_iteration": last_iteration,
        "phases": [phase._asdict() for phase in phases],
        "model": _model(config, vocab_size),
        "layout": _layout(config, groups),
        "files": _files(config),
        "machine": _machine(groups),
        "versions": versions(),
        "checkpoints": {"save": config.checkpoint.save, "load": config.checkpoint.load},
        "packing": list(packing),
        "flags": given_flags(config),
    }
    start = {"step": iteration, "time": now()}
    return {"data": accounts, "kernels": kernels, "run": run, STARTS: [start]}


def now() -> str:
    """Return the local time with its offset from UTC.

    Example:
        ``2026-01-31T12:00:00+01:00``.
    """
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _model(config: RunConfig, vocab_size: int) -> dict[str, Any]:
    counts = count_parameters(config.model, vocab_size)
    model = complete_model(config.model, vocab_size)
    return {
        "pattern": config.model.hybrid_layer_pattern,
        "layers": len(config.model.layer_types),
        "hidden_size": config.model.hidden_size,
        "vocabulary": vocab_size,
        "parameters": counts.total,
        "active_parameters": counts.active,
        "precision": config.precision,
        **({"trained": trained_by_part(model)} if config.model.has_adapters else {}),
    }


def _layout(config: RunConfig, groups: ParallelGroups) -> dict[str, int]:
    return {
        "processes": groups.world_size,
        "data_parallel": groups.dp.size,
        "tensor_parallel": groups.tp.size,
        "context_parallel": groups.cp.size,
        "expert_parallel": groups.ep.size,
        "tokens_per_pack": config.packing.tokens_per_pack,
        "packs_per_step": config.packs_per_step(),
        "seq_length": config.packing.seq_length,
    }


def _files(config: RunConfig) -> dict[str, list[list[Any]]]:
    """Return ``[path, share]`` of each data path, for each of training, validation and test.

    The share of the tokens is None without blend weights.
    """
    data = config.data
    blends = {"training": data.train_blend, "validation": data.valid_blend, "test": data.test_blend}
    return {
        name: [
            [path, None if share is None else round(float(share), 6)]
            for path, share in zip(blend.paths, blend.weights or [None] * len(blend.paths))
        ]
        for name, blend in blends.items()
    }


def _machine(groups: ParallelGroups) -> dict[str, Any]:
    """Return the devices, hosts and processor of the run; a collective."""
    on_gpu = groups.device.type == "cuda"
    name = torch.cuda.get_device_name(groups.device) if on_gpu else "CPU"
    of_ranks = all_gather_json([name, socket.gethostname()], groups)
    names, hosts = (list(dict.fromkeys(column)) for column in zip(*of_ranks))
    return {
        "device": ", ".join(names),
        "devices": groups.world_size if on_gpu else 0,
        "hosts": len(hosts),
        "host": hosts[0],
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
    }


def _processor(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the processor, or its architecture if the system does not tell the name."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return name -> version of this project, Python, torch, CUDA and the packages of kernels."""
    versions_by_name = {"megatron_packed": __version__, "Python": platform.python_version()}
    for package in PACKAGES:
        version = version_of(package.name) if package.kernels or package.name == "torch" else None
        if version is not None:
            versions_by_name[package.name] = version
    # The wheel of torch is built for this version of CUDA; a build for CPUs has none.
    if torch.version.cuda is not None:
        versions_by_name["CUDA"] = torch.version.cuda
    return versions_by_name
