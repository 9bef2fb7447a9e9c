"""The model that a configuration builds."""

import dataclasses

import pytest
import torch

from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.distributed.overlapped_collectives import OverlappedGather
from megatron_packed.distributed.zero1_layout import Ownership
from megatron_packed.models import run_model
from megatron_packed.models.run_model import build_model
from megatron_packed.training import build_job
from support.step_jobs import VOCAB, config_of, job_of


@pytest.mark.parametrize(
    ("balancing", "samples", "shape"),
    [("seq_aux_loss", 3, (3, 16)), ("seq_aux_loss", 1, None), ("aux_loss", 3, None)],
)
def test_samples_of_a_pack_are_those_of_the_packing(balancing, samples, shape):
    config = config_of()
    model = dataclasses.replace(config.model, moe_router_load_balancing_type=balancing)
    packing = PackingConfig(seq_length=16, micro_batch_size=samples, global_batch_size=samples)
    built = build_model(dataclasses.replace(config, model=model, packing=packing), VOCAB, "cpu")
    assert built.pack_tables.sample_shape == shape


DEFAULTS = {
    "sequence_parallel": False,
    "cp_comm_type": "a2a",
    "mamba_cp_comm_type": "state",
    "linear_cp_mode": "chunkwise",
    "cp_comm_overlap_parts": 1,
}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"context_parallel_size": 2, "cp_comm_type": "p2p"},
        {"context_parallel_size": 2, "mamba_cp_comm_type": "heads"},
        {"context_parallel_size": 2, "linear_cp_mode": "headwise"},
        {"context_parallel_size": 2, "cp_comm_overlap_parts": 3},
    ],
    ids=lambda given: " ".join(given),
)
def test_options_of_the_layout_reach_the_model(given, monkeypatch):
    """The results of a step show none of them: they change memory and messages only."""

    class Built(Exception):
        """The model would be built now."""

    def built(config, **options):
        raise Built(options)

    monkeypatch.setattr(run_model, "HybridModel", built)
    config = dataclasses.replace(
        config_of(cuda_graph_impl="none"), parallel=ParallelConfig(**given)
    )
    with pytest.raises(Built) as raised:
        build_model(config, VOCAB, "cpu")
    (options,) = raised.value.args
    assert {name: options[name] for name in DEFAULTS} == {
        name: given.get(name, default) for name, default in DEFAULTS.items()
    }


@pytest.mark.parametrize(("given", "covered"), [(None, 16), (40, 40)])
def test_rotary_tables_cover_the_positions_of_the_option(given, covered):
    config = config_of()
    model = dataclasses.replace(
        config.model, position_embedding_type="rope", max_position_embeddings=given
    )
    packing = PackingConfig(seq_length=16, global_batch_size=3)
    built = dataclasses.replace(config, model=model, packing=packing)
    assert built.max_positions == covered


@pytest.mark.parametrize("overlap", [False, True])
def test_options_of_collectives_reach_the_job(overlap, monkeypatch):
    """The results of a step do not show when collectives run, and in which buckets. They do not
    show either which rank owns an element.
    """
    chosen = []

    class Choice:
        def over(groups):
            chosen.append(True)
            return Ownership.over(groups)

        def undivided(groups):
            chosen.append(False)
            return Ownership.undivided(groups)

    monkeypatch.setattr(build_job, "Ownership", Choice)
    parallel = ParallelConfig(
        use_distributed_optimizer=overlap,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        ddp_bucket_size=1000 if overlap else 40_000_000,
    )
    job = job_of(dataclasses.replace(config_of(cuda_graph_impl="none"), parallel=parallel))
    assert chosen == [overlap]
    assert isinstance(job.buffers.gather, OverlappedGather) == overlap
    assert (job.step.overlapped is not None) == overlap
    assert (len(job.buffers.layout.buckets) > len(job.buffers.layout.parts)) == overlap


@pytest.mark.parametrize(
    ("name", "has_gpu", "device"),
    [
        ("auto", True, "cuda"),
        ("auto", False, "cpu"),
        ("cpu", True, "cpu"),
        ("cuda", True, "cuda"),
        ("cuda", False, None),
    ],
)
def test_device_is_that_of_the_option(name, has_gpu, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    config = config_of(cuda_graph_impl="none")
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, device=name))
    if device is None:
        with pytest.raises(ValueError, match="--device cuda: torch sees no GPU here"):
            run_model.device_of(config)
    else:
        assert run_model.device_of(config) == torch.device(device)
