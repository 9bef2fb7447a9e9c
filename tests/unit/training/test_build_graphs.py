"""Choice of captured modules, packs for the capture, and effects of a capture on the job."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.cuda_graphs.fallback_reasons import GraphFallbackError
from megatron_packed.packed.capture_sizes import CaptureSize
from megatron_packed.training.build_graphs import (
    build_graphs,
    capture_graphs,
    dummy_pack,
    modules_to_capture,
    released,
)
from megatron_packed.training.failures import failure_of
from support.stand_in import RecordingBackend
from support.step_jobs import (
    CAPTURE_SIZES,
    CONFIG,
    GROUPS,
    SLOTS,
    VOCAB,
    config_of,
    job_of,
    micro_batch,
    state_hash,
)
from support.te_stand_in import stand_in


def by_transformer_engine(config):
    """Use TransformerEngine's capture, replaced by a stand-in that works on a CPU."""
    object.__setattr__(
        config, "cuda_graph", replace(config.cuda_graph, cuda_graph_impl="transformer_engine")
    )
    return config


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        ((), [f"layers.{number}" for number in range(6)]),
        (("attn",), ["layers.1", "layers.4"]),
        (("mamba", "mlp"), ["layers.0", "layers.2"]),
        (("gdn",), ["layers.0"]),
        (("moe",), ["layers.3", "layers.5"]),
        (
            ("moe_router", "attn"),
            ["layers.1", "layers.3.mixer.router", "layers.4", "layers.5.mixer.router"],
        ),
        (("moe_router", "moe"), ["layers.3", "layers.5"]),
    ],
)
def test_modules_in_the_order_of_the_model(modules, names):
    config = config_of()
    if "gdn" in modules:
        sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
        pattern = replace(config.model, hybrid_layer_pattern="G*-E/*E", **sizes)
        config = replace(config, model=pattern)
    model = job_of(config).model
    # Skip the checks of the configuration, which refuse moe together with moe_router.
    options = CudaGraphConfig.__new__(CudaGraphConfig)
    object.__setattr__(options, "cuda_graph_modules", modules)
    found = modules_to_capture(options, model)
    assert list(found) == names
    assert all(found[name] is model.get_submodule(name) for name in names)


def test_nothing_without_graphs_and_a_sentence_without_a_gpu():
    said = []
    config = config_of(cuda_graph_impl="none")
    assert build_graphs(config, job_of(config), None, GROUPS, said.append) is None and said == []
    config = config_of()
    job = job_of(config)
    assert build_graphs(config, job, CAPTURE_SIZES, GROUPS, said.append) is None
    assert len(said) == 1 and "CUDA graphs need a GPU, and this run is on cpu" in said[0]
    assert "forward" not in vars(job.model.layers[0])


@pytest.mark.parametrize(
    "size",
    [
        CaptureSize(1, 96),
        CaptureSize(7, 96),
        CaptureSize(96, 96),
        CaptureSize(500, 96),
        CaptureSize(6, 20),
        CaptureSize(3, 35),
    ],
)
def test_a_dummy_fills_its_size_and_looks_like_training(size):
    made = dummy_pack(size, total_tokens=96, vocab_size=VOCAB, packs_per_step=4)
    count, lengths = min(size.capacity, 96), np.asarray(made.packed.document_lengths)
    assert made.packed.num_seqs == count and lengths.sum() == made.num_real_tokens == 96
    assert lengths.min() >= 1 and lengths.max() <= size.max_seqlen
    assert (made.layout.capacity, made.packed.max_seqlen) == (size.capacity, size.max_seqlen)
    assert count in (1, 96) or len(set(lengths.tolist())) > 1
    assert (
        made.tokens.min() >= 0
        and made.tokens.max() < VOCAB
        and len(made.tokens.unique()) > VOCAB / 2
    )
    targets = 4 * made.num_target_tokens
    assert made.scales.tolist() == pytest.approx([1 / targets if targets else 1, 1 / 4])
    again = dummy_pack(size, total_tokens=96, vocab_size=VOCAB, packs_per_step=4)
    assert torch.equal(made.buffer, again.buffer)


def test_a_dummy_of_a_size_that_cannot_be_full_leaves_a_tail():
    made = dummy_pack(CaptureSize(2, 40), total_tokens=96, vocab_size=VOCAB, packs_per_step=4)
    assert list(made.packed.document_lengths) == [40, 40] and made.packed.max_seqlen == 40


def test_a_dummy_is_no_longer_than_the_rotary_tables():
    """Documents of a dummy pack fit the rotary tables, even if the pack is longer."""
    made = dummy_pack(
        CaptureSize(3, 96), total_tokens=96, vocab_size=VOCAB, packs_per_step=4, longest=30
    )
    assert list(made.packed.document_lengths) == [30, 30, 30] and made.packed.max_seqlen == 96
    aligned = dummy_pack(
        CaptureSize(1, 96),
        total_tokens=96,
        vocab_size=VOCAB,
        packs_per_step=4,
        alignment=8,
        longest=30,
    )
    assert list(aligned.packed.document_lengths) == [24]


def test_a_capture_changes_nothing_of_the_job():
    config = config_of()
    job = job_of(config)
    job.step(
        [micro_batch([20, 9, 3])], 1e-2
    )  # moments, expert biases and statistics that are not zero
    job.buffers.zero_grad()
    before, addresses = (
        state_hash(job),
        [parameter.data_ptr() for parameter in job.model.parameters()],
    )
    assert any(
        bias.abs().sum() > 0 for name, bias in job.model.named_buffers() if "expert_bias" in name
    )
    graphs = build_graphs(config, job, CAPTURE_SIZES, GROUPS, lambda line: None, RecordingBackend())
    sizes = {"total_tokens": SLOTS, "vocab_size": VOCAB, "packs_per_step": 3}
    graphs.tune(partial(dummy_pack, **sizes))  # with several GPUs, kernels are tuned first
    assert job.buffers.grads.abs().sum() > 0
    job.buffers.zero_grad()
    assert state_hash(job) == before
    capture_graphs(graphs, job.step, 3, GROUPS)
    assert state_hash(job) == before
    assert [parameter.data_ptr() for parameter in job.model.parameters()] == addresses
    assert graphs.counters.captures == 2 * (1 + 2 * 6)
    assert (
        graphs.counters.replays == 0
        and not graphs.counters.fallbacks
        and not graphs.counters.module_fallbacks
    )
    job.step([micro_batch([20, 9, 3])], 1e-2)
    assert state_hash(job) != before


@pytest.mark.parametrize("impl", ["local", "full_iteration"])
def test_packs_longer_than_the_rotary_tables_are_captured_and_replayed(impl):
    """Packs with four times the tokens of the rotary tables can be captured and replayed."""
    samples = PackingConfig(seq_length=SLOTS // 4, micro_batch_size=4, global_batch_size=12)
    rotary = replace(CONFIG, position_embedding_type="rope", max_position_embeddings=SLOTS // 4)
    config = replace(config_of(cuda_graph_impl=impl), model=rotary, packing=samples)
    eager, graphed = job_of(config), job_of(config)
    graphs = graphed.step.graphs = build_graphs(
        config, graphed, CAPTURE_SIZES, GROUPS, lambda line: None, RecordingBackend()
    )
    capture_graphs(graphs, graphed.step, 3, GROUPS, first=True)
    batches = [micro_batch(lengths) for lengths in ([SLOTS // 4, 3], [5], [SLOTS // 4] * 4)]
    assert torch.equal(graphed.step(batches, 1e-2), eager.step(batches, 1e-2))
    assert graphs.counters.replays and not graphs.counters.fallbacks
    assert state_hash(graphed) == state_hash(eager)


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_steps_with_graphs_are_those_without_whatever_the_number_of_micro_batches(impl):
    """Steps equal eager steps, also after a second capture and with packs that fit no graph."""
    config = (
        config_of(cuda_graph_impl=impl) if impl == "local" else by_transformer_engine(config_of())
    )
    eager, graphed = job_of(config), job_of(config)
    backend, (made_by, _) = RecordingBackend(), stand_in()
    graphs = build_graphs(
        config, graphed, CAPTURE_SIZES, GROUPS, lambda line: None, backend, made_by
    )
    graphed.step.graphs = graphs
    capture_graphs(graphs, graphed.step, 3, GROUPS)
    steps = [
        [[48], [20, 9, 3], [1] * 9],
        [[]],
        [[5] * 5, [40]],
        [[1] * 48, [1] * 6],
        [[30, 2], [2, 30], [7], [9] * 5],
    ]
    for number, packs in enumerate(steps):
        if number == 3:
            capture_graphs(graphs, graphed.step, 3, GROUPS)
        backend.scramble()
        batches = [micro_batch(lengths, seed) for seed, lengths in enumerate(packs)]
        assert torch.equal(
            graphed.step(batches, 1e-2 / (1 + number)), eager.step(batches, 1e-2 / (1 + number))
        )
        assert state_hash(graphed) == state_hash(eager)
    beyond = sum(len(lengths) > 5 for packs in steps for lengths in packs)
    assert graphs.counters.fallbacks == {"more than 5 documents": beyond}
    assert graphs.counters.replays == sum(map(len, steps)) - beyond
    assert backend.lendings == (0 if impl == "local" else 2 * len(CAPTURE_SIZES.sizes))
    assert not graphs.counters.module_fallbacks and graphs.slots.slots == (graphs.slot,)


class Closing:
    def __init__(self, error=None):
        self.closed, self.error = 0, error

    def close(self):
        self.closed += 1
        if self.error is not None:
            raise self.error


def test_graphs_are_released_on_every_exit_and_the_first_error_is_reported():
    with released(None):
        pass
    graphs = Closing()
    with released(graphs):
        assert graphs.closed == 0
    assert graphs.closed == 1
    for error in (ValueError("first"), KeyboardInterrupt()):
        graphs = Closing(RuntimeError("second"))
        with pytest.raises(type(error)), released(graphs):
            raise error
        assert graphs.closed == 1
    with pytest.raises(RuntimeError, match="second"), released(Closing(RuntimeError("second"))):
        pass


def test_a_forbidden_fallback_has_a_code_and_a_sentence():
    failure = failure_of(
        GraphFallbackError("it would run eagerly; raise the capacity."), rank=2, step=7
    )
    assert failure.exit_code == ExitCode.FALLBACK == 23
    assert (
        failure.reason
        == "CUDA graph fallback on rank 2 in step 7: it would run eagerly; raise the capacity."
    )
