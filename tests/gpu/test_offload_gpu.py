"""Offload on GPUs: equal bits with and without it, eager, replayed and with late copies; memory."""

from __future__ import annotations

import dataclasses
import gc
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_packed.config.sections.memory import OFFLOADED_IN, MemoryConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.layers.mlp import MLP
from megatron_packed.memory import activation_offload as offload_module
from megatron_packed.memory.activation_offload import Offload
from megatron_packed.memory.offload_figures import OffloadFigures
from megatron_packed.memory.offload_streams import CudaStreams
from megatron_packed.memory.recompute import checkpoint
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_graphs import build_graphs, capture_graphs, released
from megatron_packed.training.build_job import Job, build_job
from support.gpu_graph_steps import PACKS, config_of, steps_of, with_graphs
from support.gpu_layouts import MODEL, VOCAB, with_depths
from support.gpu_memory_modes import (
    HIDDEN,
    LARGE,
    PATTERN,
    TOKENS,
    captured,
    compared,
    config_with,
    kept_and_peak,
    packs,
    replayed,
    without,
)
from support.host_waits import assert_no_wait, waiting
from support.process_pools import run_distributed

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
FORCE = "MEGATRON_PACKED_OFFLOAD_BUFFERS"


def inputs(method: str = "uniform", number: int = 1, **options: Any) -> MemoryConfig:
    return MemoryConfig(
        recompute_granularity="full",
        recompute_method=method,
        recompute_num_layers=number,
        offload_layer_inputs=True,
        min_offloaded_tensor_size=1,
        offload_headroom_mib=0,
        **options,
    )


def parts(*modules: str, **options: Any) -> MemoryConfig:
    return MemoryConfig(
        fine_grained_activation_offloading=True,
        offload_modules=modules,
        min_offloaded_tensor_size=1,
        offload_headroom_mib=0,
        **options,
    )


MODES = {
    "1 buffer": inputs(offload_buffers=1),
    "2 buffers": inputs(),
    "4 buffers": inputs(offload_buffers=4),
    "groups": inputs(number=3),
    "two layers": inputs("block", 2),
    "all parts": parts(*OFFLOADED_IN, offload_buffers=4),
    "mixers": parts("mamba_scan", "gdn_scan", "core_attn", "attn_proj"),
    "beside recomputation": parts(
        "attn_norm",
        "qkv_linear",
        "attn_proj",
        "mamba_norm",
        "gdn_norm",
        "mlp_norm",
        recompute_granularity="selective",
        recompute_modules=("core_attn", "mamba", "gdn", "mlp", "moe_act"),
    ),
    "layers and parts": inputs(
        "block",
        2,
        fine_grained_activation_offloading=True,
        offload_modules=("mlp_act", "expert_fc1", "moe_act"),
    ),
}


needs_transformer_engine = pytest.mark.skipif(
    find_spec("transformer_engine") is None, reason="TransformerEngine is not installed"
)
IMPLS = ("local", "full_iteration")
"""Kinds of graphs that can be used with offload."""


@pytest.fixture(autouse=True)
def offload_stays_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep offload on even if its copies cannot overlap with computation."""
    monkeypatch.setattr(OffloadFigures, "cannot_pay", None)


# Steps.


def run(job: Job, steps: list[list[MicroBatch]]) -> list[Tensor]:
    """Return the metrics of steps that run as in the trainer."""
    torch.manual_seed(11)
    found, offload = [], job.model.offload
    assert offload is not None
    for micro_batches in steps:
        found.append(job.step(micro_batches, 1e-3).clone())
        offload.end_step()
    torch.cuda.synchronize()
    offload.end_step()  # reads the measurements of the last step
    return found


@pytest.mark.shows("offload", of=lambda: (1, MODEL))
@pytest.mark.parametrize("mode", MODES)
def test_steps_are_those_without(mode: str, groups: ParallelGroups) -> None:
    """The number of buffers grows and packs change, but results equal those without offload."""
    job = build_job(config_with(MODES[mode]), groups, VOCAB)
    compared(job, run(job, packs(groups)), without(0.0, transformer_engine=False))
    offload = job.model.offload
    assert offload is not None and offload.off_reason is None and offload.figures is not None
    assert offload.figures.moved_mib > 0 and offload.buffer_count.now == MODES[mode].offload_buffers


@pytest.mark.shows("offload", of=lambda: (1, with_depths(MODEL)))
@pytest.mark.parametrize("mode", ["2 buffers", "all parts"])
def test_depths_that_share_their_layers(mode: str, groups: ParallelGroups) -> None:
    job = build_job(config_with(MODES[mode], depths=True), groups, VOCAB)
    expected = without(0.0, transformer_engine=False, depths=True)
    compared(job, run(job, packs(groups)), expected)
    assert job.model.offload is not None and job.model.offload.off_reason is None


def test_dropped_numbers_are_drawn_again(groups: ParallelGroups) -> None:
    job = build_job(config_with(MODES["2 buffers"], dropout=0.1), groups, VOCAB)
    compared(job, run(job, packs(groups)), without(0.1, transformer_engine=False))


@pytest.mark.shows("no host sync", "offload", of=lambda: (1, MODEL))
@pytest.mark.parametrize("mode", ["1 buffer", "4 buffers", "all parts"])
def test_eager_steps_wait_for_nothing(mode: str, groups: ParallelGroups) -> None:
    job = build_job(config_with(MODES[mode], deterministic=False), groups, VOCAB)
    found = waiting(job.step, steps_of(groups, 1, overflow=False)[:6])
    assert_no_wait(found)
    # These are copies of offloaded tensors and one copy of metrics for each step.
    assert found["to_host"] > 6 * PACKS, found


@pytest.mark.shows(lambda impl: f"graphs: {impl}", "offload", of=lambda: (1, MODEL))
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("mode", ["1 buffer", "2 buffers", "two layers", "all parts", "groups"])
def test_replayed_steps_are_those_without_and_wait_for_nothing(
    impl: str, mode: str, groups: ParallelGroups
) -> None:
    if impl == "local" and mode == "groups":
        pytest.skip("groups of layers are refused with graphs of layers")
    found = replayed(with_graphs(config_with(MODES[mode]), impl), groups, run)
    assert found["to_host"] > 6 * PACKS, found


@needs_transformer_engine
@pytest.mark.shows("offload", "TE layers", of=lambda: (1, MODEL))
@pytest.mark.parametrize("mode", ["1 buffer", "groups", "all parts", "beside recomputation"])
def test_steps_of_transformer_engines_layers_are_those_without(
    mode: str, groups: ParallelGroups
) -> None:
    """With TransformerEngine's layers, losses, gradient norms, weights and moments equal those of
    steps without offload.

    Offload includes the tensors that TransformerEngine's modules save and free in their backward
    pass.
    """
    job = build_job(config_with(MODES[mode], transformer_engine=True), groups, VOCAB)
    compared(job, run(job, packs(groups)), without(0.0, transformer_engine=True))
    offload = job.model.offload
    assert offload is not None and offload.figures is not None and offload.figures.moved_mib > 0


@needs_transformer_engine
@pytest.mark.parametrize(
    ("impl", "mode"), [("local", "2 buffers"), ("full_iteration", "all parts")]
)
def test_replayed_steps_of_transformer_engines_layers(
    impl: str, mode: str, groups: ParallelGroups
) -> None:
    config = with_graphs(config_with(MODES[mode], transformer_engine=True), impl)
    assert replayed(config, groups, run, transformer_engine=True)["to_host"] > 6 * PACKS


def test_a_layer_that_runs_eagerly_among_replayed_ones(
    groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of an eager layer's input must finish before a graph reuses the memory."""
    monkeypatch.setattr(offload_module, "streams_of", lambda device: DelayedStreams("copy"))
    config = with_graphs(config_with(MODES["2 buffers"]), "local")
    with captured(config, groups) as (job, graphs):
        job.model.layers[2].eval()  # an MLP layer, which computes the same in both modes
        compared(job, run(job, packs(groups)), without(0.0, transformer_engine=False))
        assert graphs.counters.module_fallbacks.total() > PACKS


@pytest.mark.parametrize("impl", IMPLS)
def test_captures_that_fail_leave_nothing_of_themselves(
    impl: str, groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture fails in the middle of copies; later steps must not wait for these copies."""
    forward = MLP.forward

    def asking(self: MLP, *args: Any) -> Tensor:
        result = forward(self, *args)
        if torch.cuda.is_current_stream_capturing():
            result.sum().item()
        return result

    monkeypatch.setattr(MLP, "forward", asking)
    # Not from the cache: a replaced `forward` has kernels without the residual, and their bits.
    expected = without.__wrapped__(0.0, transformer_engine=False)
    config = with_graphs(config_with(MODES["2 buffers"]), impl)
    with captured(config, groups, all_of_it=False) as (job, graphs):
        compared(job, run(job, packs(groups)), expected)
        assert job.model.offload is not None and not job.model.offload._with_sources
        assert (graphs.counters.replays > 0) == (impl == "local")


# Memory.


@pytest.mark.parametrize("buffers", [1, 2, 4])
def test_memory_falls_by_the_inputs_that_are_away(
    buffers: int, groups: ParallelGroups, monkeypatch: Any
) -> None:
    """Between the passes, the device holds one layer input per buffer instead of all inputs."""
    monkeypatch.setenv(FORCE, str(buffers))
    whole = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    kept, peak = kept_and_peak(MemoryConfig(**whole), groups)
    left, lower = kept_and_peak(inputs(offload_buffers=max(buffers, 2)), groups)
    hidden = TOKENS * HIDDEN * torch.bfloat16.itemsize
    print(
        f"{buffers} buffers: {(kept - left) / hidden:.2f} of {len(PATTERN)} inputs less between the passes, "
        f"{(peak - lower) / hidden:.2f} at the peak"
    )
    assert kept - left == (len(PATTERN) - buffers) * hidden
    # The peak is at the earliest in the backward pass of the last attention layer. Inputs of later
    # layers are freed by then in any case.
    at_worst = range(PATTERN.rindex("*") - buffers, len(PATTERN) + 1)
    # The difference is rounded, because the offloader also allocates small tensors.
    assert round((peak - lower) / hidden) in at_worst


@pytest.mark.parametrize(
    "modules",
    [
        ("mamba_scan",),
        ("gdn_scan",),
        ("mlp_act", "mlp_fc2"),
        ("expert_fc1", "moe_act", "expert_fc2"),
    ],
)
def test_memory_falls_with_parts_of_layers(
    modules: tuple[str, ...], groups: ParallelGroups, monkeypatch: Any
) -> None:
    monkeypatch.setenv(FORCE, "1")
    plain, left = (kept_and_peak(memory, groups) for memory in (MemoryConfig(), parts(*modules)))
    config = config_of(LARGE, TOKENS, deterministic=False)
    assert left[0] < plain[0] - (PATTERN.count("M") - 1) * TOKENS * config.model.hidden_size * 2
    assert left[1] < plain[1]


@pytest.mark.parametrize("impl", IMPLS)
def test_graphs_hold_less_by_the_inputs_that_are_away(impl: str, groups: ParallelGroups) -> None:
    """The device holds the first input, those in transfer and those in two buffers."""
    whole = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    held = []
    for memory in (MemoryConfig(**whole), inputs()):
        config = config_of(LARGE, TOKENS, deterministic=False)
        config = with_graphs(dataclasses.replace(config, memory=memory), impl)
        job = build_job(config, groups, VOCAB)
        graphs = build_graphs(
            config, job, CaptureSizes.from_capacities([16], TOKENS), groups, print
        )
        assert graphs is not None
        with released(graphs):
            capture_graphs(graphs, job.step, PACKS, groups, first=True)
            assert not graphs.refusals
            held.append(graphs.counters.memory_mib)
        if job.model.offload is not None:
            job.model.offload.close()
        del job, graphs
        gc.collect()
        torch.cuda.empty_cache()
    hidden = TOKENS * HIDDEN * torch.bfloat16.itemsize / 2**20
    print(
        f"{impl}: graphs hold {held[0]:,.0f} MiB with recomputation and {held[1]:,.0f} with offload: "
        f"{(held[0] - held[1]) / hidden:.1f} of {len(PATTERN)} inputs less"
    )
    assert held[0] - held[1] >= (len(PATTERN) - 5) * hidden


# Streams and errors of the offloader without a training job.

LAYERS, D = 8, 1024
CYCLES = 2_000_000
"""GPU cycles of a delay of about 1 ms, far longer than a layer or a copy."""


class DelayedStreams(CudaStreams):
    """Streams with long empty kernels in front of their work.

    Args:
        where: ``copy`` delays each copy; ``main`` delays each event of the main stream that copies
            wait for.
        fail: errors of allocations, by kind (``empty``, ``host``) and number (from 0).
    """

    def __init__(
        self, where: str = "", fail: dict[tuple[str, int], Exception] | None = None
    ) -> None:
        super().__init__(DEVICE)
        self.where, self.fail, self.count = where, fail or {}, {"empty": 0, "host": 0}

    def copy(self, target: Tensor, source: Tensor) -> None:
        if "copy" in self.where:
            torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
        super().copy(target, source)

    def record_event(self) -> torch.cuda.Event:
        if "main" in self.where and torch.cuda.current_stream(DEVICE) not in (
            self._offload,
            self._prefetch,
        ):
            torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
        return super().record_event()

    def empty(self, *args: Any) -> Tensor:
        self._allocate("empty")
        return super().empty(*args)

    def pinned(self, num_bytes: int) -> Tensor:
        self._allocate("host")
        return super().pinned(num_bytes)

    def _allocate(self, kind: str) -> None:
        number = self.count[kind]
        self.count[kind] += 1
        if (kind, number) in self.fail:
            raise self.fail[kind, number]


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(D, D, device=DEVICE) for _ in range(LAYERS))


def gradients(model: nn.ModuleList, offload: Offload | None, steps: int = 4) -> list[Tensor]:
    """Return gradients summed over steps of different sizes with two micro-batches in flight.

    Between layers, memory is allocated and filled with NaN.
    """
    model.zero_grad()

    def forward(x_TD: Tensor) -> Tensor:
        for layer in model:

            def run(x: Tensor, layer: nn.Module = layer) -> Tensor:
                return x + torch.tanh(layer(x))

            x_TD = run(x_TD) if offload is None else checkpoint(run, x_TD, save=offload.save)
            torch.empty(2**22, device=DEVICE).fill_(float("nan"))
        return x_TD.square().mean()

    for step in range(steps):
        generator = torch.Generator(DEVICE).manual_seed(step)
        rows = 1024 * (1 + step % 3)
        first, second = (
            forward(torch.randn(rows, D, device=DEVICE, generator=generator)) for _ in range(2)
        )
        second.backward()
        first.backward()
        if offload is not None:
            offload.join()
            offload.end_step()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize("stream", ["default", "another"])
@pytest.mark.parametrize("where", ["", "copy", "main", "copy and main"])
@pytest.mark.parametrize("buffers", [1, 2, 4])
def test_late_streams_change_no_bit(buffers: int, where: str, stream: str) -> None:
    model = layers()
    expected = gradients(model, None)
    offload = Offload(
        DEVICE, max_buffers=buffers, headroom_mib=0, min_elements=1, streams=DelayedStreams(where)
    )
    own = torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]
    own.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(own if stream == "another" else torch.cuda.current_stream(DEVICE)):
        found = gradients(model, offload)
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected))
    assert offload.buffer_count.now == buffers and offload.off_reason is None


@pytest.mark.parametrize("kind", ["empty", "host"])
def test_memory_that_runs_out_anywhere_changes_no_bit(kind: str) -> None:
    model = layers()
    expected = gradients(model, None)
    make = partial(Offload, DEVICE, headroom_mib=0, min_elements=1)
    counting = DelayedStreams()
    gradients(model, make(streams=counting))
    total = counting.count[kind]
    assert total > LAYERS
    for number in range(0, total, max(total // 12, 1)):
        streams = DelayedStreams(
            fail={(kind, number): torch.OutOfMemoryError("CUDA out of memory, injected")}
        )
        assert all(map(torch.equal, gradients(model, make(streams=streams)), expected)), number
    other = DelayedStreams(fail={(kind, total // 2): RuntimeError("of another kind")})
    with pytest.raises(RuntimeError, match="of another kind"):
        gradients(model, make(streams=other))


def test_everything_is_given_back() -> None:
    def held() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    model = layers()
    # A layer's second run is in autograd's thread, whose matrix products then keep a workspace.
    gradients(model, Offload(DEVICE, forced_buffers=0))
    model.zero_grad()
    before = held()
    offload = Offload(DEVICE, headroom_mib=0, min_elements=1)
    for _ in range(2):  # the second time after a reset
        gradients(model, offload)
        model.zero_grad()
        assert offload.pool.num_bytes >= 2 * LAYERS * 1024 * D * 4
        offload.reset()
        assert held() == before and offload.pool.num_bytes == 0
    offload.close()
    gradients(model, offload)
    model.zero_grad()
    assert held() == before and offload.pool.num_bytes == 0


def with_little_memory(groups: ParallelGroups) -> list[str]:
    """Run steps over the inputs of 24 layers, 64 MiB each, in memory for 14 inputs.

    One step runs without offload and three with it.
    """
    model, rows = layers(), 16 * 1024
    size, total = rows * D * 4, torch.cuda.get_device_properties(DEVICE).total_memory
    limit = torch.cuda.memory_reserved(DEVICE) + 14 * size  # one layer needs 6 or 7
    torch.cuda.set_per_process_memory_fraction(limit / total, DEVICE)

    def step(offload: Offload) -> str:
        x_TD = torch.ones(rows, D, device=DEVICE)
        try:
            for layer in [*model, *model, *model]:
                x_TD = checkpoint(
                    lambda x, layer=layer: x + torch.tanh(layer(x)), x_TD, save=offload.save
                )
            x_TD.mean().backward()
        except torch.OutOfMemoryError:
            return "does not fit"
        offload.join()
        offload.end_step()
        return "fits"

    without = step(Offload(DEVICE, forced_buffers=0))
    gc.collect()
    offload = Offload(DEVICE, headroom_mib=0)
    return [without, *(step(offload) for _ in range(3))]


def test_what_does_not_fit_on_the_device_fits_with_the_host() -> None:
    """Steps run out of memory without offload and complete with offload.

    A separate process runs the steps, so that its GPU memory contains nothing else.
    """
    (found,) = run_distributed(with_little_memory, 1, backend="nccl", timeout=120)
    assert found == ["does not fit", "fits", "fits", "fits"]
