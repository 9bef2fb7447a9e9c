"""Hybrid model with modes of recomputation and offload, and the bytes that it saves."""

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.models.hybrid_model import HybridModel
from support import hybrid_cases as cases

PATTERN = "M*-EG*E"
DOCUMENTS = cases.make_documents(cases.AWKWARD)
TAIL = 3
T = sum(map(len, (tokens for tokens, _ in DOCUMENTS))) + TAIL
D, BYTES = 32, 4
HIDDEN = T * D * BYTES
DROPOUT = "bfloat16 with dropout, tied"
VARIANTS = {
    "float32": {},
    "gate and norms": cases.VARIANTS["gate, one norm for all heads, norms of outputs"],
    DROPOUT: {
        "dtype": torch.bfloat16,
        "hidden_dropout": 0.2,
        "untie_embeddings_and_output_weights": False,
    },
    "depths": {"hybrid_layer_pattern": f"{PATTERN}/*E/*E"},
}
"""Models in which the modes are tested, as changes of `model_of`."""


def full(method, number):
    return MemoryConfig(
        recompute_granularity="full", recompute_method=method, recompute_num_layers=number
    )


def model_of(memory=None, *, dtype=torch.float32, **changes):
    changes = {
        "moe_aux_loss_coeff": 1e-2,
        "moe_z_loss_coeff": 1e-3,
        "moe_shared_expert_intermediate_size": 24,
        "moe_shared_expert_gate": True,
        "moe_latent_size": 20,
        "num_experts": 6,
        "moe_router_num_groups": 3,
        "moe_router_group_topk": 2,
        "residual_multiplier": 0.7,
        "position_embedding_type": "rope",
        **changes,
    }
    config = cases.tiny_config(PATTERN, **changes)
    return HybridModel(
        config, vocab_size=cases.VOCAB, max_positions=256, dtype=dtype, seed=7, memory=memory
    ).train()


def train(memory, **changes):
    """Run two micro-batches with an evaluation between them.

    Returns:
        All gradients, the state of the random generator, and all outputs.
    """
    model = model_of(memory, **changes)
    buffers, outputs = FlatBuffers(model), []
    torch.manual_seed(3)
    for number in range(2):
        pack = cases.make_pack(DOCUMENTS[number:], tail=TAIL, aux_scale=0.5)
        outputs.append(model(pack))
        with torch.no_grad():
            model.eval()(pack)
            model.train()
        outputs[-1].loss.backward()
    return [
        buffers.grads,
        torch.get_rng_state(),
        *(tensor.detach() for output in outputs for tensor in output),
    ]


def bytes_saved(model, run):
    """Return the bytes of floating-point storages that ``run`` saves, without parameters and
    tables.
    """
    apart = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    found, held = {}, []

    def note(tensor):
        held.append(tensor)  # keeps the tensor alive, so that no address is used twice
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in apart and tensor.is_floating_point():
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        result = run()
    del result
    return sum(found.values())
