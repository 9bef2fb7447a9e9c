"""Models on the meta device: calls of their ops, weights of their products, and no compiler."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_packed.models.trace import calls_of_ops, complete_model, uses_in_layers
from support import hybrid_cases as cases

TESTS = Path(__file__).parents[2]


def calls(pattern: str, **changes: object) -> dict[str, int]:
    """Return the number of calls of each op."""
    found: dict[str, int] = {}
    for request, number in calls_of_ops(cases.tiny_config(pattern, **changes), cases.VOCAB).items():
        found[request.op.name] = found.get(request.op.name, 0) + number
    return found


def test_every_call_of_an_op_counts() -> None:
    found = calls("M*G*-E/*", window_size="7,0", window_attn_skip_freq="[0, 1, 0, 0, 0, 0]")
    assert found["varlen_attention"] == 3  # Tables of a window are no call.
    assert (found["ssd"], found["gated_delta_rule"], found["causal_conv1d"]) == (1, 1, 2)
    assert (found["activation"], found["grouped_mlp"], found["router_logits"]) == (2, 1, 1)
    assert found["cross_entropy"] == 2


@pytest.mark.parametrize("repeated, uses", [(False, [1, 1, 1, 1]), (True, [2, 2])])
def test_repeated_depths_use_their_weights_again(repeated: bool, uses: list[int]) -> None:
    config = cases.tiny_config("M/G/G", mtp_use_repeated_layer=repeated)
    found = uses_in_layers(complete_model(config, cases.VOCAB))
    in_main_model, in_depths = list(found.values())[:2], list(found.values())[2:]
    assert in_main_model == [1, 1]
    assert in_depths[:2] == uses[:2] and len(in_depths) == 3 * len(uses) // 2


PROGRAM = """
import sys
from megatron_packed import torch_private
from megatron_packed.models.flops import FlopCounter
from support import hybrid_cases as cases

with torch_private.compiler_not_imported():
    FlopCounter(cases.tiny_config("M*-EG/*E", position_embedding_type="rope"), cases.VOCAB)
marked = [hasattr(each, torch_private._HIDDEN) for each in torch_private._hidden_from_compiler()]
sys.exit("torch._dynamo" in sys.modules or any(marked) or not marked)
"""


def test_a_trace_does_not_import_the_compiler() -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM], cwd=TESTS).returncode == 0


ESTIMATES = """
from megatron_packed.config.parser.parse import parse_or_exit
from megatron_packed.models.estimate.run_estimate import estimates, usual

words = ["@examples/recipes/hybrid_1b.pretrain.args"]
config = parse_or_exit(words, launched=False, world_size=8, on_this_machine=False)
first, second = (usual(estimates(config, 8, 32_000, 64)).allocated for _ in range(2))
assert first == second, (first, second)
"""


def test_the_first_estimate_of_a_process_is_that_of_later_ones() -> None:
    """Modules that PyTorch imports at its first operations keep no tensors of the model."""
    assert subprocess.run([sys.executable, "-c", ESTIMATES], cwd=TESTS.parent).returncode == 0
