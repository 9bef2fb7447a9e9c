"""Mixture of experts: top-k routing to experts, the experts of a rank, and an optional shared expert.

With ``--moe-shared-expert-gate`` the shared expert's output for token x is multiplied by
``sigmoid(w . x)``, with one weight vector w ``(1, D)``.

[Note: latent experts]
With ``--moe-latent-size`` L, ``fc1_latent_proj`` ``(L, D)`` projects a token before the dispatch, and
the routed experts have the width L at both ends. ``fc2_latent_proj`` ``(D, L)`` projects the weighted
sum of their outputs. So dispatch and combination exchange rows of L channels. The router and the
shared expert process the D channels of the token. There are no norms and no biases. Every rank holds
both projections whole and applies them to the rows that it routes, so its gradients are terms of sums.

[Note: experts in parts]
With ``--moe-comm-overlap-parts`` N the token slots that a rank dispatches travel in N parts, and the
experts compute one part while another one travels:

    messages       1 2 3 1'  2'  3'
    computation      1   2   3   shared expert

The parts are consecutive slots. The router runs once, for all of them, and so do the choice of dropped
tokens and the gather of counts or routes. The messages of all parts start at once. A part is computed
as soon as it has arrived, and its results start to travel back. See [Note: exchange in parts] in
``distributed/all_to_all.py``: the backward pass mirrors this order. A shared expert runs before the
results are received, so it covers the last message, and in the backward pass the first one. There the
products for the gradients of the experts' weights cover the last message, see `late_weight`. They do so
in one part, too.

Each row has the same bits as in one part, if a product of a row does not depend on other rows. The
gradient of an expert's weight is the sum of a product for each part: its terms are added in another
order. One product for all parts would need the rows of an expert side by side, but the rows of a part
must be side by side, too. The second product reads and writes the gradients once more: 2.6 GB for 32
experts of 2,688 x 1,856 in float32, 0.5 ms on an H200. A copy of all rows would move 1.8 GB and need
half of these bytes as memory.

[Note: shared expert beside the dispatch]
With ``--moe-shared-expert-overlap`` the shared expert runs on a stream of its own, beside router,
dispatch, experts and combination. It is started first, as `SideStream` requires. If tensor-parallel
ranks dispatch different tokens, the shared expert has collectives of its own. These might meet those
of the dispatcher in another order on another rank, so then the shared expert runs after the experts.

Letters: T tokens, D hidden size, E experts, K experts per token, L latent size, F inner size of one
expert, R rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.tensor_parallel_shards import set_expert_shard
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.build import Build
from megatron_packed.layers.joined import (
    ADAPTED,
    ROWS_EXCHANGED,
    NamedCall,
    joined_residual,
    observation,
)
from megatron_packed.layers.linear import Linear
from megatron_packed.layers.mlp import MLP, inner_segments
from megatron_packed.layers.moe.aux_loss import (
    auxiliary_loss,
    balance_probabilities,
    experts_by_score,
    has_auxiliary_loss,
)
from megatron_packed.layers.moe.capacity import NOWHERE, drop_beyond_capacity, expert_capacity
from megatron_packed.layers.moe.dispatcher import (
    Arrival,
    Dispatched,
    Dispatcher,
    LocalDispatcher,
)
from megatron_packed.layers.moe.global_balance import Balance
from megatron_packed.layers.moe.lora import ExpertLora, step_of
from megatron_packed.layers.moe.parallel import ExpertParallel
from megatron_packed.layers.moe.router import Router, Routing, chosen_experts
from megatron_packed.ops.activation.api import Kind
from megatron_packed.ops.backend_dispatch import planned_type
from megatron_packed.ops.grouped_mlp import api as grouped_mlp
from megatron_packed.ops.grouped_mlp.late_gradients import late_weight
from megatron_packed.packed.later_tokens import prepared, reaches
from megatron_packed.packed.params import PackedSeqParams

if TYPE_CHECKING:
    from megatron_packed.layers.side_stream import SideStream


class MoEReport(NamedTuple):
    """Auxiliary loss and counts of an E layer. See [Note: auxiliary losses are outputs]."""

    aux_loss: Tensor
    """0-d float32: load-balance loss plus z-loss with their coefficients; 0 outside training.

    Each context-parallel rank has the term of its own rows. The loss of the pack is their sum.
    """
    tokens_per_expert_E: Tensor
    """``(E,)`` float32: assignments of real tokens, including those beyond a capacity."""
    dropped: Tensor
    """0-d float32: number of assignments of real tokens beyond the capacity of their expert."""
    overflow: Tensor
    """0-d float32: 1 if rows did not fit into a static buffer, so that the result is wrong.

    The value is equal on all ranks of the expert-parallel group. See [Note: static expert buffer].
    """
    rows_2: Tensor
    """``(2,)`` float32: most rows of a rank and of a peer that the routing needs, also equal on all
    these ranks; 0 without bounds. See [Note: bounds of expert buffers].
    """
    balance: Balance | tuple[()]
    """Load of the experts in training with ``global_aux_loss``, else an empty tuple."""


class MoEOutput(NamedTuple):
    """Result of an E layer: the hidden state and the fields of `MoEReport`."""

    hidden_TD: Tensor
    """``(T, D)``; rows of the tail are the shared expert's output, or zeros without one."""
    aux_loss: Tensor
    tokens_per_expert_E: Tensor
    dropped: Tensor
    overflow: Tensor
    rows_2: Tensor
    balance: Balance | tuple[()]

    @property
    def report(self) -> MoEReport:
        """Report without the hidden state, so that a stored report does not keep it in memory."""
        return MoEReport(*self[1:])


def count_valid(packed: PackedSeqParams, depth: int = 0) -> Tensor:
    """Return the number of the pack's real tokens as a 0-d float32 tensor on the device.

    At a depth of multi-token prediction, count the slots that reach their token. The number is at
    least 1, because losses are divided by it.
    """
    tables = prepared(packed, depth) if depth else packed.tables
    if tables is not None and tables.num_valid is not None:
        return tables.num_valid
    valid_T = reaches(packed, depth) if depth else packed.valid
    return valid_T.sum(dtype=torch.float32).clamp(min=1)


class GroupedExperts(nn.Module):
    """Experts of a rank, each applied to its own range of rows by grouped matrix products.

    With E experts on this rank, ``fc1`` is ``(E, F, D)`` (``(E, 2F, D)`` ``[gate | up]`` for SwiGLU) and
    ``fc2`` is ``(E, D, F)``. There are no biases. If the inner channels of each expert are split over
    tensor-parallel ranks, the result is this rank's term of a sum.

    Args:
        num_experts: number of experts on all ranks together.
        hidden_size: D.
        inner_size: inner size of one expert before it is split over ranks.
        kind: activation function.
        ep: expert parallelism of this rank.
        build: arguments that all layers share.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        inner_size: int,
        *,
        kind: Kind,
        ep: ExpertParallel,
        build: Build,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.backend = build.backends.grouped_mlp
        segments = inner_segments(inner_size, kind)
        rows = ep.shard(num_experts, *segments, dim=1)
        columns = ep.shard(num_experts, segments[0], dim=2)
        whole_rows = sum(segment.count for segment in segments)
        fc1 = rows.local_shape((num_experts, whole_rows, hidden_size))
        fc2 = columns.local_shape((num_experts, hidden_size, inner_size))
        self.fc1 = set_expert_shard(build.new_parameter(*fc1), rows)
        self.fc2 = set_expert_shard(build.new_parameter(*fc2), columns)
        self.fc1_lora: ExpertLora | None = None
        """Adapters of ``fc1``; `models.lora` adds them, and those of ``fc2``."""
        self.fc2_lora: ExpertLora | None = None
        self.expert_fc1 = NamedCall()
        self.moe_act = NamedCall()
        self.expert_fc2 = NamedCall()

    def weights_of_part(self) -> tuple[Tensor, Tensor]:
        """Return both weights for one of several parts.

        Their gradients are computed after the gradients of the part's rows were sent, if this
        function is called before the part is received.
        """
        return late_weight(self.fc1), late_weight(self.fc2)

    def forward(
        self, x_RD: Tensor, offsets_E: Tensor, weights: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Apply the experts to the sorted rows; rows beyond the last offset give zeros.

        Args:
            x_RD: ``(R, D)`` rows sorted by expert.
            offsets_E: ``(E,)`` int32: end of the rows of each expert.
            weights: result of `weights_of_part` for one of several parts.
        Returns:
            ``(R, D)``.
        """
        w1_EFD, w2_EDF = weights or (self.fc1, self.fc2)
        backend = grouped_mlp.grouped_mlp_backend(
            x_RD,
            w1_EFD,
            w2_EDF,
            offsets_E,
            activation=self.kind,
            backend=self.backend,
            apart=self._reason_apart(x_RD.device.type),
        )
        if (run := grouped_mlp.joined_function(backend)) is not None:
            return run(x_RD, w1_EFD, w2_EDF, offsets_E)
        fc1 = step_of(backend, "fc1", self.fc1_lora)
        fc2 = step_of(backend, "fc2", self.fc2_lora)
        hidden_RF = self.expert_fc1(fc1, x_RD, w1_EFD, offsets_E)
        hidden_RF = self.moe_act(backend.activate, hidden_RF, self.kind)
        y_RD: Tensor = self.expert_fc2(fc2, hidden_RF, w2_EDF, offsets_E)
        return y_RD

    def _reason_apart(self, device_type: str) -> str:
        """Return the reason why the steps must be separate calls; empty if there is none."""
        if (self.kind, planned_type(device_type)) not in grouped_mlp.WITH_JOINED:
            return ""
        if self.fc1_lora is not None or self.fc2_lora is not None:
            return ADAPTED
        return observation(self.expert_fc1, self.moe_act, self.expert_fc2)


class MoE(nn.Module):
    """Mixture of experts: router, dispatcher, experts and optional shared expert.

    All tensor-parallel ranks route all tokens identically. The inner channels of the shared expert
    are split over these ranks. For the other experts either the inner channels or the tokens are
    split (see [Note: whose tokens]).

    Args:
        config: sizes and routing options; experts have no biases.
        build: arguments that all layers share.
        depth: depth of multi-token prediction, 0 in the main model. Slots that do not reach their
            token at this depth are routed nowhere and counted nowhere.
    """

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
        *,
        depth: int = 0,
    ) -> None:
        super().__init__()
        backends, device = build.backends, build.device
        self.config = config
        self.balances_all_ranks = config.balances_all_ranks
        self.has_aux_loss = has_auxiliary_loss(config)
        repeated = depth > 0 and config.mtp_use_repeated_layer
        # As in Megatron: the depths that use the same experts share one load-balance loss.
        self.balance_share = 1 / config.mtp_depths if repeated else 1.0
        self.depth = depth
        self.tp = build.tp
        self.cp = build.cp
        self.ep = build.ep or ExpertParallel(tp=build.tp)
        self.router = Router(config, build, rows_group=self.ep.rows_group)
        self.experts = GroupedExperts(
            self.router.num_experts,
            config.routed_width,
            config.moe_ffn_hidden_size,
            kind=config.activation,
            ep=self.ep,
            build=build,
        )
        self.dispatcher = make_dispatcher(config, self.ep, backends)
        self.fc1_latent_proj: Linear | None = None
        self.fc2_latent_proj: Linear | None = None
        if config.moe_latent_size is not None:
            sizes = (config.hidden_size, config.moe_latent_size)
            self.fc1_latent_proj = self._build_projection(*sizes, build)
            self.fc2_latent_proj = self._build_projection(*sizes[::-1], build)
        self.shared_expert: MLP | None = None
        self.shared_expert_gate: Linear | None = None
        if config.moe_shared_expert_intermediate_size:
            self._build_shared_expert(config.moe_shared_expert_intermediate_size, build)
        self.backend = backends.residual_projection
        self.side: SideStream | None = None
        if self.overlaps_shared_expert and torch.device(device).type in ("cuda", "meta"):
            from megatron_packed.layers.side_stream import SideStream

            self.side = SideStream(torch.device(device))

    @property
    def overlaps_shared_expert(self) -> bool:
        """True if a GPU runs the shared expert as in [Note: shared expert beside the dispatch]."""
        return (
            self.config.moe_shared_expert_overlap
            and self.shared_expert is not None
            and not self.ep.splits_tokens
        )

    @property
    def reason_apart(self) -> str:
        """Reason why the shared expert cannot add the routed rows; empty if it may."""
        if self.ep.splits_tokens:
            return ROWS_EXCHANGED
        if self.shared_expert_gate is not None:
            return "the shared expert's output is multiplied by its gate"
        if self.overlaps_shared_expert:
            return "the shared expert runs beside the routed experts"
        if self.dispatcher.parts > 1:
            return "the shared expert runs while results of the routed experts travel"
        return ""

    def _build_projection(self, width_in: int, width_out: int, build: Build) -> Linear:
        """Build a projection of the rows that this rank routes; each rank holds all of it."""
        projection = Linear(width_in, width_out, bias=False, build=build)
        # See [Note: latent experts] for why the gradient is one term of a sum.
        self.tp.use_inside(projection.weight)
        projection.has_whole_input = not self.ep.splits_tokens
        return projection

    def _build_shared_expert(self, inner_size: int, build: Build) -> None:
        # Experts that are split by inner channels share one `enter` and `leave` with the shared
        # expert, so the shared expert then has no group of its own.
        tp = self.tp if self.ep.splits_tokens else self.tp.inside()
        self.shared_expert = MLP(
            self.config.hidden_size,
            inner_size,
            kind=self.config.activation,
            bias=False,
            build=replace(build, tp=tp),
        )
        if self.config.moe_shared_expert_gate:
            self.shared_expert_gate = self._build_gate(build)

    def _build_gate(self, build: Build) -> Linear:
        """Build the projection to the gate of the shared expert; each rank holds all of it.

        It is applied to the rows of the shared expert. These are the rows of the hidden state
        between layers, or all rows inside the tensor-parallel region. Inside it, each rank gates
        its own term of the shared expert's output, so its gradient is one term of a sum.
        """
        gate = Linear(self.config.hidden_size, 1, bias=False, build=build)
        use = self.tp.use_on_rows if self.ep.splits_tokens else self.tp.use_inside
        use(gate.weight)
        return gate

    def forward(self, x_TD: Tensor, packed: PackedSeqParams) -> MoEOutput:
        own_TD = self.ep.enter(x_TD)
        beside_TD = None if self.side is None else self.side.start(self._shared_expert, own_TD)
        valid_T = self.cp.valid(packed, self.depth)
        routing = self.router(own_TD, packed)
        routed_TL = own_TD if self.fc1_latent_proj is None else self.fc1_latent_proj(own_TD)
        ids_TK, dropped = self._destinations(routing, valid_T)
        parts = self.dispatcher.send(
            self.ep.share(routed_TL) if self.ep.splits_tokens else routed_TL,
            self.ep.dispatched(ids_TK),
            self.ep.dispatched(routing.topk_weights_TK),
        )
        # The dispatcher holds what it needs: free the memory as parts are computed.
        del routed_TL
        returning, reports = self._compute(parts)
        if beside_TD is None and self.dispatcher.parts > 1 and not self.ep.splits_tokens:
            beside_TD = None if self.shared_expert is None else self._shared_expert(own_TD)
        y_TL = _joined([receive() for receive in returning])
        del returning
        overflow, rows_2 = map(_most, zip(*reports, strict=True))
        if self.ep.splits_tokens:
            y_TL = self.ep.unshare(y_TL)
        y_TD = y_TL if self.fc2_latent_proj is None else self.fc2_latent_proj(y_TL)
        if beside_TD is None:
            y_TD = self._leave_with_shared_expert(y_TD, own_TD, x_TD)
        else:
            if self.side is not None:
                self.side.join()
            y_TD = self.ep.leave(y_TD + beside_TD)
        chosen_TE = chosen_experts(routing.topk_expert_ids_TK, valid_T, self.router.num_experts)
        aux_loss = self._aux_loss(routing.logits_TE, chosen_TE, valid_T, packed)
        balance: Balance | tuple[()] = ()
        if self.balances_all_ranks and self.training:
            balance = self._balance(routing.logits_TE, chosen_TE, valid_T)
        return MoEOutput(y_TD, aux_loss, chosen_TE.sum(dim=0), dropped, overflow, rows_2, balance)

    def _compute(
        self, parts: list[Arrival[Dispatched]]
    ) -> tuple[list[Arrival[Tensor]], list[tuple[Tensor, Tensor]]]:
        """Compute the parts in the order of the list, and empty it.

        Returns:
            for each part the results on their way back, and the overflow with the rows that the
            routing needs.
        """
        returning, reports = [], []
        while parts:
            weights = self.experts.weights_of_part() if self.dispatcher.overlaps_weights else None
            dispatched = parts.pop(0)()
            y_RL = self.experts(dispatched.x_RD, dispatched.offsets_E, weights)
            returning.append(self.dispatcher.send_back(y_RL, dispatched))
            reports.append((dispatched.overflow, dispatched.rows_2))
            del dispatched, y_RL
        return returning, reports

    def _leave_with_shared_expert(self, y_TD: Tensor, own_TD: Tensor, x_TD: Tensor) -> Tensor:
        """Leave the region of the experts, and add the shared expert's output.

        Args:
            y_TD: output of the experts for the rows that this rank routed.
            own_TD: rows that this rank routed.
            x_TD: input of the layer.
        """
        if self.shared_expert is None:
            return self.ep.leave(y_TD)
        joined = joined_residual(self, self.shared_expert, y_TD)
        if joined is not None:
            return self.ep.leave(self.shared_expert(own_TD, None, joined))
        if self.ep.splits_tokens:
            # The routed rows are only a part of the rows that the shared expert processes.
            return self.ep.leave(y_TD) + self._shared_expert(x_TD)
        return self.ep.leave(y_TD + self._shared_expert(own_TD))

    def _shared_expert(self, x_TD: Tensor) -> Tensor:
        """Return the shared expert's output, multiplied by its gate if there is one."""
        assert self.shared_expert is not None
        y_TD: Tensor = self.shared_expert(x_TD)
        if self.shared_expert_gate is None:
            return y_TD
        return y_TD * torch.sigmoid(self.shared_expert_gate(x_TD))

    def _aux_loss(
        self, logits_TE: Tensor, chosen_TE: Tensor, valid_T: Tensor, packed: PackedSeqParams
    ) -> Tensor:
        """Return the auxiliary losses of this rank's rows, 0-d float32.

        They are 0 outside training and without a coefficient.
        """
        if not self.training or not self.has_aux_loss:
            return torch.zeros((), dtype=torch.float32, device=valid_T.device)
        tables = prepared(packed, self.depth) if self.depth else packed.tables
        loss = auxiliary_loss(
            self.config,
            logits_TE,
            chosen_TE,
            valid_T,
            count_valid(packed, self.depth),
            samples=None if tables is None else tables.samples,
            share=self.balance_share,
            cp=self.cp,
        )
        return self.tp.counted_once(loss)

    def _balance(self, logits_TE: Tensor, chosen_TE: Tensor, valid_T: Tensor) -> Balance:
        """Return the load for ``global_aux_loss``; see [Note: global balance is outside of layers]."""
        probabilities_TE = balance_probabilities(logits_TE, self.config.moe_router_score_function)
        probability_E = (probabilities_TE * valid_T.unsqueeze(-1)).sum(dim=0) * self.balance_share
        counted_TE = experts_by_score(self.config, logits_TE, chosen_TE, valid_T)
        return Balance(self.tp.counted_once(probability_E), counted_TE.sum(dim=0))

    def _destinations(self, routing: Routing, valid_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the expert ids to dispatch to, and the number of dropped assignments.

        Returns:
            ``(T, K)`` expert ids, ``NOWHERE`` for the tail and for dropped assignments; 0-d float32
            number of dropped assignments.
        """
        config = self.config
        ids_TK = routing.topk_expert_ids_TK.masked_fill(~valid_T[:, None], NOWHERE)
        if config.moe_expert_capacity_factor is None:
            return ids_TK, torch.zeros((), dtype=torch.float32, device=ids_TK.device)
        tokens, topk = ids_TK.shape
        capacity = expert_capacity(
            tokens, topk, self.router.num_experts, config.moe_expert_capacity_factor
        )
        weights_TK = routing.topk_weights_TK.detach()
        policy = config.moe_token_drop_policy
        kept_TK = drop_beyond_capacity(
            ids_TK, weights_TK, self.router.num_experts, capacity, policy
        )
        return kept_TK, (kept_TK != ids_TK).sum(dtype=torch.float32)


def _joined(parts: list[Tensor]) -> Tensor:
    """Return the rows of all parts, in order; those of one part are not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _most(values: Sequence[Tensor]) -> Tensor:
    """Return the largest values of all parts."""
    return values[0] if len(values) == 1 else torch.stack(list(values)).amax(dim=0)


def make_dispatcher(config: ModelConfig, ep: ExpertParallel, backends: Backends) -> Dispatcher:
    """Return the dispatcher that ``config`` selects, or `LocalDispatcher` without a group."""
    if ep.group is None:
        return LocalDispatcher(config, ep, backends)
    if config.sends_tokens:
        from megatron_packed.layers.moe import token_dispatchers as by_token

        if config.moe_pad_expert_input_to_capacity:
            return by_token.PaddedTokenDispatcher(config, ep, backends)
        if config.moe_expert_rank_capacity_factor is not None:
            return by_token.BoundedTokenDispatcher(config, ep, backends)
        return by_token.TokenDispatcher(config, ep, backends)
    from megatron_packed.layers.moe import dispatchers_between_ranks as between

    kind: type[Dispatcher] = between.AllToAllDispatcher
    if config.moe_token_dispatcher_type == "allgather":  # noqa: S105
        kind = between.AllGatherDispatcher
    elif config.moe_pad_expert_input_to_capacity:
        kind = between.PaddedAllToAllDispatcher
    elif config.moe_expert_rank_capacity_factor is not None:
        kind = between.BoundedAllToAllDispatcher
    return kind(config, ep, backends)
