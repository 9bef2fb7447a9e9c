"""The estimate of memory, compared with real models on the CPU and with itself."""

import pytest
import torch

from megatron_packed.config.parallel_layout import ParallelLayout
from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.distributed.flat_buffers import FlatBuffers, flat_layout_of, tail_elements
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.zero1_layout import Ownership
from megatron_packed.models.estimate.activations import ends, footprints
from megatron_packed.models.estimate.footprint import Purpose, Work
from megatron_packed.models.estimate.rank_memory import (
    communicators_of,
    estimate,
    optimizer_bytes,
    parameter_bytes,
)
from megatron_packed.models.estimate.recomputed_activations import ResidentUnderRecompute
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.optim.optimizer import Optimizer
from support.hybrid_cases import VOCAB, make_documents, make_pack, tiny_config

BF16, FP32 = torch.bfloat16, torch.float32
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


def built(layout, device, *, dtype=BF16, pattern="M*-E", memory=None, **changes):
    groups = ParallelGroups.unjoined(ParallelLayout(**layout), device)
    model = HybridModel(
        tiny_config(pattern, **changes),
        vocab_size=VOCAB,
        max_positions=256,
        groups=groups,
        device=device,
        dtype=dtype,
        memory=memory,
    )
    return model, groups


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
    optimizer = Optimizer(buffers)
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in buffers.params.values()
    }
    masters = [m for m in optimizer._masters if m.untyped_storage().data_ptr() not in held]
    state = sum(t.nbytes for t in (*masters, optimizer.exp_avg, optimizer.exp_avg_sq))

    imagined, _ = built(layout, "meta", dtype=dtype, **sizes)
    assert all(parameter.is_meta for parameter in imagined.parameters())
    found = flat_layout_of(imagined, ownership, 3000)
    assert found == buffers.layout
    assert parameter_bytes(found) == sum(held.values())
    assert optimizer_bytes(found) == state
    one = estimate(
        imagined,
        found,
        Work(tokens=512, documents=4, element=dtype.itemsize),
        tail=tail_elements(EXTRAS, COUNTERS),
    )
    assert one.static.gradients == buffers.storage.untyped_storage().nbytes()
    assert (one.static.parameters, one.static.optimizer) == (parameter_bytes(found), state)


def of(
    layout=LAYOUTS["one"],
    *,
    tokens=4096,
    documents=1,
    resident=None,
    graphs=None,
    even=True,
    **changes,
):
    model, groups = built(layout, "meta", **changes)
    work = Work(tokens=tokens, documents=documents, element=2, even=even)
    return estimate(
        model,
        flat_layout_of(model, Ownership.undivided(groups)),
        work,
        resident=resident,
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
    options = {"pattern": "*", "layout": LAYOUTS[layout]}
    models = [built(options["layout"], "meta", pattern="*", **o)[0] for o in (position, changes)]
    work = Work(tokens=4096, documents=1, element=2)
    plain, more = (footprints(model, work)[0].saved for model in models)
    ranks = LAYOUTS[layout]
    tokens, heads = 4096 // ranks.get("cp_size", 1), 4 // ranks.get("tp_size", 1)
    groups = max(2 // ranks.get("tp_size", 1), 1)
    saved = sum(term.bytes for term in more.values()) - sum(term.bytes for term in plain.values())
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


WORK = Work(tokens=4096, documents=4, element=2)


def one_layer(symbol, layout, **options):
    """Return a bf16 model with one layer, without memory for its tensors."""
    return HybridModel(
        tiny_config(
            symbol, **{name: options.pop(name) for name in [*options] if name.startswith("moe")}
        ),
        vocab_size=VOCAB,
        max_positions=256,
        groups=ParallelGroups.unjoined(ParallelLayout(**layout)),
        device="meta",
        dtype=BF16,
        **options,
    )


def moments_of(symbol, layout, **options):
    """Return the moments, by name, of a model with one layer and packs of 4096 slots."""
    model = one_layer(symbol, layout, **options)
    parts = (*footprints(model, WORK), ends(model, WORK))
    return {moment.name: moment.extra for part in parts for moment in part.moments}


def bytes_at(moments, kind, *names):
    return [moments[name].get(kind, 0) for name in names]


@pytest.mark.parametrize(
    ("comm", "exchanged", "ranks"), [("a2a", 1, 0), ("p2p", 0, 2), ("all_gather", 0, 4)]
)
def test_what_attention_moves_among_four_ranks(comm, exchanged, ranks):
    """Check the bytes that attention exchanges among four ranks with 1024 rows each.

    With a2a these are the heads of the rows, with p2p the keys and values of two ranks, and with
    all_gather those of all ranks.
    """
    query, key = 1024 * 4 * 8 * 2, 1024 * 2 * 8 * 2
    moments = moments_of("*", {"world_size": 4, "cp_size": 4}, cp_comm_type=comm)
    names = ("forward", "backward of attention", "backward of queries, keys and values")
    heads, travelling = exchanged * (query + 2 * key), ranks * 2 * key
    assert bytes_at(moments, Purpose.COMMUNICATION, *names) == [
        heads + travelling,
        travelling,
        heads,
    ]


def test_what_a_scan_moves_and_its_states():
    """Two ranks exchange all rows for two heads of width 8, with B and C of size 16, and dt.

    The states are those of mamba_ssm. `test_our_scan_saves_its_inputs_only_and_has_states_in_bf16` has
    those of our kernels.
    """
    exchanged, chunks = 4096 * (2 * 8 + 2 * 16 + 2) * 2, 4096 // tiny_config("M").mamba_chunk_size
    moments = moments_of("M", {"world_size": 2, "cp_size": 2}, backends={"ssd": "mamba_ssm"})
    names = ("forward of the scan", "forward", "backward of the convolution")
    assert bytes_at(moments, Purpose.COMMUNICATION, *names) == [
        exchanged,
        4096 * 2 * 8 * 2,
        2 * exchanged,
    ]
    states = chunks * 2 * 8 * 16  # each in fp32 and in bf16, in backward also their gradients
    assert bytes_at(moments, Purpose.STATES, names[0], "backward of the scan") == [
        states * 6,
        states * 12,
    ]


@pytest.mark.parametrize("comm", ["a2a", "p2p"])
def test_what_passed_states_move(comm):
    """Two ranks have all four heads of their rows; attention to a zigzag reorders its rows."""
    options = {"cp_comm_type": comm, "mamba_cp_comm_type": "state"}
    layout, columns, state = {"world_size": 2, "cp_size": 2}, 4 * 8 + 2 * 2 * 16, 4 * 8 * 16 * 4
    libraries = {"ssd": "mamba_ssm", "causal_conv1d": "causal_conv1d"}
    layer, _ = footprints(one_layer("M*", layout, backends=libraries, **options), WORK)
    assert layer.saved["conv1d.input"].bytes == 2048 * columns * 2
    assert layer.saved["scan.passed"].bytes == 3 * state
    layer, attention = footprints(one_layer("M*", layout, **options), WORK)
    assert "conv1d.input" not in layer.saved
    assert layer.saved["scan.passed"].bytes == state
    moments = {moment.name: moment.extra for moment in layer.moments}
    assert bytes_at(moments, Purpose.COMMUNICATION, "forward of the scan", "forward") == [0, 0]
    # States of segments of one chunk; in backward gradients and the states of chunks in bf16, too.
    states, names = 2048 // 64 * state, ("forward of the scan", "backward of the scan")
    assert bytes_at(moments, Purpose.STATES, *names) == [states + 2 * state, 3 * states + 3 * state]
    moments = {moment.name: moment.extra for moment in attention.moments}
    heads = 2048 * (4 + 2 * 2) * 8 * 2
    assert bytes_at(moments, Purpose.COMMUNICATION, "backward of queries, keys and values") == [
        heads
    ]
    assert attention.saved["attention.qkv"].bytes == heads
    assert ("proj.input" in attention.saved) and "qkv.output" not in attention.saved


def test_our_scan_saves_its_inputs_only_and_has_states_in_bf16():
    """There are as many segments as chunks of 64, because 64 programs a head would fill the GPU."""
    [layer] = footprints(one_layer("M", {}), WORK)
    moments = {moment.name: moment.extra for moment in layer.moments}
    states = 4096 // 64 * 4 * 8 * 16
    assert "scan.steps" not in layer.saved
    names = ("forward of the scan", "backward of the scan")
    assert bytes_at(moments, Purpose.STATES, *names) == [
        states * 4,  # fp32 at the start of segments
        states * (2 * 4 + 2 * 2),  # and their gradients, and both in bf16 for chunks
    ]


def test_what_a_gated_delta_net_moves_and_its_states():
    """Two ranks exchange all rows for a key head of width 8 and two value heads of width 6."""
    exchanged, y = 4096 * (2 * 8 + 2 * 6 + 2 * 2) * 2, 4096 * 2 * 6 * 2
    moments = moments_of("G", {"world_size": 2, "cp_size": 2})
    rule = "forward of the gated delta rule"
    names = (rule, "forward", "backward of the convolution")
    assert bytes_at(moments, Purpose.COMMUNICATION, *names) == [exchanged, y, 2 * exchanged]
    states = (4096 // 64) * 2 * 8 * 6  # in bf16; in backward also their gradients
    names = (rule, "backward of the gated delta rule")
    assert bytes_at(moments, Purpose.STATES, *names) == [0, 2 * states * 2]


def test_a_gated_delta_net_saves_two_matrices_per_chunk_and_value_head():
    """Two bf16 matrices and five fp32 vectors of four value heads, two vectors of two key heads."""
    model, _ = built({}, "meta", pattern="G")
    [layer] = footprints(model, Work(tokens=4096, documents=4, element=2))
    assert layer.saved["scan.scores"].bytes == 4096 * (2 * 4 * 64 * 2 + 4 * (5 * 4 + 2 * 2))


def test_what_experts_move():
    """An all-gather moves all tokens of five ranks and their results.

    An all-to-all moves the routes of each token, which exist as sent, as received and on their way
    back.
    """
    five, names = (
        {"world_size": 5, "ep_size": 5},
        ("forward of the experts", "backward of the dispatch"),
    )
    row, topk = 32 * 2, tiny_config("E").moe_router_topk
    gathered = moments_of("E", five, moe_token_dispatcher_type="allgather")
    sent = moments_of("E", five, moe_token_dispatcher_type="alltoall")
    assert bytes_at(gathered, Purpose.COMMUNICATION, *names) == [2 * 5 * 4096 * row, 5 * 4096 * row]
    assert bytes_at(sent, Purpose.COMMUNICATION, *names) == [0, 2 * 4096 * topk * row]
    experts = (moments[names[0]].get(Purpose.EXPERTS, 0) for moments in (gathered, sent))
    assert list(experts) == [0, 3 * 4096 * topk * row]


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_bounds_are_counted_instead_of_the_routing_and_of_the_worst_case(dispatcher):
    """Five ranks reserve 1.25 even shares of rows, and `alltoall` sends parts of that size, too."""
    options = {
        "layout": LAYOUTS["ep"],
        "pattern": "E",
        "moe_token_dispatcher_type": dispatcher,
        "moe_expert_rank_capacity_factor": 1.25,
    }
    assert of(**options, even=False).peak.bytes == of(**options).peak.bytes
    layout, pattern = options.pop("layout"), options.pop("pattern")
    model, _ = built(layout, "meta", pattern=pattern, **options)
    [layer] = footprints(model, Work(tokens=4096, documents=1, element=2))
    topk, config = model.config.moe_router_topk, model.config
    rows, parts = 4096 * topk * 5 // 4, 5 * -(-4096 * topk // 4)
    combined = parts if dispatcher == "alltoall" else rows
    saved = {name: layer.saved[f"experts.{name}"].bytes for name in ("input", "fc1", "output")}
    inner = config.moe_ffn_hidden_size * (2 if config.swiglu else 1)
    assert saved == {"input": rows * 64, "fc1": rows * inner * 2, "output": combined * 64}
    moments = moments_of("E", {"world_size": 5, "ep_size": 5}, **options)
    moved = moments["forward of the experts"].get(Purpose.EXPERTS, 0)
    assert moved == (3 * parts * 64 if dispatcher == "alltoall" else 0)


@pytest.mark.parametrize(("experts_tp", "rows"), [(None, 4096), (1, 2048)])
def test_a_gate_keeps_the_rows_of_the_shared_expert(experts_tp, rows):
    """Check that the shared expert's output is saved in the rows that the gate multiplies."""
    layout = {"world_size": 2, "tp_size": 2, "expert_tp_size": experts_tp}
    saved = []
    for gate in (False, True):
        model = HybridModel(
            tiny_config(
                "E",
                num_experts=6,
                moe_shared_expert_intermediate_size=24,
                moe_shared_expert_gate=gate,
            ),
            vocab_size=VOCAB,
            max_positions=256,
            groups=ParallelGroups.unjoined(ParallelLayout(**layout)),
            sequence_parallel=True,
            device="meta",
            dtype=BF16,
        )
        (layer,) = footprints(model, Work(tokens=4096, documents=4, element=2))
        saved.append(layer.saved_bytes)
    assert saved[1] - saved[0] == rows * 32 * 2


@pytest.mark.parametrize(("layout", "beside"), [("ep", True), ("tp, whole experts", False)])
def test_a_shared_expert_beside_the_dispatch_is_kept_longer(layout, beside):
    """It is the first part of forward and the last part of backward, with a stream's workspace."""
    options = {"moe_shared_expert_intermediate_size": 24, "backends": {"deterministic": True}}
    found = []
    for overlap in (False, True):
        model = one_layer("E", LAYOUTS[layout], moe_shared_expert_overlap=overlap, **options)
        (layer,) = footprints(model, WORK)
        moments = {moment.name: moment for moment in layer.moments}
        shared = {name for name in layer.saved if name.startswith("shared.")}
        names = ("forward of the experts", "backward of the experts' fc1")
        kept = [shared.isdisjoint(moments[name].absent) for name in names]
        last = "experts.fc1" in moments["backward of the shared expert"].absent
        static = estimate(model, flat_layout_of(model, Ownership()), WORK).static
        found.append(([*kept, last], static.workspaces))
    assert [one[0] for one in found] == [[False] * 3, [beside] * 3]
    assert found[1][1] == found[0][1] * (1 + beside)


@pytest.mark.parametrize("divided", [False, True])
def test_what_tensor_parallel_ranks_move(divided):
    """Layers communicate the hidden state of all rows; the loss does so only with sequence
    parallelism.
    """
    moments = moments_of("-", {"world_size": 2, "tp_size": 2}, sequence_parallel=divided)
    hidden = 4096 * 32 * 2
    assert bytes_at(moments, Purpose.COMMUNICATION, "forward", "loss") == [hidden, divided * hidden]


class Inputs:
    """Fake rule: only the layers' inputs stay, and ``buffers`` bytes replace all other tensors."""

    def __init__(self, buffers, group=1):
        self.buffers, self.group = buffers, group

    def stays(self, layer, symbol, term):
        return term == "norm.input"

    def group_start(self, layer):
        return layer - layer % self.group

    def replacement_bytes(self, layers):
        return self.buffers

    def in_flight_bytes(self, layer):
        return 0

    host_bytes = 0


def test_what_does_not_stay_exists_in_its_own_layer_alone():
    model, _ = built({}, "meta", pattern="----")
    work = Work(tokens=4096, documents=16, element=2)
    layers = footprints(model, work)
    hidden, saved = layers[0].saved["norm.input"].bytes, layers[0].saved_bytes
    most = max(
        sum(moment.extra.values()) - sum(layers[0].saved[name].bytes for name in moment.absent)
        for moment in layers[0].moments
    )
    assert hidden == 4096 * 32 * 2
    assert of(pattern="----", resident=Inputs(0)).peak.bytes == 3 * hidden + saved + most
    assert of(pattern="----", resident=Inputs(1000)).peak.bytes == 3 * hidden + saved + most + 1000
    # In a group of two, the first layer's tensors exist during the second layer's backward pass.
    in_pairs = of(pattern="----", resident=Inputs(0, group=2)).peak.bytes
    assert in_pairs == 2 * hidden + 2 * saved + most
    around = ends(model, work)
    loss = around.saved_bytes + max(
        sum(moment.extra.values()) for moment in around.moments if not moment.absent
    )
    assert of(pattern="----").peak.bytes == max(4 * saved + most, 4 * saved + loss)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_recomputed_groups_leave_their_inputs_and_come_back_whole(size):
    """The peak has the inputs of all groups, one complete group and the last layer's gradients."""
    memory = MemoryConfig(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=size
    )
    work = Work(tokens=4096, documents=16, element=2)
    plain, _ = built({}, "meta", pattern="----")
    model = HybridModel(
        plain.config, vocab_size=VOCAB, max_positions=256, device="meta", dtype=BF16, memory=memory
    )
    [layer, *_] = footprints(model, work)
    most = max(
        sum(moment.extra.values()) - sum(layer.saved[name].bytes for name in moment.absent)
        for moment in layer.moments
    )
    hidden = layer.saved["norm.input"].bytes
    layout = flat_layout_of(model, Ownership())
    found = estimate(model, layout, work).peak.bytes
    assert found == (4 // size - 1) * hidden + size * layer.saved_bytes + most
    assert found < estimate(plain, layout, work).peak.bytes


def test_recomputed_attention_of_exchanged_heads_keeps_the_fused_projection():
    """Two ranks keep the fused projection of 2048 rows each: 4 query, 2 key and 2 value heads."""
    memory = MemoryConfig(recompute_granularity="selective")
    model = HybridModel(
        tiny_config("*"),
        vocab_size=VOCAB,
        max_positions=256,
        device="meta",
        dtype=BF16,
        memory=memory,
        groups=ParallelGroups.unjoined(ParallelLayout(world_size=2, cp_size=2)),
    )
    work = Work(tokens=4096, documents=4, element=2)
    layers = footprints(model, work)
    resident = ResidentUnderRecompute(model, work)
    kept = {term for term in layers[0].saved if resident.stays(0, "*", term)}
    assert kept == {"norm.input", "norm.statistics", "qkv.input", "proj.input"}
    assert resident.replacement_bytes(layers) == 2048 * (4 + 2 * 2) * 8 * 2


def memory_of(pattern, *, tokens=4096, **options):
    """Return peak and pinned bytes of a model with other memory options."""
    plain, _ = built({}, "meta", pattern=pattern)
    memory = MemoryConfig(**options) if options else None
    model = HybridModel(
        plain.config, vocab_size=VOCAB, max_positions=256, device="meta", dtype=BF16, memory=memory
    )
    found = estimate(
        model, flat_layout_of(model, Ownership()), Work(tokens=tokens, documents=16, element=2)
    )
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


SCAN = ["in_proj.output", "conv1d.output", "scan.steps", "scan.output", "gated_norm.statistics"]
RULE = ["scan.scores" if name == "scan.steps" else name for name in SCAN]
CORE = ["qkv.output", "attention.qk", "attention.q", "attention.lse"]
NORM = ["norm.input", "norm.statistics"]


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize(
    ("symbol", "moved"),
    [
        ("-", {"mlp_act": ["fc1.output"]}),
        (
            "-",
            {
                "mlp_norm": NORM,
                "mlp_fc1": ["fc1.input"],
                "mlp_act": ["fc1.output"],
                "mlp_fc2": ["activation"],
            },
        ),
        ("M", {"mamba_norm": NORM, "mamba_scan": SCAN, "mamba_out_proj": ["out_proj.input"]}),
        ("G", {"gdn_norm": NORM, "gdn_scan": RULE, "gdn_out_proj": ["out_proj.input"]}),
        ("*", {"core_attn": CORE}),
        ("*", {"core_attn": [*CORE, "attention.output"], "attn_proj": []}),
        (
            "E",
            {
                "expert_fc1": ["experts.input"],
                "moe_act": ["experts.fc1"],
                "expert_fc2": ["experts.activation"],
            },
        ),
    ],
)
def test_offloaded_parts_are_there_in_their_own_layer_and_in_buffers(symbol, moved, buffers):
    """The peak is in the last of 3 layers or after it, with as many bundles as buffers."""
    model, _ = built({}, "meta", pattern=3 * symbol)
    work = Work(tokens=4096, documents=16, element=2)
    layer, around = footprints(model, work)[0], ends(model, work)
    saved = [
        [layer.saved[name].bytes for name in terms if name in layer.saved]
        for terms in moved.values()
    ]
    bundles = [sum(terms) for terms in saved if terms]
    # The output projection saves the kernel's output, too.
    twice = layer.saved["attention.output"].bytes if set(moved) == {"core_attn"} else 0

    def most(part):
        return part.saved_bytes + max(
            sum(moment.extra.values()) - sum(part.saved[name].bytes for name in moment.absent)
            for moment in part.moments
        )

    stays = layer.saved_bytes - sum(bundles)
    before = bundles[-1] if buffers > len(bundles) else 0
    bundles[-1] += twice
    before += twice if before else 0
    expected = max(
        2 * stays + before + most(layer), 3 * stays + sum((bundles * 3)[-buffers:]) + most(around)
    )
    peak, host = memory_of(
        3 * symbol,
        fine_grained_activation_offloading=True,
        offload_modules=tuple(moved),
        offload_buffers=buffers,
        min_offloaded_tensor_size=4096,
    )
    assert (peak, host) == (expected, 3 * sum(bundles))
    assert peak < memory_of(3 * symbol)[0]


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
    model = HybridModel(
        tiny_config("M*-EG-"), vocab_size=VOCAB, max_positions=tokens, memory=memory
    )
    model(make_pack(make_documents([40, 24]))).loss.backward()
    work = Work(tokens=tokens, documents=2, element=4)
    assert (
        estimate(model, flat_layout_of(model, Ownership()), work).host_bytes
        == model.offload.pool.num_bytes
        > 0
    )


def test_graphs_hold_what_they_captured_beside_what_runs_eagerly():
    eager = of(pattern="M-M-")
    local = of(pattern="M-M-", graphs=CudaGraphConfig(cuda_graph_impl="local"))
    half = of(
        pattern="M-M-",
        graphs=CudaGraphConfig(cuda_graph_impl="local", cuda_graph_modules=("mamba",)),
    )
    whole = of(pattern="M-M-", graphs=CudaGraphConfig(cuda_graph_impl="full_iteration"))
    engine = of(pattern="M-M-", graphs=CudaGraphConfig(cuda_graph_impl="transformer_engine"))
    assert (eager.graph_pool, whole.graph_pool) == (0, eager.peak.bytes)
    assert eager.peak.bytes < local.peak.bytes < engine.peak.bytes
    assert 0 < half.graph_pool < local.graph_pool < local.peak.bytes
    recomputed = MemoryConfig(recompute_granularity="selective", recompute_modules=("mlp",))
    less = of(
        pattern="M-M-",
        memory=recomputed,
        graphs=CudaGraphConfig(cuda_graph_impl="transformer_engine"),
    )
    assert 0 < less.graph_pool < engine.graph_pool == local.graph_pool


def test_the_loss_holds_one_chunk_of_logits():
    model, _ = built({}, "meta")
    around = ends(model, Work(tokens=8192, documents=16, element=2))
    logits = next(moment for moment in around.moments if moment.name == "loss").extra[Purpose.LOSS]
    # The loss computes this pack in two chunks of 4,096 tokens, with bf16 logits. In addition it
    # holds four fp32 values per token.
    assert logits == 4096 * model.output_weight.shape[0] * 2 + 4 * 4 * 8192


def test_communicators():
    """Groups of the same ranks share a communicator, but groups that reduce gradients have separate
    ones.
    """
    assert communicators_of(ParallelGroups.unjoined(ParallelLayout())) == 0
    # dp, dp_cp and expert_dp share one communicator.
    assert communicators_of(ParallelGroups.unjoined(ParallelLayout(world_size=4))) == 1
    # One for tp, expert_tp, tp_cp and expert_tp_ep, and one for dp, dp_cp and expert_dp.
    assert communicators_of(ParallelGroups.unjoined(ParallelLayout(world_size=4, tp_size=2))) == 2
    # tp, ep, expert_tp_ep and dp; expert_dp has one rank.
    assert (
        communicators_of(
            ParallelGroups.unjoined(ParallelLayout(world_size=4, tp_size=2, ep_size=2))
        )
        == 4
    )
