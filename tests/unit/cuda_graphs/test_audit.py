"""Audits of graphs of layers: which faults they detect, and that they change nothing."""

import hashlib

import pytest
import torch

from megatron_packed.cuda_graphs.audit import AuditMismatchError, _relative, _run_replayed
from megatron_packed.cuda_graphs.slots import Slot
from megatron_packed.packed.capture_sizes import CaptureSize
from support.tiny_graph_jobs import CAPTURE_SIZES, Job, T, pack, tiny_model

BEFORE, NOW = [9, 22, 30], [17, 25, 5, 12]
"""Document lengths of the pack that was replayed before, and of the pack that is audited.

The audited pack has a tail. Both packs have the same capture size.
"""


@pytest.fixture
def job():
    job = Job(tiny_model("M*-E", moe_z_loss_coeff=0.01), graphs=True).capture()
    job.step(pack(BEFORE))
    return job


def audited(job):
    return job.runner.audit(pack(NOW), deterministic=True)


def state_hash(job):
    digest = hashlib.sha256()
    tensors = [
        *job.model.state_dict().values(),
        *job.model.buffers(),
        job.buffers.storage,
        torch.get_rng_state(),
    ]
    for tensor in tensors:
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest(), dict(job.runner.counters.fallbacks), job.runner.counters.replays


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_sound_replay_passes_and_nothing_of_the_training_is_touched(job, deterministic):
    before = state_hash(job)
    for number, lengths in enumerate(([T], NOW, [1] * 12, [5] * 12, [1] * T, [60])):
        found = job.runner.audit(pack(lengths), deterministic=deterministic, seed=number)
        assert found.compared == 4 and found.largest_difference == 0
    assert state_hash(job) == before
    wanted = Job(tiny_model("M*-E", moe_z_loss_coeff=0.01)).step(pack(NOW))
    assert all(torch.equal(a, b) for a, b in zip(job.step(pack(NOW)), wanted, strict=True))


def test_generators_stay_where_they_were(job, monkeypatch):
    """An audit restores the random state, which cuDNN's attention advances even without dropout."""
    for module in job.runner.modules:
        monkeypatch.setattr(
            module,
            "original_forward",
            lambda *args, true=module.original_forward: (torch.rand(1), true(*args))[1],
        )
    before = state_hash(job)
    audited(job)
    assert state_hash(job) == before


def test_a_micro_batch_that_would_not_replay_is_not_audited(job):
    assert job.runner.audit(pack(NOW, capacity=7), deterministic=True) is None


def after_fill(monkeypatch, change):
    """Patch `Slot.fill` to call ``change(packed, before)``, which corrupts the slot after the fill."""
    true = Slot.fill

    def fill(self, micro_batch, size):
        before = {name: view.clone() for name, view in vars_of(self, size).items()}
        placed = true(self, micro_batch, size)
        change(placed.packed, before)
        return placed

    def vars_of(slot, size):
        static = slot.static(size)
        return {
            name: getattr(static, name)
            for name in ("seq_idx", "cu_seqlens", "valid", "position_ids")
        }

    monkeypatch.setattr(Slot, "fill", fill)


FAULTS = {
    "stale seq_idx": (
        lambda packed, before: packed.seq_idx.copy_(torch.zeros_like(packed.seq_idx)),
        "layers.0",
    ),
    "a boundary off by one": (lambda packed, before: packed.cu_seqlens[1].add_(1), "layers.1"),
    "unfilled tail": (lambda packed, before: packed.valid.fill_(True), r"layers\.[13]"),
    "positions not set back": (
        lambda packed, before: packed.position_ids.copy_(
            torch.arange(T, dtype=torch.int32) * 3 % T
        ),
        "layers.1",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_spoilt_metadata_is_found_and_the_module_named(job, monkeypatch, fault):
    change, module = FAULTS[fault]
    after_fill(monkeypatch, change)
    with pytest.raises(AuditMismatchError, match=rf"replay of {module} .*differ by"):
        audited(job)


def test_the_audit_detects_an_unfilled_slot_that_holds_the_same_pack(job, monkeypatch):
    job.step(pack(NOW))
    after_fill(monkeypatch, lambda packed, before: packed.valid.copy_(before["valid"]))
    with pytest.raises(AuditMismatchError):
        audited(job)


def test_what_a_graph_leaves_unwritten_is_not_what_it_wrote_before(job, monkeypatch):
    module = job.runner.modules[2]
    captured = module.captured[CaptureSize(4, T)]
    hidden, grads = (
        torch.ones_like(captured.input),
        [torch.ones_like(one) for one in captured.grad_outputs],
    )
    assert _run_replayed(module, captured, hidden, grads).input_gradient.isfinite().all()
    for graph in (captured._forward, captured._backward):
        monkeypatch.setattr(graph, "replay", lambda: None)
    found = _run_replayed(module, captured, hidden, grads)
    assert found.outputs[0].isnan().all() and found.input_gradient.isnan().all()
    assert (
        _relative(found.outputs[0], hidden) == _relative(hidden, found.outputs[0]) == float("inf")
    )


def test_tables_that_were_not_refreshed_are_found(job, monkeypatch):
    monkeypatch.setattr(
        job.runner.graphs[job.runner.slot].tables[CaptureSize(4, T)], "replay", lambda: None
    )
    with pytest.raises(AuditMismatchError, match=r"replay of layers\.[13] "):
        audited(job)


def test_graphs_that_read_another_slot_are_found(monkeypatch):
    other = Slot(T, CAPTURE_SIZES.largest, "cpu")
    other.fill(pack(BEFORE), CaptureSize(4, T))
    true = Slot.static

    monkeypatch.setattr(Slot, "static", lambda self, size: true(other, size))
    job = Job(tiny_model("M"), graphs=True).capture()
    with pytest.raises(AuditMismatchError, match=r"replay of layers\.0"):
        audited(job)


def test_a_leak_that_eager_has_too_is_found(monkeypatch):
    """The audit detects a leak between documents that replay and eager pass have in common.

    Both compute the same wrong values. Only a change of the other documents shows the leak.
    """
    model = tiny_model("-")
    true = model.layers[0].mixer.forward
    monkeypatch.setattr(
        model.layers[0].mixer, "forward", lambda x, packed: true(x + x.sum(0) * 1e-2, packed)
    )
    job = Job(model, graphs=True).capture()
    with pytest.raises(
        AuditMismatchError,
        match=r"layers\.0, document 2 depends on other documents: its outputs changed",
    ):
        audited(job)


def test_a_gradient_that_is_lost_is_found(job, monkeypatch):
    captured = job.runner.modules[2].captured[CaptureSize(4, T)]
    true = captured._backward.replay
    weight = job.model.layers[2].mixer.fc1.weight

    def replay():
        true()
        weight.main_grad[0].zero_()

    monkeypatch.setattr(captured._backward, "replay", replay)
    with pytest.raises(
        AuditMismatchError, match=r"layers\.2 .*gradients of mixer\.fc1\.weight differ"
    ):
        audited(job)
    with pytest.raises(AuditMismatchError):
        job.runner.audit(pack(NOW), deterministic=False)
