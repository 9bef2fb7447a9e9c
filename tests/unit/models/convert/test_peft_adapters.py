"""Comparison with PEFT: its adapters load here and ours load there, with the same logits."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_packed.models.convert.adapters.matrices import trained_rows
from megatron_packed.models.convert.adapters.peft_config import PeftConfig
from megatron_packed.models.convert.adapters.peft_folder import (
    collected,
    read_adapters,
    write_adapters,
)
from megatron_packed.models.convert.adapters.peft_tensors import from_peft, to_peft
from megatron_packed.models.convert.model_weights import model_on_meta

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from support import hybrid_cases as cases  # noqa: E402
from support.huggingface_models import common, filled_model, rotary  # noqa: E402
from support.peft_adapters import (  # noqa: E402
    ALPHA,
    RANK,
    Base,
    base_of,
    difference,
    logits_of,
    losses_and_gradients,
    model_of_state,
    random_base,
    tensors_of,
    with_adapters,
)

CASES = [
    ("qwen3_5", 0),
    ("qwen3_5_moe", 0),
    ("qwen3_next", 2),
    ("qwen3_moe", 0),
    ("nemotron_h", 4),
    ("granitemoehybrid", 0),
    ("granitemoehybrid", 1),
    ("llama", 0),
    ("olmo_hybrid", 1),
]
IN_FLOAT64 = {"olmo_hybrid"}
"""Families of which transformers computes everything in float64, and so does the model of ours."""


def config_of(base: Base) -> PeftConfig:
    return PeftConfig(r=RANK, lora_alpha=ALPHA, target_parameters=tuple(base.parameters()))


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize(("family", "number"), CASES)
def test_adapters_of_peft_have_its_logits(
    family: str, number: int, some: bool, tmp_path: Path
) -> None:
    """They load here, return to the bit, and merged weights have the same logits."""
    base = random_base(family, number, tmp_path)
    modules = base.modules()[:: 3 if some else 1]
    targets = modules + base.parameters()
    theirs = with_adapters(base, modules)
    tensors = tensors_of(theirs)
    rows = trained_rows(base.lora(targets))
    adapters = from_peft(tensors, config_of(base), base.weights, rows)
    ours, merged = base.ours(adapters, targets), base.merged(adapters, targets)
    with theirs.disable_adapter():
        without = difference(theirs, base.plain())
    found = difference(theirs, ours)
    assert found < 1e-9 if family in IN_FLOAT64 else found < min(1e-4, 2 * without)

    batch = cases.make_pack(cases.make_documents(cases.AWKWARD))
    with torch.no_grad():
        assert (logits_of(ours, batch) - logits_of(merged, batch)).abs().max() < 1e-11
    back = to_peft(adapters, base.weights, rows)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in back)


@pytest.mark.parametrize(("family", "number"), CASES)
def test_training_equals_that_of_peft(family: str, number: int, tmp_path: Path) -> None:
    """Five steps have its losses, and its gradients of every adapter."""
    base = random_base(family, number, tmp_path)
    targets = base.modules() + base.parameters()
    theirs = with_adapters(base, base.modules())
    tensors = tensors_of(theirs)
    rows = trained_rows(base.lora(targets))
    ours = base.ours(from_peft(tensors, config_of(base), base.weights, rows), targets)
    names = {name: name.replace(".weight", ".default.weight") for name in tensors}
    for loss, found, expected, gradients in losses_and_gradients(theirs, ours, names):
        assert abs(found - loss) < 1e-5 * loss
        for name, gradient in to_peft(gradients, base.weights, rows).items():
            wrong = (gradient - expected[name]).norm() / expected[name].norm()
            assert expected[name].any() and wrong < 1e-4, f"{name}: {float(wrong)}"


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_are_saved_whole_load_there(tied: bool, tmp_path: Path) -> None:
    """The table of a tied model counts for both of its uses."""
    draw = random.Random(3)
    sizes = {**common(draw), "tie_word_embeddings": tied, "num_hidden_layers": 1}
    theirs = filled_model(draw, "Llama", **sizes, rope_parameters=rotary(draw, False))
    base = base_of(theirs, tmp_path / "hf")
    whole = ("embedding.*", "final_norm.*")
    lora = replace(base.config, lora_rank=RANK, lora_alpha=ALPHA, lora_modules_to_save=whole)
    generator = torch.Generator().manual_seed(0)
    stored = {
        name: torch.randn(parameter.shape, generator=generator) * 0.2
        for name, parameter in model_on_meta(lora, torch.float32).named_parameters()
        if parameter.requires_grad
    }
    write_adapters(tmp_path / "folder", collected(lora, base.family, stored))
    there = peft.PeftModel.from_pretrained(theirs, tmp_path / "folder").double().eval()
    ours = model_of_state(lora, {**base.state, **stored})
    assert difference(there, ours) < 1e-6
    back, tensors = read_adapters(tmp_path / "folder", base.config, base.family)
    assert set(back.lora_modules_to_save) == {"embedding.weight", "final_norm.weight"}
    assert tensors.keys() == stored.keys()


@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_of_separate_matrices_load_as_those_of_joined_ones(
    rslora: bool, tmp_path: Path
) -> None:
    """The files of Qwen3-Next join matrices that have separate adapters here."""
    base = random_base("qwen3_next", 0, tmp_path / "hf")
    lora = replace(
        base.config,
        lora_rank=RANK,
        lora_alpha=ALPHA,
        lora_rslora=rslora,
        lora_target_modules=("gdn", "attention"),
    )
    generator = torch.Generator().manual_seed(0)
    stored = {
        name: torch.randn(parameter.shape, generator=generator) * 0.2
        for name, parameter in model_on_meta(lora, torch.float32).named_parameters()
        if parameter.requires_grad
    }
    write_adapters(tmp_path / "folder", collected(lora, base.family, stored))
    there = peft.PeftModel.from_pretrained(base.theirs, tmp_path / "folder").double().eval()
    assert difference(there, model_of_state(lora, {**base.state, **stored})) < 1e-6
