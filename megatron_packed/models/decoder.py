"""Generation of text with the layers of a model, one token per document and step.

Letters: T tokens of a pack, B documents, D hidden size, V entries of the vocabulary.

[Note: layers for generation]
A `Decoder` has modules of its own, which use the parameters and buffers of the model. So generation
uses no captured graph, no wrapper of recomputation or offload, no hook and no mode of the model, and
it changes none of them. The modules differ from those of the model as follows:

* There is no context parallelism. Each context-parallel rank holds complete parameters, and
  processes all tokens.
* There is no sequence parallelism, so any number of tokens is possible.
* Experts have no capacity, so no token is dropped.
* There is no multi-token prediction.
* Linear layers and norms are those of ``--transformer-impl local``.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_packed.distributed.differentiable import gather_last
from megatron_packed.distributed.rng import generators_kept
from megatron_packed.layers.build import Build
from megatron_packed.layers.build_layers import build_layers
from megatron_packed.layers.decoding.decoded_layer import DecodedLayer
from megatron_packed.layers.decoding.state import CACHE_BLOCK, NextTokens
from megatron_packed.layers.embedding import Embedding
from megatron_packed.layers.hybrid_layer import build_norm
from megatron_packed.layers.kinds.registry import MIXERS
from megatron_packed.layers.transformer_impl import LOCAL_NAME
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.lm_head_and_loss import scaled_logits
from megatron_packed.models.multi_token_prediction import share_weights
from megatron_packed.models.pack_tables import PackTables
from megatron_packed.packed.params import PackedSeqParams


class DecoderModules(nn.Module):
    """Modules of a model as generation uses them. See [Note: layers for generation].

    Args:
        model: the model, whose parameters and buffers the modules share.
    """

    def __init__(self, model: HybridModel) -> None:
        super().__init__()
        config = replace(
            model.config,
            # Multi-token prediction is not used.
            hybrid_layer_pattern=model.config.main_layers,
            mtp_num_layers=0,
            moe_expert_capacity_factor=None,
            moe_pad_expert_input_to_capacity=False,
            moe_expert_rank_capacity_factor=None,
        )
        tp = replace(model.tp, sequence_parallel=False)
        ep = replace(model.ep, tp=tp)
        backends = replace(model.backends, transformer_impl=LOCAL_NAME)
        num_rows = config.padded_vocab_size(model.vocab_size, tp.size)
        # The meta device has no memory: `share_weights` puts the model's tensors in place.
        meta = torch.device("meta")
        build = Build(backends=backends, tp=tp, ep=ep, device=meta, dtype=model.dtype)
        # The copy has the same tables, and its own mode.
        rotary = copy(model.rotary)
        self.embedding = Embedding(
            num_rows,
            config.hidden_size,
            multiplier=config.embedding_multiplier,
            build=build,
        )
        self.layers = build_layers(config, build, rotary)
        self.final_norm = build_norm(config, build)
        self.pack_tables = PackTables(
            config, build, rotary=rotary, max_positions=model.max_positions
        )
        self.tp = tp
        self.row_multiple = tp.size if ep.splits_tokens else 1
        """Multiple of tokens that MoE layers need: each tensor-parallel rank dispatches a part."""
        share_weights(self, model)
        self.eval()


class Decoder:
    """Layers of a model with the states of the documents that are generated.

    Call `prefill` with prompts, then `step` with one token for each of them. The ranks of a model
    that is split over several ranks make the same calls with the same tokens.

    Args:
        model: the model, in any mode. It is not changed. Its parameters must be complete: with
            ``--overlap-param-gather`` call ``FlatBuffers.wait_params()`` before.
    """

    def __init__(self, model: HybridModel) -> None:
        self.modules = DecoderModules(model)
        self.layers = [
            DecodedLayer(layer, MIXERS[symbol].state(layer.mixer))
            for symbol, layer in zip(model.config.main_layers, self.modules.layers, strict=True)
        ]
        self.output_weight = model.output_weight
        self.vocab_size = model.vocab_size
        self.config = model.config
        self.device = model.embedding.weight.device
        self.lengths: list[int] = []
        """Number of tokens of each document so far."""
        self._packed: PackedSeqParams | None = None

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Start new documents with the tokens of prompts, all in one pack.

        Args:
            prompts: at least one prompt, each with at least one token.
        Returns:
            ``(B, V)`` float32 logits of the token after each prompt.
        """
        self.lengths = [len(prompt) for prompt in prompts]
        self._packed = None
        packed = self._pack(self.lengths)
        self.modules.pack_tables.check(packed)
        packed = packed.with_tables(self.modules.pack_tables.derive(packed))
        tokens = [token for prompt in prompts for token in prompt]
        hidden_TD = self.modules.embedding(self._tokens(tokens, packed.total_tokens))
        # The attention of TransformerEngine advances the generator although nothing is dropped.
        with generators_kept(self.device):
            for layer in self.layers:
                hidden_TD = layer.prefill(hidden_TD, packed)
        last_B = packed.cu_seqlens[1 : len(prompts) + 1].long() - 1
        return self._logits(hidden_TD[last_B])

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Add one token to each document.

        Args:
            tokens: one token for each document.
        Returns:
            ``(B, V)`` float32 logits of the token after it.
        """
        hidden_BD = self.modules.embedding(self._tokens(tokens, len(tokens)))
        next_tokens = self._next_tokens()
        for layer in self.layers:
            hidden_BD = layer.step(hidden_BD, next_tokens)
        self.lengths = [length + 1 for length in self.lengths]
        return self._logits(hidden_BD)

    @torch.no_grad()
    def keep(self, rows: Sequence[int]) -> None:
        """Keep only some documents.

        Args:
            rows: numbers of the documents to keep, ascending.
        """
        rows_B = torch.tensor(rows, dtype=torch.int64, device=self.device)
        self.lengths = [self.lengths[row] for row in rows]
        self._packed = None
        for layer in self.layers:
            layer.state.keep(rows_B)

    def _next_tokens(self) -> NextTokens:
        if self._packed is None:
            self._packed = self._pack([1] * len(self.lengths))
        longest = max(self.lengths) + 1
        positions_B = torch.tensor(self.lengths, dtype=torch.int64).to(self.device)
        places_L = torch.arange(-(-longest // CACHE_BLOCK) * CACHE_BLOCK, device=self.device)
        return NextTokens(
            positions_B=positions_B,
            longest=longest,
            visible_BL=places_L <= positions_B[:, None],
            packed=self._packed,
        )

    def _pack(self, lengths: Sequence[int]) -> PackedSeqParams:
        multiple = self.modules.row_multiple
        total = -(-sum(lengths) // multiple) * multiple
        return PackedSeqParams.from_lengths(lengths, total, device=self.device)

    def _tokens(self, tokens: Sequence[int], total: int) -> Tensor:
        """Return tokens on the device, with zeros in the tail of the pack."""
        padded = [*tokens, *[0] * (total - len(tokens))]
        return torch.tensor(padded, dtype=torch.int64).to(self.device)

    def _logits(self, hidden_BD: Tensor) -> Tensor:
        """Return ``(B, V)`` float32 logits, on all tensor-parallel ranks."""
        tp = self.modules.tp
        logits_BV = F.linear(self.modules.final_norm(hidden_BD), self.output_weight)
        if tp.group is not None:
            logits_BV = gather_last(logits_BV, tp.group)
        return scaled_logits(logits_BV[:, : self.vocab_size].float(), self.config)
