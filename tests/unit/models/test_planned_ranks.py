"""Models of planned ranks: forward and backward on the meta device, without processes or values."""

import numpy as np
import pytest
import torch

from megatron_packed.config.parser.parse import parse
from megatron_packed.models.trace import Imagined
from megatron_packed.packed.micro_batch import MicroBatch
from support.kernel_calls import FLAGS

TP = "--tensor-model-parallel-size 2"
EP = "--expert-model-parallel-size 2 --num-experts 4"
CP = "--context-parallel-size 2 --global-batch-size 1"
ZIGZAG = "--cp-partition-mode zigzag --cp-comm-type"
LAYOUTS = {
    "one rank": ("M*-EG/*E", 1, "--num-experts 4"),
    "tp2": ("M*-EG", 2, f"{TP} --num-experts 4"),
    "tp2 sp ep2": ("M*-EG", 2, f"{TP} --sequence-parallel {EP} --expert-tensor-parallel-size 1"),
    "cp2 a2a": ("M*-G", 2, CP),
    "cp2 p2p": ("M*-", 2, f"{CP} {ZIGZAG} p2p"),
    "cp2 all_gather, states": (
        "M*-",
        2,
        f"{CP} {ZIGZAG} all_gather --mamba-cp-comm-type state",
    ),
    "cp2 p2p, states of both kinds": (
        "M*-G",
        2,
        f"{CP} {ZIGZAG} p2p --mamba-cp-comm-type state --linear-cp-mode chunkwise",
    ),
    "ep2 allgather": ("M*-E", 2, EP),
    "ep2 alltoall": ("M*-E", 2, f"{EP} --moe-token-dispatcher-type alltoall"),
    "ep2 alltoall, bounded": (
        "E",
        2,
        f"{EP} --moe-token-dispatcher-type alltoall --moe-expert-rank-capacity-factor 1.5",
    ),
    "ep2 allgather, bounded": ("E", 2, f"{EP} --moe-expert-rank-capacity-factor 1.5"),
}


def planned(pattern: str, world_size: int, flags: str) -> tuple[Imagined, MicroBatch]:
    words = [*FLAGS, "--hybrid-layer-pattern", pattern, "--squared-relu", *flags.split()]
    words += ["--normalization", "RMSNorm", "--position-embedding-type", "rope"]
    config = parse(words, world_size=world_size)
    documents = [(np.arange(length), None) for length in (32, 64)]
    pack = MicroBatch.build(documents, config.packing.tokens_per_pack).to("meta")
    return Imagined.from_config(config, world_size, 1000), pack


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_runs_without_processes(layout: tuple[str, int, str]) -> None:
    (model, groups), pack = planned(*layout)
    output = model(pack)
    output.loss.backward()
    own = pack.tokens.shape[0] // groups.cp.size
    assert output.per_token_loss_T.shape == (own,)
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None and gradient.shape == parameter.shape, name
        assert gradient.device == torch.device("meta"), name
