"""Self-test: do tokens read earlier tokens of their own document alone, with the kernels in use?

A small model for each kind of layer uses the head and state sizes that decide which kernels run. It
processes a pack as it is, with every token of an early document changed, and with every token of
the last document changed. Everything that belongs to the other documents (outputs, losses,
gradients of the inputs) must stay the same. The last document is the longest one, with rows on the
last context-parallel rank, so leaks to earlier ranks are seen, too. Context-parallel ranks hold the
rows that they hold in the whole model, so attention also moves rows to a zigzag and back if other
layers pass states.

No token may read later tokens of its own document either. Without boundaries the pack is one
document, so the outputs before the changed tokens must stay the same. Layers that do not use
boundaries process the pack with the second half of one document changed instead.

Two further runs check the test itself. The same pack is processed again, which shows the
run-to-run difference of a kernel that is not deterministic. The pack is also processed without its
document boundaries, where the change must be visible: a test that does not see this change would
not see a leak either.

Letters: T tokens, D hidden size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megatron_packed.config.kinds.layer_kind import KINDS
from megatron_packed.config.layer_pattern import DEPTH
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.collectives import all_gather_rows
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.context_parallel import Communication, ContextParallel
from megatron_packed.layers.kinds.mixer_kind import HIDDEN, IsolationCase, RankCounts
from megatron_packed.layers.kinds.registry import MIXERS, kinds_of
from megatron_packed.layers.tensor_parallel import TensorParallel
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.ops.backend_dispatch import Request, tune
from megatron_packed.packed.micro_batch import MicroBatch

if TYPE_CHECKING:
    from typing_extensions import Unpack

VOCAB = 64
BLOCK = 128
"""Pack sizes are multiples of this number, as kernels with block tables require."""
OUTPUTS = "outputs"
CHANGED, LAST = 1, 3
"""Numbers of the documents whose tokens change."""
NOISE_FACTOR = 4
"""Allowed difference, as a multiple of the observed run-to-run difference."""
CAUSAL_ULPS = 4
"""Allowed difference of outputs before changed tokens, in units of the last place of the largest
value: later tokens may change the rounding, but a mixer that reads them changes the first digits.
"""
LEAK_FACTOR = 10
"""Least effect of removed boundaries as a multiple of the allowed difference, to detect a leak."""
_DEPTHS = IsolationCase(changes=lambda config, ranks: {"hybrid_layer_pattern": f"-{DEPTH}-"})
"""Case of multi-token prediction."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class IsolationResult:
    """Result of the check for one quantity of one kind of layer.

    Differences are relative: max |difference| / max |value| over the other documents and the tail.
    """

    symbol: str
    """Symbol of the layer kind in the layer pattern; ``/`` for multi-token prediction."""
    quantity: str
    """``outputs``, ``loss`` or ``input gradients``."""
    difference: float
    """Difference in the other documents after one document was changed."""
    allowed: float
    """Largest accepted ``difference``; 0 if the bits must be equal."""
    noise: float
    """Difference between two runs of the same pack."""
    leak: float | None
    """``difference`` without document boundaries; None for layers that do not use boundaries."""
    earlier: float = 0.0
    """Difference of outputs before changed tokens of the same document; 0 for other quantities."""
    allowed_earlier: float = 0.0
    """Largest accepted ``earlier``."""

    @property
    def isolated(self) -> bool:
        return self.difference <= self.allowed

    @property
    def seeing(self) -> bool:
        """True if the check would have detected a leak."""
        return self.leak is None or self.leak > LEAK_FACTOR * self.allowed

    @property
    def causal(self) -> bool:
        return self.earlier <= self.allowed_earlier

    @property
    def passed(self) -> bool:
        return self.isolated and self.seeing and self.causal

    def __str__(self) -> str:
        name = KINDS[self.symbol].name if self.symbol in KINDS else "multi-token prediction"
        measured = f"{name} layers ({self.symbol}), {self.quantity}: "
        if not self.isolated:
            return measured + (
                f"changing one document changed other documents by {self.difference:.1e} (allowed {self.allowed:.1e}); "
                "the kernel in use leaks between documents, so choose another backend for it."
            )
        if not self.seeing:
            return measured + (
                f"without document boundaries the other documents changed by only {self.leak:.1e}, which is too close "
                f"to the allowed {self.allowed:.1e}; the check cannot detect a leak with these kernels."
            )
        if not self.causal:
            return measured + (
                f"changing the last tokens of a document changed its earlier tokens by {self.earlier:.1e} "
                f"(allowed {self.allowed_earlier:.1e}); the mixer reads later tokens, which a language model must not."
            )
        seen = "" if self.leak is None else f"; without boundaries they change by {self.leak:.1e}"
        return (
            measured
            + f"other documents changed by {self.difference:.1e}, allowed {self.allowed:.1e}{seen}."
        )


def check_isolation(
    model_config: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    backends: Backends | Mapping[str, str | bool] | None = None,
    *,
    groups: ParallelGroups | None = None,
    requests: Iterable[Request] = (),
    **communication: Unpack[Communication],
) -> list[IsolationResult]:
    """Check every kind of layer in ``model_config``'s pattern with the kernels that it would run.

    Takes less than 2 seconds after kernels are compiled and tuned. Waits for the device, so call it
    before training starts. All ranks of ``groups`` must call it; they shard these small layers as
    they shard those of the model.

    Args:
        requests: requests of the model to its ops. Their kernels are tuned first, for the sizes of
            training, because the small packs of this check must not choose the tiles.
        communication: communication between ranks, as in the model.
    Returns:
        Two or three results for each kind of layer. Attention with a window is a kind of its own.
        Refuse to train unless all of them ``passed``, and print those that did not.
    """
    device, backends = torch.device(device), Backends.from_mapping(backends)
    tp = TensorParallel.from_groups(groups)
    cp = ContextParallel.from_groups(groups, **communication)
    ranks = tp.size * cp.size
    tune(requests, device)
    results = []
    ep_size = 1 if groups is None else groups.ep.size
    for symbol, variant in _kinds_of_layers(model_config):
        heads = ranks * cp.overlap_parts
        small = small_config(symbol, model_config, heads, ep_size, variant=variant)
        chunk = small.mamba_chunk_size * -(-8 // small.mamba_chunk_size)  # several short ones
        total = -(-(2 * chunk + 32) // BLOCK) * BLOCK * ranks
        # For a zigzag every document is padded, so the pack needs more slots.
        slots = total + BLOCK * ranks if cp.uses_zigzag else total
        model = HybridModel(
            small,
            vocab_size=VOCAB,
            max_positions=slots,
            groups=groups,
            # If other layers pass states, attention over a zigzag gets its rows from all-to-alls.
            kinds=model_config.kinds,
            **communication,
            device=device,
            dtype=dtype,
            backends=backends,
            seed=1,
        )
        if (prepare := _case_of(symbol).prepare) is not None:
            prepare(model)
        results += _check_layer(symbol, model, chunk, slots, device)
    return results


def _kinds_of_layers(config: ModelConfig) -> list[tuple[str, Mapping[str, object]]]:
    """Return the symbols of the pattern and ``/``, with the changes of each variant of a kind."""
    return [
        (symbol, variant)
        for symbol in dict.fromkeys(config.layer_types + [DEPTH] * bool(config.mtp_depths))
        for variant in _case_of(symbol).variants(config)
    ]


def _case_of(symbol: str) -> IsolationCase:
    return MIXERS[symbol].isolation if symbol in MIXERS else _DEPTHS


def small_config(
    symbol: str,
    config: ModelConfig,
    ranks: int = 1,
    ep_size: int = 1,
    *,
    variant: Mapping[str, object] | None = None,
) -> ModelConfig:
    """Return a one-layer model of one kind, as small as possible.

    Sizes that decide which kernels run are unchanged. The number of heads grows with ``ranks``, so
    that each rank has heads. Ranks share groups of heads if they do so with ``config``.

    Args:
        variant: further changes, for example the window of an attention layer.
    """
    changes: dict[str, object] = {
        "hybrid_layer_pattern": symbol,
        "mtp_num_layers": None,
        "mtp_use_repeated_layer": False,
        "window_size": None,
        "window_attn_skip_freq": None,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 2 * HIDDEN * ranks,
        "hidden_dropout": 0.0,
        "init_method_std": HIDDEN**-0.5,
        "make_vocab_size_divisible_by": VOCAB,
        "vocab_size": VOCAB,
        "freeze_params": (),
        "lora_rank": None,
    }
    for kind in MIXERS.values():
        changes |= kind.isolation.absent
    # Other kinds of layers are absent, so their sizes may be None: change only sizes of this kind.
    changes |= _case_of(symbol).changes(config, RankCounts(ranks, ep_size))
    return dataclasses.replace(config, **{**changes, **(variant or {})})  # type: ignore[arg-type]


def coupled_by_design(config: ModelConfig) -> list[str]:
    """Return the options of ``config`` that make documents of a pack affect each other by design.

    The checks run without these options.

    Example:
        ``["--moe-expert-capacity-factor 1.25 (documents compete for the capacity of an expert)"]``.
    """
    kinds = kinds_of(config.layer_types)
    return [option for kind in kinds for option in kind.isolation.coupled(config)]


def _check_layer(
    symbol: str, model: HybridModel, chunk: int, slots: int, device: torch.device
) -> list[IsolationResult]:
    # The documents: one inside a chunk, one across the boundary to the next chunk, a short one in
    # that chunk, and a long one. The remaining slots are the tail.
    # In a zigzag each document is padded, at most to the next multiple of the alignment.
    alignment = model.cp.attention_partition.alignment
    lengths = [chunk // 2 + 1, 3 * chunk // 4, 3, slots - 2 * chunk - 4 * (alignment - 1)]

    def make_pack(first: int, number: int = CHANGED) -> MicroBatch:
        return _make_pack(lengths, slots, alignment, number, first).to(device)

    unchanged, changed, last_changed = make_pack(slots), make_pack(0), make_pack(0, LAST)
    document_T = unchanged.packed.seq_idx[0]
    others_T, before_last_T = document_T != CHANGED, document_T != LAST
    baseline, again, after, after_last = (
        observe(model, pack) for pack in (unchanged, unchanged, changed, last_changed)
    )
    joined = None
    if symbol not in MIXERS or MIXERS[symbol].kind.mixes_tokens:
        joined = [observe(model, _without_boundaries(pack)) for pack in (unchanged, changed)]
    earlier = 0.0
    if symbol in MIXERS:  # A depth of multi-token prediction reads later tokens by design.
        if joined is None:
            late = make_pack(lengths[CHANGED] // 2)
            pair = (baseline, observe(model, late))
            earlier_T = ~others_T & (late.tokens == unchanged.tokens)
        else:
            pair = (joined[0], joined[1])
            earlier_T = document_T < CHANGED
        earlier = _moved(pair[0][OUTPUTS], pair[1][OUTPUTS], earlier_T)
    eps = torch.finfo(model.dtype).eps
    results = []
    for quantity, value in baseline.items():
        noise = max(_moved(value, again[quantity], rows_T) for rows_T in (others_T, before_last_T))
        leak = (
            None if joined is None else _moved(joined[0][quantity], joined[1][quantity], others_T)
        )
        ulps = _case_of(symbol).allowed_ulps(quantity, device, model.backends)
        results.append(
            IsolationResult(
                symbol=symbol,
                quantity=quantity,
                difference=max(
                    _moved(value, after[quantity], others_T),
                    _moved(value, after_last[quantity], before_last_T),
                ),
                allowed=max(ulps * eps, NOISE_FACTOR * noise),
                noise=noise,
                leak=leak,
                earlier=earlier if quantity == OUTPUTS else 0.0,
                allowed_earlier=max(max(ulps, CAUSAL_ULPS) * eps, NOISE_FACTOR * noise),
            )
        )
    return results


def _make_pack(
    lengths: list[int], total: int, alignment: int, number: int, first: int
) -> MicroBatch:
    """Return a pack; in document ``number`` the tokens from number ``first`` on are changed."""
    rng = np.random.default_rng(0)
    documents = [(rng.integers(0, VOCAB, length), None) for length in lengths]
    tokens = documents[number][0]
    tokens[first:] = (tokens[first:] + 1) % VOCAB
    return MicroBatch.build(documents, total, scales=(1.0, 1.0, 1.0), alignment=alignment)


def _without_boundaries(pack: MicroBatch) -> MicroBatch:
    """Return the pack with the same tokens as one document."""
    packed = pack.packed
    cu_seqlens = torch.full_like(packed.cu_seqlens, packed.total_tokens)
    cu_seqlens[0] = 0
    joined = dataclasses.replace(
        packed,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens.cpu(),
        seq_idx=torch.zeros_like(packed.seq_idx),
        position_ids=torch.arange(packed.total_tokens).to(packed.position_ids),
        valid=torch.ones_like(packed.valid),
        max_seqlen=packed.total_tokens,
        num_seqs=1,
    )
    return dataclasses.replace(pack, packed=joined)


def observe(model: HybridModel, pack: MicroBatch) -> dict[str, Tensor]:
    """Return outputs, losses and input gradients of all slots; no losses with ``/`` parts."""
    captured: list[Tensor] = []
    final_norm = list(model.mtp)[-1].final_norm if model.mtp else model.final_norm
    handles = [
        module.register_forward_hook(lambda _module, _inputs, output: captured.append(output))
        for module in (model.embedding, final_norm)
    ]
    try:
        output = model(pack)
    finally:
        for handle in handles:
            handle.remove()
    embedded_TD, *_, normed_TD = captured
    (input_grad_TD,) = torch.autograd.grad(output.loss, [embedded_TD])
    normed_TD = normed_TD.detach()
    if model.tp.sequence_parallel:
        normed_TD, input_grad_TD = (
            all_gather_rows(rows, model.tp.group) for rows in (normed_TD, input_grad_TD)
        )
    loss_T = {} if model.mtp else {"loss": output.per_token_loss_T}
    quantities = {OUTPUTS: normed_TD, **loss_T, "input gradients": input_grad_TD}
    return {
        quantity: model.cp.gather(value.detach(), pack.packed)
        for quantity, value in quantities.items()
    }


def _moved(first: Tensor, after: Tensor, rows_T: Tensor) -> float:
    """Return max |difference| / max |before| over some rows; infinite if a value is not finite."""
    first_rows, changed = first[rows_T].double(), after[rows_T].double()
    if not torch.isfinite(torch.stack([first_rows, changed])).all():
        return math.inf
    return ((first_rows - changed).abs().max() / first_rows.abs().max().clamp(min=1e-30)).item()
