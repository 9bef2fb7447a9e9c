"""Comparison of mixers with those of transformers: outputs and every gradient."""

import pytest
import torch

from megatron_packed.layers.moe.layer import MoE
from megatron_packed.packed.params import PackedSeqParams
from support import hybrid_cases as cases
from support.hybrid_cases import CPU_BUILD
from support.random_tensors import filled

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5


def run(module, documents, upstream, call):
    """Return the outputs, input gradients and parameter gradients of a module."""
    module.zero_grad()
    inputs = [x.clone().requires_grad_() for x in documents]
    y = call(inputs)
    y.backward(upstream)
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return y.detach(), torch.cat([x.grad for x in inputs]), gradients


def compare(mine, theirs, rename):
    """Compare two results of `run`.

    Args:
        rename: our name -> function that selects our gradient among theirs.
    """
    assert set(rename) == set(mine[2])
    pairs = {"output": (mine[0], theirs[0]), "input": (mine[1], theirs[1])}
    pairs |= {name: (mine[2][name], select(theirs[2])) for name, select in rename.items()}
    for name, (value, expected) in pairs.items():
        assert value.shape == expected.shape, name
        assert cases.relative_error(value, expected) <= TOLERANCE, name


@pytest.mark.parametrize("normalised", [True, False])
def test_qwen_experts(normalised):
    """Compare with Qwen3-Next, whose gate scales the shared expert.

    ``norm_topk_prob`` is the router without ``--moe-router-pre-softmax``. The softmax over the
    chosen logits equals the softmax over all logits, divided by the sum of the chosen.
    """
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    settings = transformers.Qwen3NextConfig(
        hidden_size=32,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        norm_topk_prob=normalised,
        num_hidden_layers=1,
    )
    block = filled(qwen.Qwen3NextSparseMoeBlock(settings), scale=0.3)
    config = cases.tiny_config(
        "E",
        squared_relu=False,
        swiglu=True,
        moe_router_topk=3,
        moe_router_pre_softmax=not normalised,
        moe_shared_expert_intermediate_size=24,
        moe_shared_expert_gate=True,
    )
    moe = MoE(config, CPU_BUILD)
    rename = {
        "router.weight": lambda state: state["gate.weight"],
        "experts.fc1": lambda state: state["experts.gate_up_proj"],
        "experts.fc2": lambda state: state["experts.down_proj"],
        "shared_expert.fc1.weight": lambda state: torch.cat(
            [state["shared_expert.gate_proj.weight"], state["shared_expert.up_proj.weight"]]
        ),
        "shared_expert.fc2.weight": lambda state: state["shared_expert.down_proj.weight"],
        "shared_expert_gate.weight": lambda state: state["shared_expert_gate.weight"],
    }
    state = block.state_dict()
    moe.load_state_dict({name: select(state) for name, select in rename.items()})
    generator = torch.Generator().manual_seed(4)
    documents = [torch.randn(n, 32, generator=generator) for n in cases.AWKWARD]
    tokens = sum(cases.AWKWARD)
    upstream = torch.randn(tokens, 32, generator=generator)
    packed = PackedSeqParams.from_lengths(cases.AWKWARD, tokens)
    mine = run(moe, documents, upstream, lambda x: moe(torch.cat(x), packed).hidden_TD)
    theirs = run(
        block,
        documents,
        upstream,
        lambda xs: torch.cat([block(x[None])[0] for x in xs]),
    )
    compare(mine, theirs, rename)
