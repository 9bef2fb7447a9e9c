"""Memory of a step on the meta device: equal units, recomputation, offload, pools of graphs."""

import pytest
import torch.nn.functional as functional
from torch import Tensor, nn

from megatron_packed.config.parser.parse import parse
from megatron_packed.memory_purpose import Purpose
from megatron_packed.models.estimate import step_memory
from megatron_packed.models.estimate.step_memory import MetaStep, StepMemory, Work
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.trace import Imagined
from support.kernel_calls import FLAGS

EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 64"
WHOLE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
CASES = {
    "one rank": ("M*-EM*-G/*E/*E", 1, EXPERTS),
    "tp2 sp ep2": (
        "M*-EM*-E",
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        f"--expert-tensor-parallel-size 1 {EXPERTS}",
    ),
    "cp2": ("M*-GM*-G", 2, "--context-parallel-size 2 --global-batch-size 1"),
    "layers are recomputed": ("M*-EM*-E", 1, f"{EXPERTS} {WHOLE} 1"),
    "pairs are recomputed": ("M*-EM*-E", 1, f"{EXPERTS} {WHOLE} 2"),
    "some layers are recomputed": (
        "M-M-",
        1,
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    ),
    "parts are recomputed": (
        "M*-EM*-E",
        1,
        f"{EXPERTS} --recompute-granularity selective --recompute-modules core_attn moe_act layernorm mamba",
    ),
}


def imagined(pattern: str, world_size: int, flags: str) -> HybridModel:
    words = [*FLAGS, "--hybrid-layer-pattern", pattern, "--squared-relu", *flags.split()]
    words += ["--normalization", "RMSNorm", "--position-embedding-type", "rope", "--bf16"]
    return Imagined.from_config(parse(words, world_size=world_size), world_size, 1000).model


def memory_of(model: HybridModel, captured: tuple[int, ...] = ()) -> StepMemory:
    return MetaStep(model, Work(tokens=2048, documents=4)).run(captured)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("captured", [(), (0, 2)])
def test_repeated_units_need_the_memory_of_a_run(
    case: tuple[str, int, str], captured: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed = memory_of(imagined(*case), captured)
    monkeypatch.setattr(step_memory.MetaStep, "units", lambda self: {})
    run = memory_of(imagined(*case), captured)
    for found, wanted in ((replayed.eager, run.eager), (replayed.pool, run.pool)):
        assert found.where == wanted.where
        assert found.bytes == wanted.bytes
        assert {k: v for k, v in found.amounts.items() if v} == {
            k: v for k, v in wanted.amounts.items() if v
        }


class Gated(nn.Module):
    """Mixer of plain torch, which no table knows."""

    def forward(self, x_TD: Tensor, packed: object) -> Tensor:
        return functional.silu(x_TD) * x_TD


def test_a_kind_of_plain_torch_needs_no_entry() -> None:
    model = imagined("--", 1, "")
    for layer in model.layers:
        layer.mixer = Gated()
    step = MetaStep(model, Work(tokens=2048, documents=4))
    [unit, _] = step.units().values()
    hidden = 2048 * model.config.hidden_size * 2
    # The norm's statistics, and the two factors; the input of the norm is that of the layer.
    assert unit.saves_input and sum(unit.saved.values()) == 4 * 2048 + 2 * hidden
    assert step.run().eager.bytes > 2 * (4 * 2048 + 3 * hidden)


def test_the_worst_routing_is_counted_on_request() -> None:
    flags = f"--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall {EXPERTS}"
    model = imagined("E", 2, flags)
    even, worst = (
        MetaStep(model, Work(tokens=2048, documents=4, even=even)).run().eager.amounts
        for even in (True, False)
    )
    assert even[Purpose.EXPERTS] < worst[Purpose.EXPERTS]
