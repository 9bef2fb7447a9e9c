"""Random adapters of PEFT on tiny models of transformers, and the same in a model of ours."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.adapters.factors import Factors, merged
from megatron_packed.models.convert.adapters.matrices import (
    AdaptableWeight,
    adaptable_weights,
    factor_name,
    target_words,
    trained_rows,
)
from megatron_packed.models.convert.families.family import Family
from megatron_packed.models.convert.huggingface_config import model_of, read_config
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.lm_head_and_loss import scaled_logits
from support import hybrid_cases as cases
from support.converted_model import opened
from support.huggingface_models import FAMILIES

RANK, ALPHA = 3, 6.0


@dataclass(frozen=True)
class Base:
    """Model of transformers in float64, and the same weights for models of ours."""

    theirs: Any
    family: Family
    config: ModelConfig
    state: dict[str, Tensor]
    weights: list[AdaptableWeight]

    def modules(self) -> list[str]:
        """Return the paths of all modules that PEFT lets have adapters."""
        refused = {
            "nemotron_h": "out_proj",
            "qwen3_next": ("shared_expert.gate_proj", ".up_proj", ".down_proj"),
        }.get(self.family.model_type)
        return [
            matrix.path
            for weight in self.weights
            for matrix in weight.matrices
            if not weight.stacked and not (refused and matrix.path.endswith(refused))
        ]

    def parameters(self) -> list[str]:
        return [weight.matrices[0].path for weight in self.weights if weight.stacked]

    def ours(self, adapters: dict[str, Tensor], targets: Collection[str]) -> HybridModel:
        """Return a model of ours with adapters of the matrices with these paths, in float64."""
        return model_of_state(self.lora(targets), {**self.state, **adapters})

    def merged(self, adapters: dict[str, Tensor], targets: Collection[str]) -> HybridModel:
        """Return a model of ours with the sums of weights and adapters."""
        state = dict(self.state)
        for name, rows in trained_rows(self.lora(targets)).items():
            stacked = Factors(*(adapters[factor_name(name, which)] for which in "AB"))
            state[name] = merged(state[name], stacked, ALPHA / RANK, rows)
        return model_of_state(self.config, state)

    def plain(self) -> HybridModel:
        """Return a model of ours without adapters."""
        return model_of_state(self.config, self.state)

    def lora(self, targets: Collection[str]) -> ModelConfig:
        """Return the options of a model with adapters of the matrices with these paths."""
        words = target_words(self.config, self.weights, targets)
        return replace(
            self.config, lora_rank=RANK, lora_alpha=ALPHA, lora_target_modules=tuple(words)
        )


def model_of_state(config: ModelConfig, state: dict[str, Tensor]) -> HybridModel:
    """Return a model of ours with these tensors, in float64."""
    assert config.vocab_size is not None
    vocab_size = config.vocab_size
    model = HybridModel(config, vocab_size=vocab_size, max_positions=256, dtype=torch.float64)
    model.load_state_dict(state)
    return model.eval()


def random_base(name: str, number: int, folder: Path) -> Base:
    """Return a random tiny model of a family, by its name in `huggingface_models.FAMILIES`."""
    return base_of(FAMILIES[name](random.Random(f"{name} {number}"), number), folder)


def base_of(theirs: Any, folder: Path) -> Base:
    """Return a model of transformers with its counterpart of ours."""
    theirs.save_pretrained(folder)
    theirs.set_experts_implementation("eager")  # the grouped product of torch has no float64
    family, config = model_of(read_config(folder / "config.json"), folder / "config.json")
    state = {key: value.double() for key, value in opened(folder)[1].items()}
    return Base(theirs.double(), family, config, state, adaptable_weights(config, family))


def with_adapters(base: Base, targets: list[str]) -> Any:
    """Return PEFT's model with random adapters of modules, and of all parameters of experts."""
    values = {
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": targets,
        "target_parameters": base.parameters() or None,
        "task_type": "CAUSAL_LM",
    }
    model = peft.get_peft_model(base.theirs, peft.LoraConfig(**values)).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                size = 0.3 if "lora_A" in name else 0.1
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return model


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Return the tensors that PEFT would write, with the dtypes of the model."""
    return dict(peft.get_peft_model_state_dict(model))


class _WideTorch:
    """Module torch, whose float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def in_float64(model: Any) -> Iterator[None]:
    """Compute in float64 where the code of a model of transformers converts to float32."""
    files = {type(module).__module__ for module in model.modules()}
    with contextlib.ExitStack() as stack:
        for name in files:
            if name.startswith("transformers.models"):
                stack.enter_context(mock.patch.object(sys.modules[name], "torch", _WideTorch()))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def logits_of(model: HybridModel, batch: Any) -> Tensor:
    """Return the logits of a pack in the dtype of the model."""
    hidden, _ = model.hidden_states(batch.tokens, model.prepare(batch.packed))
    return scaled_logits((hidden @ model.output_weight.t())[:, : cases.VOCAB], model.config)


@torch.no_grad()
def difference(theirs: Any, ours: HybridModel) -> float:
    """Return the norm of the difference of logits by that of logits, over documents of a pack."""
    documents = cases.make_documents(cases.AWKWARD)
    batch = cases.make_pack(documents, tail=5, spare=3)
    logits = logits_of(ours, batch)
    wrong = size = 0.0
    with in_float64(theirs):
        for number, (tokens, _) in enumerate(documents):
            expected = theirs(input_ids=torch.as_tensor(tokens)[None], use_cache=False).logits[0]
            mine = logits[batch.packed.seq_idx[0] == number]
            wrong += float((mine - expected).square().sum())
            size += float(expected.square().sum())
    return (wrong / size) ** 0.5


def losses_and_gradients(
    model: Any, ours: HybridModel, names: dict[str, str]
) -> Iterator[tuple[float, float, dict[str, Tensor], dict[str, Tensor]]]:
    """Yield loss and gradients of PEFT's model and of ours, for steps of plain gradient descent.

    Args:
        names: name of PEFT's parameter for each tensor of its file.
    """
    documents = cases.make_documents(cases.AWKWARD)
    batch = cases.make_pack(documents, tail=5, spare=3)
    theirs = dict(model.named_parameters())
    mine = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    for _ in range(5):
        loss = 0.0
        with in_float64(model):
            for tokens, mask in documents:
                tokens, mask = torch.as_tensor(tokens), torch.as_tensor(mask)
                logits = model(input_ids=tokens[None], use_cache=False).logits[0]
                each = F.cross_entropy(logits[:-1], tokens[1:], reduction="none")
                loss = loss + (each * mask[1:]).sum()
        found = ours(batch).loss_sum
        loss.backward()
        found.backward()
        of_theirs = {name: theirs[parameter].grad for name, parameter in names.items()}
        of_ours = {name: parameter.grad for name, parameter in mine.items()}
        yield float(loss), float(found), of_theirs, of_ours
        with torch.no_grad():
            for parameter in (*(theirs[name] for name in names.values()), *mine.values()):
                parameter -= 1e-4 * parameter.grad
                parameter.grad = None
