"""A trained model with its tokenizer, loaded from a folder of checkpoints to generate text."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

import torch

from megatron_packed.checkpoint.errors import NoCheckpointError
from megatron_packed.checkpoint.load import BEST, Step, newest_metadata
from megatron_packed.checkpoint.run_metadata import metadata_problem
from megatron_packed.config.parser.precedence import GivenOptions
from megatron_packed.config.parser.stored_options import take_for_inference
from megatron_packed.config.run import SECTIONS, STORED, RunConfig
from megatron_packed.config.section import section_fields
from megatron_packed.config.serialise import from_dict
from megatron_packed.data.tokenizers.base import Tokenizer, answer_text
from megatron_packed.data.tokenizers.untrusted_tokenizer import open_tokenizer
from megatron_packed.explain.kernel_reasons import check_implementation, chosen_kernels
from megatron_packed.inputs.open_documents import build_tokenizer
from megatron_packed.inputs.prompts import encode_prompts, texts
from megatron_packed.inputs.stored_files import stored_files
from megatron_packed.layers.transformer_impl import (
    LOCAL_NAME,
    TRANSFORMER_ENGINE_NAME,
    transformer_engine_refusal,
)
from megatron_packed.models.generate import generate
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.run_model import device_of, dtype_of
from megatron_packed.models.sampling import Sampling
from megatron_packed.resume.load_for_inference import load_model


def inference_device(config: RunConfig) -> torch.device:
    """Return the device that ``--device`` selects, after a check of the kernels.

    Raises:
        ValueError: the device is missing, or a kernel that the options force cannot run on it.
    """
    device = device_of(config)
    check_implementation(config, device)
    chosen_kernels(config, device)
    return device


def with_layers_of_this_machine(config: RunConfig) -> RunConfig:
    """Return the configuration with local layers if the checkpoint's cannot run on this machine.

    ``--transformer-impl`` of a training on GPUs may name TransformerEngine, which a CPU or another
    installation does not have. Local layers compute the same function. A given flag is not changed.

    Raises:
        ValueError: the device of ``--device`` is missing.
    """
    key = "training.transformer_impl"
    from_checkpoint = config.origins is None or config.origins[key] == STORED
    name = config.training.transformer_impl
    if not from_checkpoint or name != TRANSFORMER_ENGINE_NAME:
        return config
    if transformer_engine_refusal(device_of(config), dtype_of(config)) is None:
        return config
    return replace(config, training=replace(config.training, transformer_impl=LOCAL_NAME))


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model in evaluation mode on one device, with its tokenizer."""

    model: HybridModel
    tokenizer: Tokenizer
    config: RunConfig
    """Options of the model and of the tokenizer, as the checkpoint stores them."""

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        step: Step = None,
        tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
        device: str = "auto",
        base: str | os.PathLike[str] | None = None,
    ) -> TrainedModel:
        """Load the newest valid checkpoint of a run, of any parallel layout, on this process.

        Args:
            folder: the folder that ``--save`` named, or one checkpoint in it.
            step: load the checkpoint of this step, or with ``"best"`` that of the lowest validation
                loss (``--save-best``); None loads the newest valid one.
            tokenizer: a `Tokenizer`, or the path of a ``tokenizer.json`` or of its directory. None
                takes the files that the run was given, at the same paths; a tokenizer that was
                trained on the data is in the checkpoint.
            device: ``auto``, ``cpu`` or ``cuda``.
            base: folder of the weights to which the adapters in ``folder`` belong; None takes the
                folder from which their training loaded them.
        Raises:
            CheckpointError: there is no valid checkpoint.
            DataError: the tokenizer's files cannot be used.
            ValueError: the device is missing, the checkpoint names no tokenizer and none is given, or
                ``base`` is given for whole weights.
        """
        metadata = newest_metadata(folder, ("config",), step=step, problem=metadata_problem)
        if metadata is None:
            at = "" if step is None else f" of step {step}"
            at = " of the lowest validation loss (--save-best)" if step == BEST else at
            raise NoCheckpointError(
                f"there is no checkpoint{at}",
                path=folder,
                cure="name the folder that --save named" + (" and a step in it" if at else ""),
            )
        stored = metadata["config"]
        if tokenizer is None and "data" not in stored:
            raise ValueError(
                f"{os.fspath(folder)} holds converted weights, which name no tokenizer; give tokenizer=, the path of "
                "a tokenizer.json."
            )
        config = with_layers_of_this_machine(stored_run(stored, folder, step, device))
        if base is not None:
            if not config.model.has_adapters:
                raise ValueError(f"{os.fspath(folder)} holds no adapters; leave base= out.")
            options = replace(config.checkpoint, pretrained_checkpoint=os.fspath(base))
            config = replace(config, checkpoint=options)
        where = inference_device(config)
        if tokenizer is None:
            used = build_tokenizer(config.data, config.model.vocab_size)
        else:
            used = open_tokenizer(tokenizer)
        model = load_model(config, used, where, warn=partial(warnings.warn, stacklevel=3))
        return cls(model=model, tokenizer=used, config=config)

    @overload
    def generate(
        self,
        prompt: str,
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> str: ...

    @overload
    def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> list[str]: ...

    def generate(
        self,
        prompt: str | Sequence[str],
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> str | list[str]:
        """Return the text that the model adds to a prompt, or to each of several prompts.

        Args:
            prompt: the beginning of a text, or a user's message for a model trained with ``--sft``;
                or a list of prompts, which are generated together.
            max_new_tokens: stop an answer after this number of tokens.
            temperature: divisor of the logits; 0 always takes the most likely token.
            top_p: draw from the most likely tokens that together have this probability.
            seed: seed of the draws; None takes the seed of the run.
        Raises:
            ValueError: a prompt is too long for the rotary tables, or a number is out of range.
            DataError: a prompt is empty, or the tokenizer does not take the prompt.
        """
        sampling = Sampling(
            temperature=temperature,
            top_p=top_p,
            seed=self.config.training.seed if seed is None else seed,
        )
        given = texts([prompt] if isinstance(prompt, str) else prompt)
        tokens, ends = encode_prompts(self.config, self.tokenizer, given)
        new = generate(self.model, tokens, max_new_tokens, ends=ends, sampling=sampling)
        answers = [answer_text(self.tokenizer, answer) for answer in new]
        return answers[0] if isinstance(prompt, str) else answers


def stored_run(
    stored: Mapping[str, Mapping[str, Any]],
    folder: str | os.PathLike[str],
    step: Step,
    device: str,
) -> RunConfig:
    """Return the options of a checkpoint that decide what the model computes, for one process.

    Tokenizer and chat template have the paths of the checkpoint's own files, if it has such files.

    Args:
        stored: configuration in the checkpoint's metadata.
        folder: directory of the checkpoints.
        step: step of the checkpoint; None for the newest one.
        device: value of ``--device``.
    Raises:
        CheckpointError: the attached files of the checkpoint are damaged.
        ConfigError: a stored option is unknown to this version.
    """
    values: dict[str, Any] = {"checkpoint.load": os.fspath(folder), "training.device": device}
    if step is not None:
        values["checkpoint.ckpt_step"] = step
    # The parser's rules decide which options count, so that `generate` and Python agree.
    options = GivenOptions(values=values)
    take_for_inference(options, lambda values: stored)
    sections: dict[str, dict[str, Any]] = {
        # Options of a newer version are refused, because they may change what the model computes.
        name: _unknown_options(name, stored.get(name, {}))
        for name in ("model", "data")
    }
    for key, value in options.values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    config = from_dict(sections)
    files = stored_files(os.fspath(folder), step)
    if files is None:
        return config
    return replace(config, data=files.for_inference(config.data, prefers_stored=True))


def _unknown_options(section: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    known_names = {field.name for field in section_fields(SECTIONS[section])}
    return {name: value for name, value in stored.items() if name not in known_names}
