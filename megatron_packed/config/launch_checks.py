"""Checks of a configuration against this machine and this launch: packages and the number of
processes. Checks of paths are in ``path_checks.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_packed.config.cross_rules import batch_rule
from megatron_packed.config.errors import Problem, Problems
from megatron_packed.config.kernel_options import may_have_gpu
from megatron_packed.config.optional_packages import is_installed
from megatron_packed.config.run import RunConfig
from megatron_packed.config.section import Sound
from megatron_packed.config.sections.cuda_graph import TRANSFORMER_ENGINE
from megatron_packed.config.sections.data_parts.tokenizer import (
    HUGGING_FACE,
    SENTENCEPIECE,
    TIKTOKEN,
)
from megatron_packed.config.sections.parallel import AXIS_SIZES, NOT_BUILT, processes_rules


def environment_number(
    environ: Mapping[str, str], name: str, default: int, problems: list[Problem]
) -> int:
    """Return the value of a variable of torchrun (RANK, WORLD_SIZE or LOCAL_RANK). A wrong value is
    added to ``problems``.
    """
    text = environ.get(name, "").strip()
    if not text:
        return default
    if text.isdecimal() and int(text) < 2**31:
        return int(text)
    problems.append(
        Problem(
            name,
            repr(text),
            "the environment variable must be a whole number, as torchrun sets it",
            "start with torchrun, or unset it",
        )
    )
    return default


def launch_problems(run: RunConfig, world_size: int, sound: Sound) -> Problems:
    """Yield problems that depend on the number of processes."""
    if world_size < 1:
        yield Problem(
            "WORLD_SIZE",
            str(world_size),
            "there must be at least one process",
            "start with torchrun",
        )
        return
    if run.profiling.profile and sound("profiling.profile_ranks"):
        for rank in (rank for rank in run.profiling.profile_ranks if rank >= world_size):
            yield Problem(
                "--profile-ranks",
                str(rank),
                f"is not one of the {world_size} ranks",
                f"give numbers from 0 to {world_size - 1}",
            )
    of_layout = list(processes_rules(run.parallel, world_size, sound))
    yield from of_layout
    if not of_layout and sound(*(f"parallel.{name}" for name in (*AXIS_SIZES, *NOT_BUILT))):
        yield from batch_rule(run, world_size, sound)


def device_problems(run: RunConfig, environ: Mapping[str, str], sound: Sound) -> Problems:
    """Yield a problem if nccl is requested and no GPU is visible."""
    detects_device = (
        sound("parallel.distributed_backend", "training.device") and run.training.device == "auto"
    )
    if detects_device and run.parallel.distributed_backend == "nccl" and not may_have_gpu(environ):
        yield Problem(
            "--distributed-backend",
            "nccl",
            "runs only between GPUs, and no GPU is visible on this machine",
            "give gloo, or leave it out",
            node_dependent=True,
        )


def package_problems(run: RunConfig, sound: Sound) -> Problems:
    """Yield missing optional packages that an option needs, so that a run does not fail later."""
    requested = {
        "--transformer-impl": sound("training.transformer_impl")
        and run.training.transformer_impl == TRANSFORMER_ENGINE,
        "--cuda-graph-impl": sound("cuda_graph.cuda_graph_impl")
        and run.cuda_graph.uses_transformer_engine,
    }
    for flag in (
        flag for flag in requested if requested[flag] and not is_installed(TRANSFORMER_ENGINE)
    ):
        yield Problem(
            flag,
            TRANSFORMER_ENGINE,
            "needs TransformerEngine, which is not installed",
            "pip install 'megatron-packed[gpu]', or give local, which computes the same",
            node_dependent=True,
        )
    reads_with = {TIKTOKEN: "tiktoken", SENTENCEPIECE: "sentencepiece"}.get(run.data.tokenizer_type)
    if reads_with is not None and sound("data.tokenizer_type") and not is_installed(reads_with):
        yield run.data.problem(
            "tokenizer_type",
            f"needs {reads_with}, which is not installed",
            f"pip install 'megatron-packed[data]', or give a tokenizer.json with {HUGGING_FACE}",
            node_dependent=True,
        )
    for name, package, extra in (
        ("tensorboard_dir", "tensorboard", "log"),
        ("wandb_project", "wandb", "wandb"),
        ("mlflow_experiment", "mlflow", "mlflow"),
    ):
        value = getattr(run.logging, name)
        if value is not None and sound(f"logging.{name}") and not is_installed(package):
            yield Problem(
                run.logging.flag(name),
                value,
                f"needs {package}, which is not installed",
                f"pip install 'megatron-packed[{extra}]', or leave it out",
                node_dependent=True,
            )
