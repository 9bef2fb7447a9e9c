"""Folders of adapters as PEFT and vLLM read them, written and read without their code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.load import ADAPTER_CONFIG
from megatron_packed.config import flag_names as flags
from megatron_packed.config.parser.did_you_mean import did_you_mean, nearest
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.lora import is_adapter
from megatron_packed.models.convert.adapters.factors import Factors
from megatron_packed.models.convert.adapters.matrices import (
    AdaptableWeight,
    adaptable_weights,
    module_paths,
    shortened,
    target_words,
    trained_rows,
)
from megatron_packed.models.convert.adapters.peft_config import (
    PeftConfig,
    fields_of,
    read_peft_config,
)
from megatron_packed.models.convert.adapters.peft_names import PREFIX
from megatron_packed.models.convert.adapters.peft_tensors import (
    factors_of,
    from_peft,
    peft_tensors,
    recognised,
)
from megatron_packed.models.convert.adapters.vllm_names import vllm_tensors
from megatron_packed.models.convert.export_huggingface import new_directory, write_texts
from megatron_packed.models.convert.families.family import MTP, OUTPUT, TABLE, Family
from megatron_packed.models.convert.huggingface_files import ModelFiles, write_safetensors
from megatron_packed.models.convert.model_weights import weights_of
from megatron_packed.models.convert.trained_config import json_text
from megatron_packed.models.convert.weight_rows import Weight, loaded_path

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT, VLLM = "peft", "vllm"
"""Programs for which a folder is written."""
_REFUSED = {
    **dict.fromkeys(("nemotron_h", "mamba2"), ("out_proj", "conv1d")),
    "qwen3_next": ("gate_proj", "up_proj", "down_proj"),
}
"""Last names of modules that PEFT 0.21.2 gives no adapter, by family.

It raises an error for the first two families (``_check_lora_target_modules_mamba``). In the third it
takes the names for those of routed experts (``_convert_peft_config_moe``).
"""


class Adapters(NamedTuple):
    """Adapters of a trained model in the form of a family."""

    config: ModelConfig
    """The model, with the options of adapters."""
    family: Family
    weights: list[AdaptableWeight]
    split: dict[str, Factors]
    """Factors by the path of their matrix."""
    whole_in_files: dict[str, Tensor]
    """Tensors that are trained whole, by their names in the weights' files."""
    left_out: tuple[str, ...]
    """Names of trained tensors for which transformers has no module."""

    @property
    def whole(self) -> dict[str, Tensor]:
        """Tensors that are trained whole, by their names in a model of transformers.

        PEFT reads the table of a tied model under both of its names.
        """
        whole = {_loaded(name, self.family): value for name, value in self.whole_in_files.items()}
        if self.tied_table is not None:
            whole[self.family.outside[OUTPUT]] = self.tied_table
        return whole

    @property
    def tied_table(self) -> Tensor | None:
        """Table of a tied model, if it is trained whole."""
        if self.config.untie_embeddings_and_output_weights:
            return None
        return self.whole_in_files.get(_table(self.family))


def collected(config: ModelConfig, family: Family, stored: Mapping[str, Tensor]) -> Adapters:
    """Return the adapters of a model in the form of a family.

    Args:
        config: the model, with the options of adapters.
        stored: trained tensors by their names in the model.
    """
    weights = adaptable_weights(config, family)
    rows = trained_rows(config)
    left_out = [name for name in rows if name not in {weight.name for weight in weights}]
    whole: dict[str, Tensor] = {}
    every = _every_weight(config, family)
    for name, value in stored.items():
        if not is_adapter(name) and name in every:
            parts = every[name].split(value)
            if any(part.startswith(MTP) for part in parts):
                left_out.append(name)
            else:
                whole |= parts
    split = factors_of(stored, weights, rows)
    return Adapters(config, family, weights, split, whole, tuple(left_out))


def _every_weight(config: ModelConfig, family: Family) -> dict[str, Weight]:
    return weights_of(family, replace(config, lora_rank=None), torch.float32)


def _table(family: Family) -> str:
    """Return the name of the embedding table in the weights' files."""
    return family.outside[TABLE].replace("{model}", family.prefixes[0])


def _loaded(name: str, family: Family) -> str:
    """Return the name in a model of transformers of a tensor of a file."""
    stem, _, end = name.rpartition(".")
    return f"{loaded_path(stem, family)}.{end}"


def refused_by_peft(adapters: Adapters) -> list[str]:
    """Return the paths of the adapters that PEFT does not load."""
    ends = _REFUSED.get(adapters.family.model_type, ())
    modules = [
        matrix.path
        for weight in adapters.weights
        if not weight.stacked
        for matrix in weight.matrices
    ]
    return [p for p in modules if p in adapters.split and p.rpartition(".")[2] in ends]


def write_adapters(
    directory: Path,
    adapters: Adapters,
    *,
    program: str = PEFT,
    base_model: str | None = None,
    files: Mapping[str, str | Path | None] = {},
) -> None:
    """Write a new folder of adapters.

    Args:
        program: `PEFT` or `VLLM`, which decides about names and forms of experts.
        base_model: name or path of the base, for programs that load it.
        files: further files; None stands for no file.
    Raises:
        CheckpointError: the program has no form for a matrix, or ``directory`` cannot be written.
    """
    weights, split, config = adapters.weights, adapters.split, adapters.config
    modules = [m for weight in weights if not weight.stacked for m in weight.matrices]
    adapted = [matrix for matrix in modules if matrix.path in split]
    parameters = [weight.matrices[0].path for weight in weights if weight.stacked]
    stacked = [path for path in parameters if path in split]
    if program == VLLM:
        if adapters.whole_in_files:
            raise CheckpointError(
                f"vLLM loads no weights that are saved whole, such as {next(iter(adapters.whole))}",
                cure="merge the adapters instead",
            )
        tensors = vllm_tensors(weights, split, config, adapters.family)
        targets = sorted({matrix.file.rpartition(".")[2] for matrix in adapted})
    else:
        tensors = peft_tensors(weights, split)
        paths = [matrix.path for matrix in adapted]
        targets = shortened(paths, module_paths(config, adapters.family) - set(paths))
    ranks = {
        path: factors.B.shape[-1]
        for path, factors in split.items()
        if factors.B.shape[-1] != config.lora_rank
    }
    if ranks and program == VLLM:
        raise CheckpointError(
            f"{min(ranks)} has rows of several adapters, and vLLM has one rank for all matrices",
            cure="merge the adapters instead",
        )
    ends = shortened(stacked, set(parameters) - set(stacked), components=3)
    fields = fields_of(
        PeftConfig(
            r=config.lora_rank or 1,
            lora_alpha=config.lora_alpha,
            use_rslora=config.lora_rslora,
            lora_dropout=0.0 if stacked else config.lora_dropout,
            rank_pattern=ranks,
            alpha_pattern={
                path: config.lora_scale * _divisor(config, r) for path, r in ranks.items()
            },
            target_parameters=tuple(ends),
            modules_to_save=tuple(_saved_modules(adapters)),
            base_model=base_model,
        ),
        targets,
    )
    fields["ensure_weight_tying"] = adapters.tied_table is not None
    tensors |= {PREFIX + path: value for path, value in adapters.whole.items()}
    content = [(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]
    with new_directory(directory, flags.TO_PEFT) as temporary:
        write_safetensors(temporary / ADAPTER_WEIGHTS, content, tensors.__getitem__)
        write_texts(temporary, {**files, ADAPTER_CONFIG: json_text(fields)})


def _divisor(config: ModelConfig, rank: int) -> float:
    """Return alpha / s of an adapter of this rank."""
    return math.sqrt(rank) if config.lora_rslora else rank


def _saved_modules(adapters: Adapters) -> list[str]:
    """Return the paths of modules whose tensors are all trained whole.

    Raises:
        CheckpointError: a tensor is no weight of a module, or the module has others that are frozen.
    """
    if not adapters.whole_in_files:
        return []
    every = _every_weight(adapters.config, adapters.family)
    saved = {_loaded(name, adapters.family) for name in adapters.whole_in_files}
    paths = {_loaded(part.name, adapters.family) for w in every.values() for part in w.parts}
    modules = sorted({path.rpartition(".")[0] for path in saved})
    for module in modules:
        tensors = {path for path in paths if path.rpartition(".")[0] == module}
        frozen = sorted(tensors - saved)
        if frozen or not all(path.endswith((".weight", ".bias")) for path in tensors):
            problem = (
                f"{frozen[0]} is frozen" if frozen else "it holds more than a weight and a bias"
            )
            raise CheckpointError(
                f"{module} cannot be saved whole beside adapters, because {problem}",
                cure="merge the adapters instead",
            )
    return modules


def read_adapters(
    directory: Path, model: ModelConfig, family: Family
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Read a folder of adapters that PEFT wrote.

    Args:
        model: the base.
        family: family of the base, whose names the file has.
    Returns:
        The model with the options of adapters, and the tensors by their names in it.
    Raises:
        CheckpointError: the folder has no such adapters, or they do not fit the base; the message
            names each option and tensor that is not supported.
    """
    config = read_peft_config(directory)
    files = ModelFiles(directory, ADAPTER_WEIGHTS)
    names = {_loaded(name, family): name for name in files.places}
    tensors = {name: files.read(stored) for name, stored in names.items()}
    if unsound := [name for name, value in tensors.items() if not value.isfinite().all()]:
        raise CheckpointError(f"{unsound[0]} is not finite", path=directory / ADAPTER_WEIGHTS)
    weights = adaptable_weights(model, family)
    try:
        shapes = {name: tuple(value.shape) for name, value in tensors.items()}
        found = recognised(shapes, config, weights)
        whole = _joined_whole(
            {name.removeprefix(PREFIX): tensors[name] for name in found.whole}, model, family
        )
        adapted = replace(
            model,
            lora_rank=config.r,
            lora_alpha=float(config.lora_alpha),
            lora_rslora=config.use_rslora,
            lora_dropout=float(config.lora_dropout),
            lora_target_modules=target_words(model, weights, found.stems),
            lora_modules_to_save=tuple(whole),
        )
        return adapted, {
            **from_peft(tensors, config, weights, trained_rows(adapted)),
            **whole,
        }
    except CheckpointError as error:
        raise CheckpointError(str(error), path=directory / ADAPTER_WEIGHTS) from None


def _joined_whole(
    tensors: Mapping[str, Tensor], model: ModelConfig, family: Family
) -> dict[str, Tensor]:
    """Return the tensors of the model that a file has whole.

    Raises:
        CheckpointError: a tensor belongs to no module of the base, has another shape, or is only a
            part of a tensor of the model.
    """
    left, joined = set(tensors), {}
    output = family.outside[OUTPUT]
    if output in left and not model.untie_embeddings_and_output_weights:
        table = tensors.get(_loaded(_table(family), family))
        if table is None or not torch.equal(tensors[output], table):
            raise CheckpointError(f"{output} differs from the table with which the base ties it")
        left.remove(output)
    for name, weight in _every_weight(model, family).items():
        theirs = {_loaded(part.name, family): part for part in weight.parts}
        present = theirs.keys() & tensors.keys()
        if not present:
            continue
        if missing := sorted(theirs.keys() - present):
            raise CheckpointError(f"{min(present)} is saved whole without {missing[0]}")
        for path, part in theirs.items():
            if tuple(tensors[path].shape) != part.shape:
                shapes = f"{list(tensors[path].shape)}, but the base has {list(part.shape)}"
                raise CheckpointError(f"{path} is {shapes}")
        in_files = {part.name: tensors[path] for path, part in theirs.items()}
        joined[name] = weight.join(in_files.__getitem__)
        left -= present
    if left:
        name = min(left)
        near = nearest(name, module_paths(model, family), 1)
        raise CheckpointError(
            f"{name} belongs to no module of the base ({did_you_mean(near, 'none is near')})"
        )
    return joined
