"""The estimate of memory, compared with real models on the CPU and with itself."""

import math

import pytest
import torch

from megatron_packed.config.parallel_layout import ParallelLayout
from megatron_packed.config.parser.parse import parse
from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.flat_buffers import FlatBuffers, flat_layout_of, tail_elements
from megatron_packed.distributed.gradient_precision import GradientPrecision
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.zero1_layout import Ownership
from megatron_packed.memory_purpose import Purpose
from megatron_packed.models.estimate.rank_memory import (
    communicators_of,
    estimate,
    gradient_bytes,
    optimizer_bytes,
    parameter_bytes,
)
from megatron_packed.models.estimate.run_estimate import estimates, usual
from megatron_packed.models.estimate.step_memory import Work
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.optim.state_precision import StatePrecision
from support.hybrid_cases import VOCAB, make_documents, make_pack, tiny_config
from support.traced_units import most_by_purpose, saved_bytes, units_of

BF16, FP32 = torch.bfloat16, torch.float32
PRECISIONS = (
    StatePrecision(),
    StatePrecision(exp_avg=BF16, exp_avg_sq=BF16, remainders=True),
    StatePrecision(exp_avg=BF16),
)
LAYOUTS = {
    "one": {},
    "dp": {"world_size": 4},
    "tp": {"world_size": 4, "tp_size": 4},
    "tp, whole experts": {"world_size": 10, "tp_size": 2, "ep_size": 5, "expert_tp_size": 1},
    "tp, experts shared by fewer": {"world_size": 8, "tp_size": 4, "expert_tp_size": 2},
    "cp": {"world_size": 4, "cp_size": 2},
    "ep": {"world_size": 10, "ep_size": 5},
    "all": {"world_size": 40, "tp_size": 2, "cp_size": 2, "ep_size": 5},
}
EXTRAS, COUNTERS = {"loss": 1, "signs": 9}, {"expert_counts": 10}


WORK = Work(tokens=4096, documents=4)


def built(layout, device, *, dtype=BF16, pattern="M*-E", **options):
    """Return a model and its groups; ``options`` are those of `ModelConfig` and `HybridModel`."""
    changes = {
        name: options.pop(name) for name in ModelConfig.__dataclass_fields__ if name in options
    }
    groups = ParallelGroups.unjoined(ParallelLayout(**layout), device)
    model = HybridModel(
        tiny_config(pattern, **changes),
        vocab_size=VOCAB,
        max_positions=256,
        groups=groups,
        device=device,
        dtype=dtype,
        **options,
    )
    return model, groups


def imagined(pattern, layout=None, **options):
    """Return a bf16 model without memory for its tensors."""
    return built(layout or {}, "meta", pattern=pattern, **options)[0]


def estimated(model, work=WORK):
    return estimate(model, flat_layout_of(model, Ownership()), work)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_bytes_of_flat_buffers_are_exact(layout, zero, dtype):
    """Bytes of parameters, gradients, masters and moments equal those of real storages."""
    sizes = {"pattern": "MG*-E", "linear_num_key_heads": 4, "linear_num_value_heads": 8}
    model, groups = built(layout, "cpu", dtype=dtype, **sizes)
    ownership = (Ownership.over if zero else Ownership.undivided)(groups)
    buffers = FlatBuffers(
        model, extras=EXTRAS, counters=COUNTERS, ownership=ownership, bucket_elements=3000
    )
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in buffers.params.values()
    }
    imagined, _ = built(layout, "meta", dtype=dtype, **sizes)
    assert all(parameter.is_meta for parameter in imagined.parameters())
    found = flat_layout_of(imagined, ownership, 3000)
    assert found == buffers.layout
    assert parameter_bytes(found) == sum(held.values())
    for precision in PRECISIONS:
        optimizer = Optimizer(buffers, precision=precision)
        masters = [master for _, master in optimizer._low_masters]
        moments = (optimizer.exp_avg, optimizer.exp_avg_sq)
        state = sum(t.nbytes for t in (*masters, optimizer.remainders, *moments))
        assert optimizer_bytes(found, precision) == state
    one = estimate(
        imagined,
        found,
        Work(tokens=512, documents=4),
        tail=tail_elements(EXTRAS, COUNTERS),
        precision=precision,
    )
    assert one.static.gradients == buffers.storage.untyped_storage().nbytes()
    assert (one.static.parameters, one.static.optimizer) == (parameter_bytes(found), state)


def of(
    layout=LAYOUTS["one"],
    *,
    tokens=4096,
    documents=1,
    graphs=None,
    even=True,
    **changes,
):
    model, groups = built(layout, "meta", **changes)
    work = Work(tokens=tokens, documents=documents, even=even)
    return estimate(
        model,
        flat_layout_of(model, Ownership.undivided(groups)),
        work,
        graphs=graphs,
    )


def test_more_of_anything_needs_more():
    plain = of()
    assert of(tokens=8192).peak.bytes > 1.9 * plain.peak.bytes
    assert of(pattern="M*-EM*-E").peak.bytes > 1.6 * plain.peak.bytes
    assert of(documents=512, pattern="*").peak.bytes > of(pattern="*").peak.bytes
    assert of(LAYOUTS["cp"]).peak.bytes < 0.7 * plain.peak.bytes
    assert of(LAYOUTS["tp"]).static.parameters < 0.6 * plain.static.parameters
    assert of(hidden_dropout=0.1).peak.bytes > plain.peak.bytes


GATED = {"attention_output_gate": True}
NORMED = {"qk_layernorm": True, "position_embedding_type": "rope"}


@pytest.mark.parametrize("layout", ["one", "tp", "cp"])
@pytest.mark.parametrize(
    "changes",
    [GATED, NORMED, {**NORMED, "qk_layernorm_scope": "all_heads"}, {**GATED, **NORMED}],
    ids=str,
)
def test_gates_and_norms_of_attention_are_counted(layout, changes):
    """The gate is in the fused projection, and its product is saved; norms save statistics.

    Recomputation of the core removes what only the core saves.
    """
    position = {"position_embedding_type": changes.get("position_embedding_type", "none")}
    ranks = LAYOUTS[layout]
    options = {"pattern": "*", "layout": ranks}
    models = [imagined(**options, **of_model) for of_model in (position, changes)]
    plain, more = (saved_bytes(units_of(model, WORK)[0]) for model in models)
    tokens, heads = 4096 // ranks.get("cp_size", 1), 4 // ranks.get("tp_size", 1)
    groups = max(2 // ranks.get("tp_size", 1), 1)
    saved = more - plain
    if changes == GATED and layout != "cp":
        assert saved == 2 * tokens * heads * 8 * 2
    if changes == NORMED and layout != "cp":
        assert saved == 4 * tokens * (heads + groups)
    assert saved > 0
    assert of(**options, **changes).peak.bytes > of(**options, **position).peak.bytes


def test_experts_that_follow_the_routing():
    """Unbalanced routing needs more memory: in the worst case one of 5 ranks receives all rows.

    With balanced routing each rank receives as many rows as it sends. With a capacity and padding
    the memory does not depend on the routing.
    """
    options = {"layout": LAYOUTS["ep"], "pattern": "E", "moe_token_dispatcher_type": "alltoall"}
    balanced, worst = (
        of(**options, even=even).peak.amounts[Purpose.EXPERTS] for even in (True, False)
    )
    assert 1.5 * balanced < worst < 5 * balanced
    bounded = {
        **options,
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
    }
    assert of(**bounded, even=False).peak.bytes == of(**bounded).peak.bytes


def most_of(purpose, symbol, layout, **options):
    """Return the most bytes of a purpose in forward and backward of one layer, for 4096 slots."""
    most = most_by_purpose(imagined(symbol, layout, **options), WORK)
    return [most[direction][purpose] for direction in ("forward", "backward")]


@pytest.mark.parametrize(
    ("comm", "exchanged", "ranks"), [("a2a", 1, 0), ("p2p", 0, 2), ("all_gather", 0, 4)]
)
def test_what_attention_moves_among_four_ranks(comm, exchanged, ranks):
    """Check the bytes that attention exchanges among four ranks with 1024 rows each.

    With a2a each rank receives all rows of a query head with its key and value, and in forward the
    output, too. With p2p the ranks hold the keys and values of two ranks, and with all_gather those
    of all ranks.
    """
    head, output, keys = 4096 * 8 * 2, 1024 * 4 * 8 * 2, 1024 * 2 * 2 * 8 * 2
    most = most_of(Purpose.COMMUNICATION, "*", {"world_size": 4, "cp_size": 4}, cp_comm_type=comm)
    travelling = ranks * keys
    assert most == [exchanged * (3 * head + output) + travelling, exchanged * 3 * head + travelling]


def test_what_a_scan_moves_and_its_states():
    """Two ranks exchange all rows for two heads of width 8, with B and C of size 16, and dt.

    The states are those of mamba_ssm. `test_our_scan_saves_its_inputs_only_and_has_states_in_bf16` has
    those of our kernels.
    """
    exchanged, chunks = 4096 * (2 * 8 + 2 * 16 + 2) * 2, 4096 // tiny_config("M").mamba_chunk_size
    options = {
        "layout": {"world_size": 2, "cp_size": 2},
        "backends": {"ssd": "mamba_ssm"},
        "mamba_cp_comm_type": "heads",
    }
    y = 4096 * 2 * 8 * 2
    assert most_of(Purpose.COMMUNICATION, "M", **options) == [exchanged + y, exchanged]
    states = chunks * 2 * 8 * 16  # each in fp32 and in bf16, in backward also their gradients
    assert most_of(Purpose.STATES, "M", **options) == [states * 6, states * 12]


@pytest.mark.parametrize("comm", ["a2a", "p2p"])
def test_what_passed_states_move(comm):
    """Two ranks have all four heads of their rows; attention to a zigzag reorders its rows."""
    options = {"cp_comm_type": comm, "mamba_cp_comm_type": "state"}
    layout, columns, state = {"world_size": 2, "cp_size": 2}, 4 * 8 + 2 * 2 * 16, 4 * 8 * 16 * 4
    rows, halo = 2048 * 2, 3 * columns * 2
    own, libraries = (
        units_of(imagined("M", layout, backends=backends, **options), WORK)[0]
        for backends in ({}, {"ssd": "mamba_ssm", "causal_conv1d": "causal_conv1d"})
    )
    # Libraries save steps and sums of 4 heads, and the halo in one tensor with its rows. They also
    # save the states of both ranks, and the state that enters.
    more = saved_bytes(libraries) - saved_bytes(own)
    assert more == pytest.approx(rows * columns + rows * 4 * 4 + 2 * state, rel=0.02)
    assert own.saved[Purpose.STATES] == state
    moved = most_of(Purpose.COMMUNICATION, "M", layout, **options)
    assert 0 < moved[0] <= 2 * halo and moved[1] == 0
    # States of segments of one chunk; in backward gradients and the states of chunks in bf16, too.
    states, here = 2048 // 64 * state, 2 * state + state
    assert most_of(Purpose.STATES, "M", layout, **options) == [
        states + here,
        3 * states + here + state,
    ]
    [attention, _] = units_of(imagined("*M", layout, **options), WORK)
    heads = 2048 * (4 + 2 * 2) * 8 * 2
    assert heads in most_of(Purpose.COMMUNICATION, "*M", layout, **options)[1:]
    # Queries, keys and values after the exchange, the output before and after it, and the norm.
    output, lse = 2048 * 4 * 8 * 2, 2048 * 4 * 4
    normed = 2048 * (32 * 2 + 4)
    assert saved_bytes(attention) == heads + 2 * output + lse + normed


def test_our_scan_saves_its_inputs_only_and_has_states_in_bf16():
    """There are as many segments as chunks of 64, because 64 programs a head would fill the GPU."""
    states = 4096 // 64 * 4 * 8 * 16
    assert most_of(Purpose.STATES, "M", {}) == [
        states * 4,  # fp32 at the start of segments
        states * (2 * 4 + 2 * 2),  # and their gradients, and both in bf16 for chunks
    ]
    own, other = (
        saved_bytes(units_of(imagined("M", backends={"ssd": name}), WORK)[0])
        for name in ("triton", "mamba_ssm")
    )
    assert other - own == 2 * 4 * 4 * 4096  # steps and their sums of 4 heads


def test_what_a_gated_delta_net_moves_and_its_states():
    """Two ranks exchange all rows for a key head of width 8 and two value heads of width 6."""
    exchanged, y = 4096 * (2 * 8 + 2 * 6 + 2 * 2) * 2, 4096 * 2 * 6 * 2
    options = {"layout": {"world_size": 2, "cp_size": 2}, "linear_cp_mode": "headwise"}
    assert most_of(Purpose.COMMUNICATION, "G", **options) == [exchanged + y, exchanged]
    states = (4096 // 64) * 2 * 8 * 6  # in bf16; in backward also their gradients
    # Segments of 512 tokens have 7 joints with states and matrices in fp32, and gradients of the states.
    state, matrix = 7 * 2 * 8 * 6 * 4, 7 * 2 * 8 * 8 * 4
    assert most_of(Purpose.STATES, "G", **options) == [
        state + matrix,
        2 * states * 2 + 2 * state + matrix,
    ]


def test_what_a_gated_delta_net_moves_with_passed_states():
    """Two ranks have all four value heads of their rows; a rank sends a message and receives one."""
    layout = {"world_size": 2, "cp_size": 2}
    halo = 3 * (2 * 2 * 8 + 4 * 6) * 2
    moved = most_of(Purpose.COMMUNICATION, "G", layout)
    assert 0 < moved[0] <= 2 * halo and moved[1] == 0
    # In fp32: a message has a state and a matrix, and so have three joints of segments and the ends.
    state, matrix = 4 * 8 * 6 * 4, 4 * 8 * 8 * 4
    message = state + matrix
    saved = 4 * message + message
    states = (2048 // 64) * state // 2  # in bf16; in backward also their gradients
    assert most_of(Purpose.STATES, "G", layout) == [
        saved + message + state,
        2 * states + state // 2 + 2 * message + 4 * state + saved,
    ]
    [layer] = units_of(imagined("G", layout), WORK)
    assert layer.saved[Purpose.STATES] == saved


def test_a_gated_delta_net_saves_two_matrices_per_chunk_and_value_head():
    """Two bf16 matrices and six fp32 vectors of four value heads, two vectors of two key heads."""
    [layer] = units_of(imagined("G"), WORK)
    scores = 4096 * (2 * 4 * 64 * 2 + 4 * (6 * 4 + 2 * 2))
    at_joints = 7 * 4 * 8 * (6 + 8) * 4  # states and matrices in fp32
    # q, k and v of the convolution; z, a and b in addition to them; y before and after the norm.
    convolved, projected, y = 2 * 2 * 8 + 4 * 6, 2 * 2 * 8 + 2 * 4 * 6 + 2 * 4, 4 * 6
    rows = 4096 * 2 * (convolved + projected + 2 * y + 32)
    statistics = 4096 * 4 * (4 + 1)  # of the gated norm, and of the norm before the layer
    assert saved_bytes(layer) == scores + at_joints + rows + statistics


def test_what_experts_move():
    """An all-gather moves all tokens of five ranks, and their gradients.

    An all-to-all moves the routes of each token, or each token once to each rank, beside the routes of
    all tokens. In forward and backward the rows exist as sent and as received.
    """
    five = {"world_size": 5, "ep_size": 5}
    row, topk = 32 * 2, tiny_config("E").moe_router_topk
    gathered, sent, once = (
        most_of(Purpose.COMMUNICATION, "E", five, moe_token_dispatcher_type=name, moe_dispatch=way)
        for name, way in (("allgather", "rows"), ("alltoall", "rows"), ("alltoall", "tokens"))
    )
    routes = 5 * 4096 * 2 * topk * 4  # weights and numbers of experts
    assert gathered == [5 * 4096 * row + routes, 5 * 4096 * row]
    assert sent == pytest.approx([4096 * topk * row] * 2, rel=0.001)
    # Each rank has one of five experts, so two of five ranks get a token.
    part = math.ceil(4096 * 2 / 5)
    assert once == [5 * part * row + routes, 5 * part * row]


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_bounds_are_counted_instead_of_the_routing_and_of_the_worst_case(dispatcher):
    """Five ranks reserve 1.25 even shares of rows, and `alltoall` sends parts of that size, too."""
    options = {
        "layout": LAYOUTS["ep"],
        "pattern": "E",
        "moe_token_dispatcher_type": dispatcher,
        "moe_dispatch": "rows",
        "moe_expert_rank_capacity_factor": 1.25,
    }
    assert of(**options, even=False).peak.bytes == of(**options).peak.bytes
    model = imagined(**options)
    [layer] = units_of(model, WORK)
    topk, config = model.config.moe_router_topk, model.config
    rows, parts = 4096 * topk * 5 // 4, 5 * -(-4096 * topk // 4)
    combined = parts if dispatcher == "alltoall" else rows
    inner = config.moe_ffn_hidden_size * (2 if config.swiglu else 1)
    # Rows before the experts, both results inside of them, and the rows that are combined. With
    # `alltoall` these were received, and count as activations.
    saved = rows * (64 + inner * 2 + config.moe_ffn_hidden_size * 2)
    received = combined * 64 if dispatcher == "alltoall" else 0
    assert layer.saved[Purpose.EXPERTS] == saved + combined * 64 - received
    assert layer.saved[Purpose.ACTIVATIONS] > received


@pytest.mark.parametrize(("experts_tp", "rows"), [(None, 4096), (1, 2048)])
def test_a_gate_keeps_the_rows_of_the_shared_expert(experts_tp, rows):
    """Check that the shared expert's output is saved in the rows that the gate multiplies.

    The gate itself is saved before and after the sigmoid.
    """
    layout = {"world_size": 2, "tp_size": 2, "expert_tp_size": experts_tp}
    saved = []
    for gate in (False, True):
        shared = {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": gate}
        model = imagined("E", layout, num_experts=6, sequence_parallel=True, **shared)
        [layer] = units_of(model, WORK)
        saved.append(saved_bytes(layer))
    assert saved[1] - saved[0] == rows * 32 * 2 + rows * 2


@pytest.mark.parametrize(("layout", "beside"), [("ep", True), ("tp, whole experts", False)])
def test_a_shared_expert_beside_the_dispatch_is_kept_longer(layout, beside):
    """It is the first part of forward and the last part of backward, with a stream's workspace."""
    options = {"moe_shared_expert_intermediate_size": 240, "backends": {"deterministic": True}}
    found = []
    for overlap in (False, True):
        model = imagined("E", LAYOUTS[layout], moe_shared_expert_overlap=overlap, **options)
        [layer] = units_of(model, WORK)
        static = estimated(model).static
        found.append((sum(layer.forward.values()), static.workspaces))
    # While the experts run, what the shared expert has saved exists, too.
    assert (found[1][0] > found[0][0]) == beside
    assert found[1][1] == found[0][1] * (1 + beside)


@pytest.mark.parametrize("divided", [False, True])
def test_what_tensor_parallel_ranks_move(divided):
    """Layers communicate the hidden state of all rows."""
    moved = most_of(
        Purpose.COMMUNICATION, "-", {"world_size": 2, "tp_size": 2}, sequence_parallel=divided
    )
    assert moved == [4096 * 32 * 2] * 2


@pytest.mark.parametrize("size", [1, 2, 4])
def test_recomputed_groups_leave_their_inputs_and_come_back_whole(size):
    """The peak has the inputs of all groups, one complete group and the last layer's gradients."""
    memory = MemoryConfig(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=size
    )
    plain, model = imagined("----"), imagined("----", memory=memory)
    [layer, *_], [group, *_] = units_of(plain, WORK), units_of(model, WORK)
    hidden = 4096 * 32 * 2
    assert saved_bytes(group) == 0
    # In a group, the results of all layers but the last exist during the backward pass of the last.
    again = size * saved_bytes(layer) + (size - 1) * hidden + sum(layer.backward.values())
    assert sum(group.backward.values()) == again
    found = estimated(model).peak.bytes
    # The losses of the tokens exist, too.
    assert found == pytest.approx((4 // size + 1) * hidden + again, abs=5 * 4096)
    assert found < estimated(plain).peak.bytes


def test_recomputed_attention_of_exchanged_heads_keeps_the_fused_projection():
    """Two ranks keep the fused projection of 2048 rows each: 4 query, 2 key and 2 value heads."""
    memory = MemoryConfig(recompute_granularity="selective")
    [layer] = units_of(imagined("*", {"world_size": 2, "cp_size": 2}, memory=memory), WORK)
    normed, projected, output = 2048 * (32 * 2 + 4), 2048 * (4 + 2 * 2) * 8 * 2, 2048 * 4 * 8 * 2
    assert saved_bytes(layer) == normed + projected + output


def memory_of(pattern, **options):
    """Return peak and pinned bytes of a model with other memory options."""
    memory = MemoryConfig(**options) if options else None
    found = estimated(imagined(pattern, memory=memory))
    return found.peak.bytes, found.host_bytes


@pytest.mark.parametrize(("size", "buffers"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)])
def test_offloaded_inputs_leave_as_many_as_there_are_buffers(size, buffers):
    """With offload, only ``buffers - 1`` inputs before the last group are on the device."""
    whole = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": size,
    }
    kept, nothing = memory_of("-" * 8, **whole)
    options = {
        "offload_layer_inputs": True,
        "offload_buffers": buffers,
        "min_offloaded_tensor_size": 4096 * 32,
    }
    left, host = memory_of("-" * 8, **whole, **options)
    hidden, groups = 4096 * 32 * 2, 8 // size
    assert nothing == 0 and host == groups * hidden
    assert kept - left == (groups - 1 - min(buffers - 1, groups - 1)) * hidden


NORM, HIDDEN = 4096 * (32 * 2 + 4), 4096 * 32 * 2
SEQ_IDX = 4096 * 4
"""Documents of the slots, which the recurrences save."""
SCAN = 4096 * 2 * (132 + 96 + 32) + 4096 * 4 * 2 + SEQ_IDX
"""Projection, convolution and output in bf16, and statistics of two groups."""
JOINTS = 11 * 512 + 14 * 512
"""States (6 x 8) and matrices (8 x 8) of four heads at seven joints in fp32, rounded up to 512 bytes."""
RULE = 4096 * 2 * (88 + 56 + 24) + 4096 * 4 * 4 + 4096 * (2 * 4 * 64 * 2 + 4 * (6 * 4 + 2 * 2))
CORE = 4096 * 2 * (8 * 8 + 2 * 4 * 8) + 4096 * 4 * 4
"""Fused projection, queries and output, and the log-sum-exp of four heads."""


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize(
    ("symbol", "moved"),
    [
        ("-", {"mlp_act": 4096 * 48 * 2}),
        (
            "-",
            {
                "mlp_norm": NORM,
                "mlp_fc1": HIDDEN,
                "mlp_act": 4096 * 48 * 2,
                "mlp_fc2": 4096 * 48 * 2,
            },
        ),
        ("M", {"mamba_norm": NORM, "mamba_scan": SCAN, "mamba_out_proj": HIDDEN}),
        (
            "G",
            {"gdn_norm": NORM, "gdn_scan": RULE + JOINTS + SEQ_IDX, "gdn_out_proj": 4096 * 24 * 2},
        ),
        ("*", {"core_attn": CORE}),
        ("*", {"core_attn": CORE, "attn_proj": 0}),  # the projection saves the kernel's output
        (
            "E",
            {
                "expert_fc1": 2 * HIDDEN,
                "moe_act": 2 * 4096 * 16 * 2,
                "expert_fc2": 2 * 4096 * 16 * 2,
            },
        ),
    ],
)
def test_offloaded_parts_are_there_in_their_own_layer_and_in_buffers(symbol, moved, buffers):
    """The peak is in the last of 3 layers or after it, with as many bundles as buffers."""
    options = {
        "fine_grained_activation_offloading": True,
        "offload_modules": tuple(moved),
        "min_offloaded_tensor_size": 4096,
    }
    peak, host = memory_of(3 * symbol, offload_buffers=buffers, **options)
    assert host == 3 * sum(moved.values())
    kept, _ = memory_of(3 * symbol)
    # The last bundles are on the device, and those of the layer that runs.
    assert kept - host <= peak < kept
    fewer, _ = memory_of(3 * symbol, offload_buffers=1, **options)
    assert 0 <= peak - fewer <= max(moved.values())


WHOLE = {"recompute_granularity": "full", "offload_layer_inputs": True}
PARTS = {"fine_grained_activation_offloading": True}


@pytest.mark.parametrize(
    "options",
    [
        {**WHOLE, "recompute_method": "uniform", "recompute_num_layers": 1},
        {**WHOLE, "recompute_method": "uniform", "recompute_num_layers": 3},
        {
            **WHOLE,
            **PARTS,
            "recompute_method": "block",
            "recompute_num_layers": 2,
            "offload_modules": ("mlp_fc2",),
        },
        {**PARTS, "offload_modules": ("qkv_linear", "mamba_in_proj", "mamba_out_proj", "mlp_fc1")},
        {**PARTS, "offload_modules": ("gdn_in_proj", "mlp_fc2")},
    ],
    ids=str,
)
def test_pinned_bytes_are_those_of_a_step(options):
    """Estimated pinned bytes equal those of a real model, for tensors that a CPU saves, too."""
    tokens = 64
    memory = MemoryConfig(**options, min_offloaded_tensor_size=tokens * 32)
    model, planned = (
        built({}, device, dtype=FP32, pattern="M*-EG-", memory=memory)[0]
        for device in ("cpu", "meta")
    )
    model(make_pack(make_documents([40, 24]))).loss.backward()
    found = estimated(planned, Work(tokens=tokens, documents=2)).host_bytes
    assert found == model.offload.pool.num_bytes > 0


def test_graphs_hold_what_they_captured_beside_what_runs_eagerly():
    def captured(impl, modules=(), memory=None):
        graphs = CudaGraphConfig(cuda_graph_impl=impl, cuda_graph_modules=modules)
        return of(pattern="M-M-", graphs=graphs, memory=memory)

    eager = of(pattern="M-M-")
    local, half = captured("local"), captured("local", ("mamba",))
    whole, engine = captured("full_iteration"), captured("transformer_engine")
    assert (eager.graph_pool, whole.graph_pool) == (0, eager.peak.bytes)
    assert eager.peak.bytes < local.peak.bytes < engine.peak.bytes
    assert 0 < half.graph_pool < local.graph_pool < local.peak.bytes
    recomputed = MemoryConfig(recompute_granularity="selective", recompute_modules=("mlp",))
    less = captured("transformer_engine", memory=recomputed)
    assert 0 < less.graph_pool < engine.graph_pool == local.graph_pool


def test_the_loss_holds_one_chunk_of_logits():
    model = imagined("-")
    one = estimated(model, Work(tokens=8192, documents=16))
    assert one.peak.where == "the forward pass of the loss"
    # The loss computes this pack in two chunks of 4,096 tokens, with bf16 logits. In addition it
    # holds the gradient of the hidden state, and the loss of each token.
    logits = 4096 * model.output_weight.shape[0] * 2
    assert one.peak.amounts[Purpose.LOSS] == logits + 8192 * 32 * 2 + 8192 * 4


def test_communicators():
    """Groups of the same ranks share a communicator, but groups that reduce gradients have separate
    ones.
    """
    for layout, count in (
        ({}, 0),
        ({"world_size": 4}, 1),  # dp, dp_cp and expert_dp share one communicator
        # One for tp, expert_tp, tp_cp and expert_tp_ep, and one for dp, dp_cp and expert_dp.
        ({"world_size": 4, "tp_size": 2}, 2),
        # tp, ep, expert_tp_ep and dp; expert_dp has one rank.
        ({"world_size": 4, "tp_size": 2, "ep_size": 2}, 4),
    ):
        assert communicators_of(ParallelGroups.unjoined(ParallelLayout(**layout))) == count


@pytest.mark.parametrize("several", [False, True])
def test_gradients_in_bf16_are_counted_with_the_second_buffers_of_their_sums(several):
    """Expert weights take 2 bytes less each; two buckets on their way have a second buffer."""
    precision = GradientPrecision(low=True)
    model, _ = built({}, "cpu", dtype=BF16)
    buffers = FlatBuffers(model, extras=EXTRAS, bucket_elements=3000, precision=precision)
    imagined, _ = built({}, "meta", dtype=BF16)
    layout = flat_layout_of(imagined, Ownership(), 3000, precision)
    assert layout == buffers.layout
    tail = tail_elements(EXTRAS, {})
    held = sum(each.untyped_storage().nbytes() for each in (buffers.storage, buffers.low_grads))
    largest = max(end - start for part, start, end in layout.buckets if part.low)
    found = gradient_bytes(layout, tail, rounds_once=several)
    assert found == held + several * 2 * 2 * largest
    plain = gradient_bytes(flat_layout_of(imagined, Ownership(), 3000), tail, rounds_once=False)
    saved = sum(p.numel() for p in imagined.parameters() if p.dim() > 2)
    assert plain - held > 2 * saved > 0


def test_a_plan_has_gradients_in_bf16():
    words = "--hybrid-layer-pattern -- --hidden-size 256 --seq-length 64 --train-iters 1 --lr 1 --bf16 --device cpu"
    plain = [*words.split(), "--mock-data", "--ddp-bucket-size", "100000"]
    found = [
        usual(estimates(parse([*plain, *more], 2), 2, VOCAB, documents=4)).static
        for more in ([], ["--grad-reduce-in-bf16"])
    ]
    assert found[1].gradients < 0.8 * found[0].gradients
    assert found[1].optimizer == found[0].optimizer
    assert found[1].parameters == found[0].parameters + 128  # one more aligned buffer


def test_experts_have_10_bytes_per_parameter_instead_of_18():
    """A plan counts weights, gradients, moments, and masters or their remainders."""
    words = """--hybrid-layer-pattern E --hidden-size 256 --moe-ffn-hidden-size 512 --moe-router-topk 2
        --seq-length 64 --train-iters 1 --lr 1 --bf16 --device cpu --mock-data --disable-bias-linear
        --squared-relu"""
    low = """--grad-reduce-in-bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16
        --exp-avg-sq-dtype bf16"""

    def held(experts: int, flags: str) -> int:
        given = [*words.split(), *flags.split(), "--num-experts", str(experts)]
        static = usual(estimates(parse(given, 1), 1, VOCAB, documents=4)).static
        return static.parameters + static.gradients + static.optimizer

    matrices = 8 * 2 * 256 * 512
    for flags, wanted in (("", 18), (low, 10)):
        more = held(16, flags) - held(8, flags)
        assert more / matrices == pytest.approx(wanted, rel=0.01)  # the router also grows
