"""Product of quack that adds the residual, on a GPU: float64, rows, equal bits, graphs, whole layers."""

import pytest
import torch

from megatron_packed.config.optional_packages import is_installed
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.ops.residual_projection.api import OP, ResidualProjectionInputs
from megatron_packed.packed.micro_batch import MicroBatch
from support.hybrid_cases import VOCAB, tiny_config
from support.op_packs import assert_replays, no_sync, norm_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_installed("quack.gemm"), reason="quack is not installed"),
]
SIZES = [(1000, 512, 768), (1, 64, 1024), (129, 72, 40)]
"""Tokens, input and output width; the tiles are 128 x 192, 128 x 128 and 128 x 128."""


def product_of(inner, channels):
    inputs = ResidualProjectionInputs(
        inner=inner, channels=channels, dtype=torch.bfloat16, device_type="cuda"
    )
    chosen = OP.select(inputs)
    assert chosen.name == "quack"
    return chosen.loaded.added_product


def values(tokens, inner, channels, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    weight = (draw(channels, inner).float() * inner**-0.5).bfloat16()
    return {"residual": draw(tokens, channels), "x": draw(tokens, inner), "weight": weight}


@pytest.mark.parametrize("size", SIZES)
def test_the_sum_errs_less_than_that_of_separate_operations(size):
    given = values(*size)
    residual, x, weight = given.values()
    got = product_of(*size[1:])(residual, x, weight)
    exact = residual.double() + x.double() @ weight.double().t()
    assert norm_error(got, exact) <= norm_error(residual + x @ weight.t(), exact) < 5e-3
    assert norm_error(got, exact) < 1.05 * norm_error(exact.bfloat16(), exact)  # one rounding


def test_every_run_gives_the_same_bits_and_a_row_depends_on_itself_only():
    tokens, *widths = SIZES[0]
    given, product = values(*SIZES[0]), product_of(*widths)
    first = product(*given.values())
    for _ in range(3):
        assert torch.equal(product(*given.values()), first)
    given["x"][300], given["residual"][17] = torch.nan, torch.nan
    changed = product(*given.values())
    others = torch.ones(tokens, dtype=torch.bool, device="cuda")
    others[[17, 300]] = False
    assert torch.equal(changed[others], first[others]) and changed[~others].isnan().all()
    fewer = product(given["residual"][:17], given["x"][:17], given["weight"])
    assert torch.equal(fewer, first[:17])


def test_replay_with_other_data_equals_eager_and_nothing_waits():
    product = product_of(*SIZES[0][1:])
    changes = [values(*SIZES[0], seed) for seed in (1, 2)]
    no_sync(lambda: product(*changes[0].values()))
    assert_replays(lambda static: {"y": product(*static.values())}, values(*SIZES[0]), changes)


def run(backend, dtype=torch.bfloat16):
    model = HybridModel(
        tiny_config("GM*-", position_embedding_type="none", add_bias_linear=False),
        vocab_size=VOCAB,
        max_positions=256,
        device="cuda",
        dtype=dtype,
        seed=3,
        backends={"residual_projection": backend},
    )
    documents = [(torch.arange(length).numpy() % VOCAB, None) for length in (120, 1, 70)]
    pack = MicroBatch.build(documents, 192).to(torch.device("cuda"))
    loss = model(pack).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


def test_a_model_errs_no_more_than_one_with_separate_operations():
    """Single gradients of few values differ much by rounding, so the norm is that of all gradients."""
    joined, apart, exact = run("auto"), run("torch"), run("auto", torch.float32)
    assert abs(joined.pop("loss") - exact["loss"]) < 1e-3 * exact["loss"]
    errors = [
        torch.stack([(found[name].double() - exact[name].double()).norm() for name in joined])
        for found in (joined, apart)
    ]
    whole = torch.stack([exact[name].double().norm() for name in joined]).norm()
    assert errors[0].norm() <= 1.2 * errors[1].norm() < 0.05 * whole
