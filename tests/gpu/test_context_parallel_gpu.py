"""Context parallelism over NCCL with GPU kernels: two ranks compared with one process;
isolation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.collectives import all_reduce_sum
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.packed.micro_batch import MicroBatch
from support import gpu_layouts
from support.process_pools import DistributedError, run_distributed

VOCAB, TOKENS = 512, 1024
LENGTHS = [1, 3, 130, 257, 2, 300, 64, 90]
"""Lengths of documents; contiguous slices divide the sixth document."""
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "max_positions": TOKENS, "device": "cuda"}
LARGEST_ERROR = 3e-2
"""Largest relative difference of gradients, unless rounding moves a gradient by half of it or more.

The gradients of decays of a gated delta net are small differences of large terms. If weights change by
at most half a unit in the last place of bf16, these gradients move by more than a third, also in float32.
One process in bf16, whose activations are rounded, too, errs by 0.32 of such a gradient on an H200.
"""
LARGEST_OF_ALL = 0.9
"""Largest difference in any case; a gradient that is missing differs by 1."""
DRAWS = 8
"""Number of float32 models with such changes of the weights."""
CHANGED = 3
"""Number of the document whose tokens change."""


def pack(alignment: int, changed: int | None = None) -> MicroBatch:
    rng = np.random.default_rng(0)
    documents = [(rng.integers(0, VOCAB, length), None) for length in LENGTHS]
    if changed is not None:
        documents[changed] = ((documents[changed][0] + 1) % VOCAB, None)
    targets = sum(length - 1 for length in LENGTHS)
    return MicroBatch.build(
        documents, TOKENS, len(LENGTHS) + 3, (1 / targets, 1.0), alignment=alignment
    ).to("cuda")


def train(
    groups: ParallelGroups | None,
    comm_type: str,
    pattern: str,
    backends: dict[str, str],
    communication: dict[str, str] | None = None,
    **changes: Any,
) -> dict[str, Tensor]:
    """Return loss and gradients of one pack over all ranks.

    ``moved`` is the largest change in this rank's other rows after one document changed.
    """
    model = HybridModel(
        ModelConfig(hybrid_layer_pattern=pattern, **gpu_layouts.LAYERS | changes),
        groups=groups,
        cp_comm_type=comm_type,
        **communication or {},
        dtype=torch.bfloat16,
        backends=backends,
        **SIZES,
    ).train()
    in_order = (communication or {}).get("cp_partition_mode") == "contiguous"
    alignment = 1 if comm_type == "a2a" or in_order else 4
    batch, group = pack(alignment), None if groups is None else groups.cp.group
    output = model(batch)
    output.loss.backward()
    found = {"loss": all_reduce_sum(output.loss.detach().clone(), group)}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name] = all_reduce_sum(parameter.grad.float(), group)
    others_T = model.cp.own(batch.packed.seq_idx[0] != CHANGED, batch.packed)
    after_T = model(pack(alignment, CHANGED)).per_token_loss_T
    found["moved"] = ((after_T - output.per_token_loss_T).abs() * others_T).max()
    return found


def train_rank(
    groups: ParallelGroups, arguments: tuple[Any, ...], changes: dict[str, Any]
) -> dict[str, Tensor]:
    return train(groups, *arguments, **changes)


LAYERS = "M*-G*"
HEADS = {"mamba_cp_comm_type": "heads", "linear_cp_mode": "headwise"}
EXCHANGED = {"cp_size": 2, "hybrid_layer_pattern": LAYERS, **HEADS}


@pytest.mark.shows("eager", of=lambda comm_type: (2, {**EXCHANGED, "cp_comm_type": comm_type}))
@pytest.mark.shows("isolation", of=lambda comm_type: (2, {**EXCHANGED, "cp_comm_type": comm_type}))
@pytest.mark.multi_gpu
@pytest.mark.parametrize("comm_type", ["a2a", "all_gather", "p2p"])
@pytest.mark.parametrize("zigzag", ["auto", "reference"])
def test_two_gpus_compute_what_one_does(comm_type: str, zigzag: str) -> None:
    if comm_type == "a2a" and zigzag == "reference":
        pytest.skip("a2a runs the kernel of one GPU")
    compare_with_one(comm_type, LAYERS, {"context_parallel_attention": zigzag}, HEADS)


SCANS = "M*-M"
PASSED = {"cp_size": 2, "mamba_cp_comm_type": "state", "hybrid_layer_pattern": SCANS}


@pytest.mark.shows("eager", of=lambda comm_type: (2, {**PASSED, "cp_comm_type": comm_type}))
@pytest.mark.shows("isolation", of=lambda comm_type: (2, {**PASSED, "cp_comm_type": comm_type}))
@pytest.mark.multi_gpu
@pytest.mark.parametrize("comm_type", ["a2a", "p2p"])
def test_two_gpus_pass_the_states_of_scans(comm_type: str) -> None:
    compare_with_one(comm_type, SCANS, {}, {"mamba_cp_comm_type": "state"})


STATES = {"mamba_cp_comm_type": "state", "linear_cp_mode": "chunkwise"}
IN_ORDER = {
    "cp_size": 2,
    "cp_partition_mode": "contiguous",
    "hybrid_layer_pattern": LAYERS,
    **STATES,
}


@pytest.mark.shows("eager", of=lambda comm_type: (2, {**IN_ORDER, "cp_comm_type": comm_type}))
@pytest.mark.shows("isolation", of=lambda comm_type: (2, {**IN_ORDER, "cp_comm_type": comm_type}))
@pytest.mark.multi_gpu
@pytest.mark.parametrize("comm_type", ["all_gather", "p2p"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"window_size": "99,0"}, {"kv_channels": 256}],
    ids=["heads of 64", "window", "heads of 256"],
)
def test_two_gpus_attend_over_contiguous_rows(comm_type: str, changes: dict[str, Any]) -> None:
    """A border between the ranks cuts the sixth document."""
    compare_with_one(comm_type, LAYERS, {}, {"cp_partition_mode": "contiguous"}, **changes)


RULES = "G*-G"
RULES_PASSED = {"cp_size": 2, "linear_cp_mode": "chunkwise", "hybrid_layer_pattern": RULES}


@pytest.mark.shows("eager", of=lambda comm_type: (2, {**RULES_PASSED, "cp_comm_type": comm_type}))
@pytest.mark.shows(
    "isolation", of=lambda comm_type: (2, {**RULES_PASSED, "cp_comm_type": comm_type})
)
@pytest.mark.multi_gpu
@pytest.mark.parametrize("comm_type", ["a2a", "p2p"])
def test_two_gpus_pass_the_states_of_gated_delta_nets(comm_type: str) -> None:
    compare_with_one(comm_type, RULES, {}, {"linear_cp_mode": "chunkwise"})


def compare_with_one(*arguments: Any, **changes: Any) -> None:
    """Compare losses and gradients of two ranks with those of one process."""
    expected = train(None, *arguments, **changes)
    errs, moves = rounding_effects(expected, arguments[1], changes)
    ranks = run_distributed(
        train_rank, 2, arguments, changes, backend="nccl", layout={"cp_size": 2}, timeout=300
    )
    for found in ranks:
        assert float(found["moved"]) == 0
        assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-2)
        for name, move in moves.items():
            apart = difference(found[name], expected[name])
            allowed = max(LARGEST_ERROR, 2 * move, min(2 * errs[name], LARGEST_OF_ALL))
            text = f"{name}: {apart:.1e}, moves {move:.1e}, one process errs {errs[name]:.1e}"
            assert apart <= allowed, text


def rounding_effects(
    found: dict[str, Tensor], pattern: str, changes: dict[str, Any]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the error of each gradient ``found`` in bf16, and how far rounded weights move it.

    Both are relative to the gradients in float32, of one process.
    """
    config = ModelConfig(hybrid_layer_pattern=pattern, **gpu_layouts.LAYERS | changes)
    in_bf16, model = (
        HybridModel(config, dtype=dtype, backends={}, **SIZES).train()
        for dtype in (torch.bfloat16, torch.float32)
    )
    weights = {name: p.detach().float() for name, p in in_bf16.named_parameters()}
    generator = torch.Generator(device="cuda").manual_seed(0)

    def gradients(most: float) -> dict[str, Tensor]:
        """Return the gradients for weights that change by at most ``most`` of themselves."""
        for name, parameter in model.named_parameters():
            change = torch.rand(parameter.shape, generator=generator, device="cuda") - 0.5
            parameter.data = weights[name] * (1 + 2 * most * change)
        model.zero_grad()
        model(pack(1)).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    exact = gradients(0.0)
    moved = [gradients(2**-9) for _ in range(DRAWS)]
    errs = {name: difference(found[name], exact[name]) for name in exact}
    return errs, {name: max(difference(one[name], exact[name]) for one in moved) for name in exact}


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference of two gradients over that of the second."""
    expected = expected.double().cpu()
    return float((found.double().cpu() - expected).norm() / expected.norm())


@pytest.mark.multi_gpu
def test_no_kernel_for_float32_keys_that_travel() -> None:
    """Float32 with p2p is refused, because only the slow reference supports float32."""
    with pytest.raises(
        DistributedError, match=r"supports bfloat16 and float16.*--cp-comm-type a2a"
    ):
        run_distributed(in_float32, 2, backend="nccl", layout={"cp_size": 2}, timeout=300)


def in_float32(groups: ParallelGroups) -> None:
    config = ModelConfig(hybrid_layer_pattern="*", **gpu_layouts.LAYERS)
    model = HybridModel(
        config,
        vocab_size=VOCAB,
        max_positions=TOKENS,
        groups=groups,
        cp_comm_type="p2p",
        device="cuda",
    )
    model(pack(4))
