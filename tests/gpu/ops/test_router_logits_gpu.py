"""Logits of routers on a GPU: float64, chosen experts, rows on their own, determinism, graphs."""

import pytest
import torch

from megatron_packed.ops.router_logits.api import router_logits
from support.op_packs import assert_repeats, assert_replays, no_sync

pytestmark = pytest.mark.gpu


def make(tokens=1000, channels=2688, experts=128, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    return {
        "x": normal(tokens, channels).bfloat16(),
        "w": 0.02 * normal(experts, channels),
        "dlogits": normal(tokens, experts),
    }


def run(values, backend="triton"):
    leaf = {name: values[name].detach().requires_grad_() for name in ("x", "w")}
    leaf["w"].main_grad = torch.zeros_like(leaf["w"])
    logits = router_logits(leaf["x"], leaf["w"], backend=backend)
    gradients = torch.autograd.grad(logits, leaf.values(), values["dlogits"], allow_unused=True)
    return {"logits": logits.detach(), "d_x": gradients[0], "d_w": leaf["w"].main_grad}


@pytest.mark.parametrize("sizes", [(8192, 2688, 128), (1000, 1000, 20), (513, 264, 512)])
def test_errors_are_those_of_the_float32_product_or_less(sizes):
    values = make(*sizes)
    x, w, dlogits = (values[name].double() for name in ("x", "w", "dlogits"))
    want = {"logits": x @ w.t(), "d_x": dlogits @ w, "d_w": dlogits.t() @ x}
    ours, plain = run(values), run(values, "reference")

    def error(got, name):
        return ((got[name].double() - want[name]).norm() / want[name].norm()).item()

    for name in want:
        assert error(ours, name) <= max(1.1 * error(plain, name), 3e-7), name
    top = min(8, sizes[2])
    chosen, exact = (
        logits.topk(top, dim=1).indices.sort(dim=1).values
        for logits in (ours["logits"], want["logits"])
    )
    assert torch.equal(chosen, exact)


def test_a_row_depends_on_its_row_only():
    values = make()
    part = {name: value if name == "w" else value[:333] for name, value in values.items()}
    whole, found = run(values), run(part)
    for name in ("logits", "d_x"):
        assert torch.equal(found[name], whole[name][:333]), name


def test_every_run_gives_the_same_bits():
    values = make()
    assert_repeats(lambda: run(values), times=3)


def test_replay_equals_eager():
    assert_replays(run, make(), [make(seed=1), make(seed=2)])


def test_no_host_sync():
    values = make()
    run(values)
    torch.cuda.synchronize()
    no_sync(run, values)
