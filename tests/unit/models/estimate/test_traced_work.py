"""Work of a pass on the meta device: products, ops and exchanges with their sizes."""

from collections import Counter
from math import prod

import numpy as np
import pytest
import torch

from megatron_packed.config.parser.parse import parse, parse_with_sources
from megatron_packed.config.run import RunConfig
from megatron_packed.distributed.collectives import PlannedExchange
from megatron_packed.models.estimate import step_memory
from megatron_packed.models.estimate.gpu_rates import measured_rates
from megatron_packed.models.estimate.rows_of_ranks import (
    RowsOfRanks,
    choose_partition,
    slowest_rank,
)
from megatron_packed.models.estimate.step_memory import MetaStep, Work
from megatron_packed.models.estimate.step_time import KernelTimes
from megatron_packed.models.estimate.traced_work import (
    LOSS_PRODUCT,
    PRODUCT,
    SECOND_GROUPED,
    Calls,
    TracedKernel,
)
from megatron_packed.models.flops import FlopCounter
from megatron_packed.models.trace import Imagined
from support.kernel_calls import FLAGS

TOKENS, VOCAB, HIDDEN = 2048, 1000, 128
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 96"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def config_of(pattern: str, flags: str = "", processes: int = 1) -> RunConfig:
    words = [*FLAGS, "--hybrid-layer-pattern", pattern, "--squared-relu", *flags.split()]
    words += ["--normalization", "RMSNorm", "--position-embedding-type", "none", "--bf16"]
    return parse(words, world_size=processes)


def calls_of(pattern: str, flags: str = "", processes: int = 1) -> Calls:
    config = config_of(pattern, flags, processes)
    model = Imagined.from_config(config, processes, VOCAB).model
    work = Work(tokens=TOKENS, documents=4)
    return MetaStep(model, work, {}, torch.device("cpu")).run().calls


def products(calls: Calls, *, forward: bool, name: str = PRODUCT) -> float:
    """Return the operations of products."""
    return sum(
        number * 2.0 * prod(call.shape)
        for call, number in calls.items()
        if isinstance(call, TracedKernel) and call.name == name and call.forward is forward
    )


def kernels(calls: Calls, name: str) -> Counter[tuple[int, ...]]:
    counts: Counter[tuple[int, ...]] = Counter()
    for call, number in calls.items():
        if isinstance(call, TracedKernel) and call.name == name:
            counts[call.shape] += number
    return counts


@pytest.mark.parametrize("processes, flags", [(1, ""), (2, TP2)])
def test_products_have_the_operations_of_the_model(processes, flags) -> None:
    calls = calls_of("M*-G", flags, processes)
    whole = FlopCounter(config_of("M*-G").model, VOCAB).forward(np.array([TOKENS]))
    # Each group of B and C, and each key head, may be on several ranks.
    assert products(calls, forward=True) * processes == pytest.approx(whole.projections, rel=0.05)
    assert products(calls, forward=False) == products(calls, forward=True)
    # The loss computes logits and gradients of inputs; the third product does not run on meta.
    of_loss = products(calls, forward=True, name=LOSS_PRODUCT)
    assert of_loss * processes == pytest.approx(2 * whole.output, rel=0.05)


def test_recomputed_kernels_run_in_the_backward_pass() -> None:
    kept, recomputed = calls_of("M-"), calls_of("M-", RECOMPUTE)
    assert products(recomputed, forward=True) == products(kept, forward=True)
    assert products(recomputed, forward=False) == 2 * products(kept, forward=False)
    assert kernels(recomputed, "ssd").total() == 2 == 2 * kernels(kept, "ssd").total()


def test_a_frozen_product_is_marked() -> None:
    calls = calls_of("--", "--freeze-params layers.1.mixer.fc2.weight")
    kinds = [call for call in calls if isinstance(call, TracedKernel) and call.frozen]
    assert [(call.shape[1], calls[call]) for call in kinds if call.forward] == [(HIDDEN, 1)]


def test_experts_have_two_grouped_products_with_an_activation_between_them() -> None:
    """The second product has no request of its own, and hidden sizes may equal inner sizes."""
    rows = 2 * TOKENS
    for inner in (96, HIDDEN):
        flags = f"--num-experts 4 --moe-ffn-hidden-size {inner} --moe-router-topk 2"
        calls = calls_of("E", flags)
        assert kernels(calls, "grouped_mlp") == {(rows, inner): 1}
        assert kernels(calls, "activation") == {(rows, inner): 1}
        assert kernels(calls, SECOND_GROUPED) == {(rows, HIDDEN): 1}


def test_factors_of_adapters_of_experts_cost_little_beside_their_frozen_weights() -> None:
    rows, hidden, inner, rank = 2 * TOKENS, 2048, 4096, 16
    flags = (
        f"--hidden-size {hidden} --num-experts 4 --moe-ffn-hidden-size {inner} --moe-router-topk 2"
    )
    plain, adapted = (calls_of("E", flags + more) for more in ("", f" --lora-rank {rank}"))
    for name, base in (("grouped_mlp", (inner, hidden)), (SECOND_GROUPED, (hidden, inner))):
        widths = Counter(
            {
                (*call.shape, call.inner): number
                for call, number in adapted.items()
                if isinstance(call, TracedKernel) and call.name == name
            }
        )
        assert widths == {
            (rows, *base): 1,
            (rows, rank, base[1]): 1,
            (rows, base[0], rank): 1,
        }
    rates = measured_rates()["H200"]
    times = [
        KernelTimes(rates, calls, config_of("E", flags + more), np.array([TOKENS])).by_op()
        for more, calls in (("", plain), (f" --lora-rank {rank}", adapted))
    ]
    for name in ("grouped_mlp", SECOND_GROUPED):
        assert 0.5 < times[1][name] / times[0][name] < 1


def test_exchanges_of_tensor_parallel_layers_have_their_messages() -> None:
    """A layer gathers rows before its first product, and scatters sums after its last one; the
    backward pass does the opposite, and gathers the rows again."""
    one, two = calls_of("-", TP2, 2), calls_of("--", TP2, 2)
    more = {
        call: number - one.get(call, 0)
        for call, number in two.items()
        if isinstance(call, PlannedExchange) and number != one.get(call, 0)
    }
    message = TOKENS * HIDDEN * 2
    assert more == {
        PlannedExchange("all_gather", message, (0, 1), False): 3,
        PlannedExchange("reduce_scatter", message, (0, 1), False): 2,
    }


def test_repeated_units_have_the_calls_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = calls_of("M*-EM*-E", EXPERTS)
    monkeypatch.setattr(step_memory.MetaStep, "units", lambda self: {})
    run = calls_of("M*-EM*-E", EXPERTS)
    named = [
        {kernels(calls, "ssd").total(), products(calls, forward=False)} for calls in (replayed, run)
    ]
    assert named[0] == named[1]


@pytest.mark.parametrize("window", [None, 3])
def test_the_slowest_rank_has_the_most_visible_pairs(window: int | None) -> None:
    """Compare with pairs that are counted one by one, in packs of documents of one length."""
    tokens, ranks, length = 24, 3, 9
    pairs = [0.0] * ranks
    for slot in range(2 * length):
        pairs[slot // 8] += min(slot % length + 0.5, window or tokens)
    found = slowest_rank(np.full(100, length, dtype=np.float64), tokens, ranks, window)
    assert found == pytest.approx(max(pairs) / (sum(pairs) / ranks))


def test_the_order_of_documents_and_a_pack_that_is_not_full_change_little() -> None:
    lengths = np.array([512.0] * 20 + [8.0] * 5000)
    first, last = (slowest_rank(each, 512, 4, None) for each in (lengths, lengths[::-1].copy()))
    assert first == pytest.approx(last, rel=0.05) and first > 1.4
    assert slowest_rank(np.array([64.0] * 8 + [1.0]), 64, 4, None) == pytest.approx(1.75, abs=1e-3)


def test_each_partition_has_its_cost() -> None:
    """A document that fills the pack slows the last rank, and short ones are padded by a zigzag."""
    long, short = (
        RowsOfRanks.for_documents(np.array(lengths), 64, 4, None, attention=0.2)
        for lengths in ([64], [7, 9] * 4)
    )
    assert long == RowsOfRanks(
        zigzag_padding=0.0, slowest_contiguous=1.75, contiguous_flops=pytest.approx(0.15)
    )
    assert (long.cheaper, short.cheaper) == ("zigzag", "contiguous")
    assert short.zigzag_padding == 8 / 16 and short.slowest_contiguous < 1.3


@pytest.mark.parametrize(
    ("flags", "lengths", "mode"),
    [
        ("", [64] * 8, "zigzag"),
        ("", [7, 9] * 40, "contiguous"),
        ("", [37] * 8, "contiguous"),
        ("--pad-packed-seq-alignment 8", [37] * 8, "zigzag"),  # which are padded anyway
        ("--window-size 16,0", [64] * 8, "contiguous"),
        ("--kv-channels 256", [64] * 8, "contiguous"),
        ("--attention-backend flash_attn_4", [64] * 8, "contiguous"),
        ("--attention-backend transformer_engine", [7, 9] * 40, "zigzag"),
        ("--transformer-impl transformer_engine", [7, 9] * 40, "zigzag"),
        ("--cp-partition-mode zigzag", [7, 9] * 40, "zigzag"),
        ("--cp-partition-mode contiguous", [64] * 8, "contiguous"),
        ("--cp-comm-type a2a", [64] * 8, "auto"),
        ("--seq-length 66", [66] * 8, "contiguous"),  # not a multiple of 4
    ],
)
def test_lengths_choose_the_partition_where_both_fit(
    flags: str, lengths: list[int], mode: str
) -> None:
    exchange = "--context-parallel-size 2 --cp-comm-type p2p --seq-length 64"
    words = f"--hybrid-layer-pattern * --normalization RMSNorm --bf16 {exchange} {flags}".split()
    words = [*FLAGS, *words, "--device", "auto"]
    config = parse_with_sources(words, 2, on_this_machine=False).config
    chosen, reason = choose_partition(config, np.array(lengths), lambda: 0.3)
    assert chosen.parallel.cp_partition_mode == mode
    assert bool(reason) == config.parallel.chooses_partition
    assert reason == "" or reason.startswith(f"--cp-partition-mode {mode}: a zigzag pads ")


def test_time_of_attention_over_contiguous_rows_is_that_of_the_slowest_rank() -> None:
    """Its exchange has no rows that the window does not reach."""
    flags = "--context-parallel-size 4 --cp-comm-type p2p --window-size 100,0 --cp-partition-mode"
    config, calls = (of("*", f"{flags} contiguous", 4) for of in (config_of, calls_of))
    row = 2 * 2 * 64 * 2  # keys and values of two heads in bf16
    sent = {call: n for call, n in calls.items() if isinstance(call, PlannedExchange)}
    assert sent == {PlannedExchange("send", 100 * row, (0, 1, 2, 3), False): 2}
    slow, even = (
        KernelTimes(measured_rates()["H200"], calls, each, np.array([128])).by_op()
        for each in (config, config_of("*", f"{flags} zigzag", 4))
    )
    assert slow["varlen_attention"] > even["varlen_attention"]
