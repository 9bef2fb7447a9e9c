"""Models with graphs over their layers, and packs for them."""

import gc
import os
from functools import lru_cache

# The libraries read these at import or first use. They fix the order of sums and the tuned kernels.
os.environ.setdefault("MAMBA_DETERMINISTIC", "1")
os.environ.setdefault("CAUSAL_CONV1D_DETERMINISTIC", "1")
os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
import torch

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.cuda_graphs.capture_and_pool import CudaGraphBackend
from megatron_packed.cuda_graphs.layer_graphs import LayerGraphs
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from support.gpu_capture import poison_pool

DEVICE, DTYPE = torch.device("cuda", 0), torch.bfloat16
T, HIDDEN, VOCAB = 1024, 256, 512
CAPTURE_SIZES = CaptureSizes.from_capacities([8, 64, T], T)
SCALES = (1e-3, 0.5, 1e-3, 1e-3)
RESULTS = (
    "loss",
    "loss_sum",
    "aux_loss",
    "per_token_loss",
    "tokens_per_expert",
    "dropped",
    "overflow",
    "expert_rows",
    "depth_loss_sums",
    "hidden_gradient",
)


def hybrid(pattern, backends, hidden=HIDDEN, tokens=T):
    experts = {
        "num_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 256,
        "moe_shared_expert_intermediate_size": 256,
        "moe_shared_expert_gate": True,
        "moe_latent_size": 128,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_aux_loss_coeff": 1e-2,
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
    }
    config = ModelConfig(
        hybrid_layer_pattern=pattern,
        hidden_size=hidden,
        num_attention_heads=hidden // 64,
        num_query_groups=2,
        kv_channels=64,
        ffn_hidden_size=2 * hidden,
        squared_relu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        position_embedding_type="rope",
        mamba_num_heads=hidden // 32,
        mamba_head_dim=64,
        mamba_state_dim=64,
        mamba_num_groups=2,
        linear_num_key_heads=hidden // 64,
        linear_num_value_heads=hidden // 32,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        init_method_std=0.05,
        **(experts if "E" in pattern else {}),
    )
    return HybridModel(
        config,
        vocab_size=VOCAB,
        max_positions=tokens,
        device=DEVICE,
        dtype=DTYPE,
        seed=7,
        backends=backends,
    ).train()


def documents(lengths, seed=0):
    random = np.random.default_rng(seed)
    return [(random.integers(0, VOCAB, length), None) for length in lengths]


def pack(lengths, seed=0, capture_sizes=CAPTURE_SIZES, tokens=T):
    """Return a pinned micro-batch of the smallest capture size that fits.

    If no capture size fits, the micro-batch has exactly its own size.
    """
    capture_size = capture_sizes.smallest_for(len(lengths), max([*lengths, tokens - sum(lengths)]))
    size = (
        {}
        if capture_size is None
        else {"capacity": capture_size.capacity, "max_seqlen": capture_size.max_seqlen}
    )
    return pinned(MicroBatch.build(documents(lengths, seed), tokens, scales=SCALES, **size))


def pinned(micro_batch):
    return micro_batch.pin_memory() if DEVICE.type == "cuda" else micro_batch


def full(capture_size, tokens=T):
    """Return a pack with as many equal documents as the capture size permits."""
    count = min(capture_size.capacity, tokens)
    return MicroBatch.build(
        documents([tokens // count] * count),
        tokens,
        capture_size.capacity,
        SCALES,
        capture_size.max_seqlen,
    )


def packings(count, seed=0):
    """Return lengths of packs in random order.

    Among them are one document, documents of one token, full capture sizes, packs with a tail, and
    random packs.
    """
    random = np.random.default_rng(seed)
    lists = [
        [T],
        [1] * T,
        [1] * 64,
        [16] * 64,
        [128] * 8,
        [T - 1],
        [1],
        [127, 128, 129, 1, 2, 3],
        [500, 24, 500],
    ]
    while len(lists) < count:
        lengths, left, mean = (
            [],
            int(random.integers(1, T + 1)),
            float(random.choice([3, 20, 150, 600])),
        )
        while left > 0 and len(lengths) < CAPTURE_SIZES.largest:
            lengths.append(min(left, 1 + int(random.exponential(mean))))
            left -= lengths[-1]
        lists.append(lengths)
    return [lists[number] for number in random.permutation(count)]


def new_backend():
    backend = CudaGraphBackend(DEVICE)
    backend.stream = _stream()
    return backend


@lru_cache
def _stream():
    """Return one stream for all backends.

    cuBLAS keeps a workspace for every stream, which would look like a memory leak.
    """
    return torch.cuda.Stream(DEVICE)


class Job:
    """Model with graphs over all its layers, which can also run eagerly."""

    def __init__(self, pattern, backends, capture_sizes=CAPTURE_SIZES, hidden=HIDDEN, tokens=T):
        self.model, self.capture_sizes, self.tokens = (
            hybrid(pattern, backends, hidden, tokens),
            capture_sizes,
            tokens,
        )
        self.buffers = FlatBuffers(self.model)
        self.said, self.runner = [], None
        self.hidden_gradient = None
        self.model.embedding.register_forward_hook(self._watch)

    def _watch(self, module, inputs, output):
        if output.requires_grad:
            output.register_hook(lambda grad: setattr(self, "hidden_gradient", grad))

    def capture(self, **options):
        layers = {f"layers.{number}": layer for number, layer in enumerate(self.model.layers)}
        self.runner = LayerGraphs(
            layers,
            self.drive,
            total_tokens=self.tokens,
            capture_sizes=self.capture_sizes,
            device=DEVICE,
            tables=self.model.pack_tables.derive,
            check=self.model.pack_tables.check,
            backend=new_backend(),
            say=self.said.append,
            **options,
        )
        self.runner.capture(lambda size: full(size, self.tokens))
        refused = [line for line in self.said if "not captured" in line]
        assert not refused, refused
        return self

    def drive(self, micro_batch):
        return self.model.forward_backward(micro_batch)

    def eager(self, micro_batch):
        if self.runner is not None:
            self.runner.slot.vacate()
        return self._results(micro_batch.to(DEVICE))

    def replay(self, micro_batch):
        replays = self.runner.counters.replays
        results = self._results(self.runner.place(micro_batch))
        assert (
            self.runner.counters.replays == replays + 1
            and not self.runner.counters.module_fallbacks
        )
        return results

    def _results(self, micro_batch):
        """Return copies of the micro-batch's results and of all parameter gradients, by name."""
        self.buffers.zero_grad()
        output = self.drive(micro_batch)
        values = dict(zip(RESULTS, (*output, self.hidden_gradient), strict=True))
        values |= {name: parameter.main_grad for name, parameter in self.buffers.parameters.items()}
        return {name: value.detach().clone() for name, value in values.items()}

    def poison_statics(self):
        """Fill every static input, output and gradient of every graph with NaN."""
        with torch.no_grad():
            for slot, graphs in self.runner.graphs.items():
                for one in (
                    one for module in self.runner.modules for one in module.in_slot(slot).values()
                ):
                    for tensor in (one.input, *one.outputs, *one.grad_outputs, one.grad_input):
                        assert tensor.is_floating_point()
                        tensor.fill_(float("nan"))
                for tensor in graphs.outside.values():
                    tensor.fill_(float("nan"))

    def poison_pool(self):
        return poison_pool(self.runner.backend.pool)


def different(found, wanted):
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


def released():
    """Return the bytes allocated and reserved after all unused memory is freed."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
