"""Random configurations of small hybrid models, and random packings of awkward documents."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_packed.packed.micro_batch import Document, MicroBatch

SHORT = (1, 1, 2, 3, 4)
"""Lengths up to the width of the convolution."""
EDGES = (15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200, 257)
"""Lengths at the borders of chunks and tiles."""
MOST_TOKENS = 640


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and one pack."""

    model: dict[str, Any]
    """Arguments of `ModelConfig`."""
    vocab: int
    lengths: list[int]
    tail: int
    """Number of slots after the last document."""
    spare: int
    """Capacity in documents beyond those of the pack."""
    alignment: int
    longest: int | None
    """Upper bound of the longest row; None for the exact value."""
    main_grad: bool
    """True gives every parameter a float32 buffer for its gradient, as in training."""

    @property
    def slots(self) -> int:
        """Number of slots of the pack."""
        return used_slots(self.lengths, self.alignment) + self.tail

    def batch(self, seed: int, changed: int | None = None, aux_scale: float = 1.0) -> MicroBatch:
        """Return the pack; ``changed`` is a document that gets other tokens."""
        rng = np.random.default_rng(seed)
        documents = []
        for number, length in enumerate(self.lengths):
            tokens = rng.integers(0, self.vocab, length)
            mask = rng.random(length) < 0.8
            mask[-1] = True
            if number == changed:
                tokens = (tokens + 1 + self.vocab // 3) % self.vocab
            documents.append(Document(tokens, mask))
        targets = sum(int(document.target_mask[1:].sum()) for document in documents)
        return MicroBatch.build(
            documents,
            self.slots,
            len(documents) + self.spare,
            scales=(1 / max(targets, 1), aux_scale),
            max_seqlen=self.longest,
            alignment=self.alignment,
        )


def used_slots(lengths: list[int], alignment: int) -> int:
    """Return the number of slots of documents that begin at multiples of ``alignment``."""
    return sum(length + -length % alignment for length in lengths)


def draw_case(draw: random.Random) -> Case:
    """Return a random case. `ModelConfig` may refuse its sizes."""
    pattern = "".join(draw.choices("M*GE-", (4, 4, 4, 3, 2), k=draw.choice([1, 1, 2, 3, 4, 5])))
    alignment = draw.choice([1, 1, 1, 1, 4, 8])
    lengths, tail = draw_packing(draw, alignment)
    slots = used_slots(lengths, alignment) + tail
    return Case(
        model=draw_model(draw, pattern),
        vocab=draw.choice([draw.randint(17, 700), 8 * draw.randint(4, 100) + 1, 3001]),
        lengths=lengths,
        tail=tail,
        spare=draw.choice([0, 0, 1, 3, 40]),
        alignment=alignment,
        longest=draw.choice([None, slots]),
        main_grad=draw.random() < 0.7,
    )


def draw_packing(draw: random.Random, alignment: int) -> tuple[list[int], int]:
    """Return lengths of documents and the length of the tail."""
    kind = draw.choice(["one", "short", "mixed", "mixed", "mixed"])
    if kind == "one":
        lengths = [draw.choice([*EDGES, 384, 512, draw.randint(8, MOST_TOKENS)])]
    elif kind == "short":
        lengths = [draw.choice(SHORT) for _ in range(draw.randint(5, 100))] + [draw.choice(EDGES)]
    else:
        lengths = [draw.choice(EDGES)]
        while sum(lengths) < MOST_TOKENS and draw.random() < 0.9:
            lengths.append(draw.choice([*SHORT, *EDGES, draw.randint(1, 150)]))
    draw.shuffle(lengths)
    used = used_slots(lengths, alignment)
    # Some kernels require a multiple of 128 slots, which packs in training have.
    tail = draw.choice([0, draw.randint(0, 150), -used % 128, -used % 128, -used % 128 + 128])
    return lengths, tail


def width(draw: random.Random, least: int, most: int) -> int:
    """Return a width from ``least`` to ``most``: mostly a multiple of 8, sometimes any number."""
    if draw.random() < 0.85:
        return 8 * draw.randint(-(-least // 8), most // 8)
    return draw.randint(least, most)


def some(draw: random.Random, share: float = 0.3) -> bool:
    return draw.random() < share


def draw_model(draw: random.Random, pattern: str) -> dict[str, Any]:
    """Return random arguments of `ModelConfig` for a layer pattern."""
    hidden = width(draw, *draw.choice([(24, 320)] * 9 + [(320, 1600)]))
    activation = draw.choice(["squared_relu", "squared_relu", "swiglu", "gelu"])
    values: dict[str, Any] = {
        "hybrid_layer_pattern": pattern,
        "hidden_size": hidden,
        "ffn_hidden_size": width(draw, 8, 512),
        "squared_relu": activation == "squared_relu",
        "swiglu": activation == "swiglu",
        "add_bias_linear": "E" not in pattern and some(draw),
        "normalization": draw.choice(["RMSNorm", "RMSNorm", "LayerNorm"]),
        "apply_layernorm_1p": some(draw),
        "init_method_std": draw.uniform(0.6, 1.2) * hidden**-0.5,
        "untie_embeddings_and_output_weights": some(draw, 0.7),
        "make_vocab_size_divisible_by": draw.choice([1, 8, 16, 64, 128]),
    }
    if some(draw, 0.2):
        values |= {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 1.7}
    for symbol, options in LAYERS.items():
        if symbol in pattern:
            values |= options(draw)
    return values


def attention_options(draw: random.Random) -> dict[str, Any]:
    head = width(draw, 8, 256)
    groups = draw.choice([1, 1, 2, 2, 3, 4])
    return {
        "kv_channels": head,
        "num_query_groups": groups,
        "num_attention_heads": groups
        * draw.choice([1, 2, 3, 4, 5, 8] if head < 128 else [1, 2, 3]),
        "add_qkv_bias": some(draw),
        "attention_output_gate": some(draw),
        "qk_layernorm": some(draw),
        "qk_layernorm_scope": draw.choice(["head", "head", "all_heads"]),
        "attention_norm_placement": draw.choice(["input", "input", "output"]),
        "softmax_scale": draw.choice([None, None, None, 1.5 * head**-0.5]),
        "window_size": f"{draw.choice([1, 3, 31, 64, 100, 127, 200])},0" if some(draw) else None,
        "position_embedding_type": draw.choice(["none", "rope", "rope"]),
        "rotary_percent": draw.choice([1.0, 1.0, 0.75, 0.5, 0.25]),
        "use_rope_scaling": some(draw, 0.2),
        "rope_scaling_original_max_positions": 64,
    }


def mamba_options(draw: random.Random) -> dict[str, Any]:
    groups = draw.choice([1, 1, 2, 3, 4, 8])
    heads = groups * draw.choice([1, 1, 2, 3, 4])
    return {
        "mamba_head_dim": draw.choice([8, 16, 32, 64, 64, 128, width(draw, 8, 128)]),
        "mamba_num_groups": groups,
        "mamba_num_heads": heads,
        "mamba_state_dim": draw.choice([16, 64, 128, 256, width(draw, 16, 256)]),
        "mamba_chunk_size": draw.choice([16, 32, 64, 128, 128, 256, 256]),
        "mamba_norm_groups": draw.choice([None, None, 1, heads]),
        "mamba_conv_bias": some(draw, 0.7),
    }


def delta_net_options(draw: random.Random) -> dict[str, Any]:
    keys = draw.choice([1, 2, 3, 4])
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * draw.choice([1, 1, 2, 3, 4]),
        "linear_key_head_dim": draw.choice([32, 64, 128, width(draw, 8, 256)]),
        "linear_value_head_dim": draw.choice(
            [32, 64, 128, width(draw, 8, 256), width(draw, 8, 512)]
        ),
        "linear_conv_kernel_dim": draw.choice([2, 3, 4]),
        # The norm of a short vector multiplies rounding errors.
        "linear_norm_epsilon": 1e-2,
        "linear_allow_neg_eigval": some(draw),
    }


def expert_options(draw: random.Random) -> dict[str, Any]:
    experts = draw.choice([draw.randint(2, 24), 8, 16, 64, draw.randint(1, 130)])
    sigmoid = some(draw, 0.5)
    limited = experts % 4 == 0 and experts >= 12 and some(draw)
    chosen = draw.randint(2, 6) if limited else draw.randint(1, min(8, experts))
    shared = some(draw, 0.5)
    return {
        "num_experts": experts,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": width(draw, 8, 256),
        "moe_latent_size": width(draw, 8, 128) if some(draw) else None,
        "moe_shared_expert_intermediate_size": width(draw, 8, 256) if shared else None,
        "moe_shared_expert_gate": shared and some(draw),
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_pre_softmax": chosen == 1 or some(draw),
        "moe_router_topk_scaling_factor": draw.choice([None, 2.5]),
        "moe_router_enable_expert_bias": sigmoid and some(draw),
        "moe_router_num_groups": 4 if limited else None,
        "moe_router_group_topk": 2 if limited else None,
        "moe_aux_loss_coeff": draw.choice([0.0, 0.02]) if not (sigmoid or limited) else 0.0,
        "moe_z_loss_coeff": draw.choice([None, 1e-3]),
        "moe_expert_capacity_factor": draw.choice([None, None, None, 1.0]),
        "moe_token_drop_policy": "position",
    }


LAYERS = {
    "*": attention_options,
    "M": mamba_options,
    "G": delta_net_options,
    "E": expert_options,
}
"""Functions that draw the options of a kind of layers; MLPs have no options of their own."""
