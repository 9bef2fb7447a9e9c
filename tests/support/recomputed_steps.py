"""Steps with recomputation and offload, and the eager steps that they must equal."""

import dataclasses
from copy import copy

from megatron_packed.config.sections.memory import OFFLOADED_IN, MemoryConfig
from megatron_packed.training.build_graphs import build_graphs, capture_graphs
from megatron_packed.training.build_job import build_job
from support.step_jobs import CAPTURE_SIZES, GROUPS, config_of, micro_batch, state_hash
from support.te_stand_in import stand_in

VOCAB = 211
STEPS = [[[48], [20, 9, 3]], [[5] * 5], [[], [1] * 9, [30, 2]]]
LAYERS = MemoryConfig(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
GROUPS_OF_3 = MemoryConfig(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=3
)
PARTS = MemoryConfig(
    recompute_granularity="selective",
    recompute_modules=("core_attn", "mamba", "mlp", "moe", "layernorm"),
)
MOVED = {"offload_buffers": 2, "min_offloaded_tensor_size": 1}
INPUTS = dataclasses.replace(GROUPS_OF_3, offload_layer_inputs=True, **MOVED)
EACH_INPUT = dataclasses.replace(LAYERS, offload_layer_inputs=True, **MOVED)
TRAVELLERS = MemoryConfig(
    fine_grained_activation_offloading=True,
    offload_modules=tuple(part for part in OFFLOADED_IN if not part.startswith("gdn_")),
    **MOVED,
)
"""Options that offload the tensors saved by every part of the layers ``M``, ``*``, ``-`` and ``E``."""


def captured_by(impl):
    """Return a configuration with this capture, even if a CPU refuses the capture."""
    config = config_of(cuda_graph_impl="local")
    object.__setattr__(config.cuda_graph, "cuda_graph_impl", impl)
    return config


class Run:
    """Training job, captured if ``backend`` is given."""

    def __init__(self, config, memory, backend=None):
        self.config = copy(config)
        object.__setattr__(self.config, "memory", memory)
        self.job, self.backend = build_job(self.config, GROUPS, VOCAB), backend
        self.graphs = None
        if backend is not None:
            made_by = stand_in()[0] if self.config.cuda_graph.uses_transformer_engine else None
            self.graphs = build_graphs(
                self.config, self.job, CAPTURE_SIZES, GROUPS, lambda line: None, backend, made_by
            )
            self.job.step.graphs = self.graphs
            capture_graphs(self.graphs, self.job.step, 3, GROUPS, first=True)

    def step(self, number):
        if self.backend is not None:
            self.backend.scramble()
        batches = [micro_batch(lengths, seed) for seed, lengths in enumerate(STEPS[number])]
        return self.job.step(batches, 1e-2 / (1 + number)).clone()


def eager_steps():
    """Return metrics and state hash of every step without recomputation, offload and graphs."""
    run = Run(config_of(cuda_graph_impl="none"), MemoryConfig())
    return [(run.step(number), state_hash(run.job)) for number in range(len(STEPS))]
