"""Statements about runs with adapters: what is trained, what a step costs, and what does not run."""

import shlex
from types import SimpleNamespace

import pytest
import torch

from megatron_packed.cli.main import main
from megatron_packed.config.run import RunConfig
from megatron_packed.explain import run_description
from megatron_packed.explain.capabilities import capabilities
from megatron_packed.models.estimate.step_memory import KnownUnits, MetaStep, Work
from megatron_packed.models.flops import FlopCounter
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.tensor_overlap import overlap_line
from megatron_packed.models.trained_share import adapter_line, trained_by_part
from support import hybrid_cases as cases

SHAPE = """--hybrid-layer-pattern M-*E --hidden-size 64 --num-attention-heads 4 --disable-bias-linear
    --mamba-head-dim 16 --mamba-num-groups 1 --num-experts 4 --normalization RMSNorm --seq-length 256
    --train-iters 1 --mock-data --vocab-size 260"""


def config_of(flags: str, processes: int = 1) -> RunConfig:
    return RunConfig.from_args(shlex.split(f"{SHAPE} {flags}"), world_size=processes)


def test_trained_parameters_are_counted_by_part() -> None:
    model = cases.tiny_model("*-/*", lora_rank=2, lora_modules_to_save=("final_norm.*",))
    attention = 2 * (3 * 32 + 64) + 2 * (32 + 32)
    parts = {
        "attention": 2 * attention,
        "mlp": 2 * (32 + 48) + 2 * (48 + 32),
        "multi-token prediction": 2 * (64 + 32),
        "whole weights": 32,
    }
    assert trained_by_part(model) == parts
    trained, every = sum(parts.values()), model.num_parameters
    assert adapter_line(model).startswith(
        f"adapters of rank 2 (scale 16): {trained:,} of {every:,} parameters are trained, "
        f"{100 * trained / every:.2g} %: "
    )
    assert adapter_line(cases.tiny_model("*-")) == ""


def test_operations_of_adapters_and_of_a_frozen_base() -> None:
    """A product of the base has a forward pass and the gradient of its input."""
    base = FlopCounter(cases.tiny_config("*"), cases.VOCAB)
    adapted = FlopCounter(cases.tiny_config("*", lora_rank=2), cases.VOCAB)
    factors = 2 * (3 * 32 + 64) + 2 * (32 + 32)
    plain, lora = base.training([10]), adapted.training([10])
    assert lora.projections == plain.projections * 2 / 3 + 10 * 6 * factors
    assert lora.output == pytest.approx(plain.output * 2 / 3)
    assert (lora.attention, lora.scan) == (plain.attention, plain.scan)


def test_a_measured_layer_is_not_used_for_one_with_an_adapter() -> None:
    config = cases.tiny_config("--", lora_rank=2, lora_target_modules=("layers.0.*",))
    model = HybridModel(config, vocab_size=cases.VOCAB, max_positions=64, device="meta")
    measured: KnownUnits = {}
    MetaStep(model, Work(tokens=64, documents=2), measured).units()
    assert len(measured) == 2


@pytest.mark.parametrize(("rate", "warned"), [("1e-5", True), ("5e-5", False), ("2e-4", False)])
def test_a_low_learning_rate_of_adapters_is_a_warning(rate: str, warned: bool) -> None:
    config = config_of(f"--lora-rank 4 --lr {rate} --position-embedding-type rope")
    _, *found = run_description.warned_capabilities(config, torch.device("cpu"), 1)
    assert [(row.name, row.state, row.detail.partition(" of full")[0]) for row in found] == [
        ("learning rate", "partial", "adapters usually need about 10 times the learning rate")
    ] * warned
    alone = config_of(f"--lr {rate} --position-embedding-type rope")
    (recomputation,) = run_description.warned_capabilities(alone, torch.device("cpu"), 1)
    assert recomputation.state == "off"


def test_explain_says_what_adapters_change() -> None:
    config = config_of("--lora-rank 4 --lora-target-modules attention experts --lr 1e-4")
    rows = {row.name: row for row in capabilities(config, torch.device("cpu"))}
    assert rows["adapters"].detail == (
        "rank 4 on attention experts; all other weights are frozen. Products with adapters are not "
        "joined with an activation or a residual; balancing of experts is off (--lora-keep-balancing)"
    )
    plain = capabilities(config_of("--lr 1e-4"), torch.device("cpu"))
    assert "adapters" not in {row.name for row in plain}


def test_the_line_about_overlap_names_adapters() -> None:
    overlap = SimpleNamespace(
        all_gather=True,
        reduce_scatter=False,
        reduce_scatter_dgrad=False,
        bulk_dgrad=False,
        bulk_wgrad=False,
    )
    products = SimpleNamespace(overlap=overlap, reason="", memory=object())
    model = SimpleNamespace(
        tp=SimpleNamespace(products=products), config=SimpleNamespace(has_adapters=True)
    )
    assert overlap_line(model) == (
        "tensor-parallel collectives: fused with products: all-gather; projections with adapters run "
        "their collectives apart from their products"
    )


def test_a_plan_has_the_trained_share_and_the_counted_products(capsys) -> None:
    words = f"{SHAPE} --lr 1e-4 --lora-rank 4 --gpu-memory-gib 20 --device cuda --bf16"
    assert main(["plan", *shlex.split(words)]) == 0
    text = capsys.readouterr().out
    assert "adapters of rank 4 (scale 8): " in text
    assert "MFU counts frozen weights in the same way." in text
