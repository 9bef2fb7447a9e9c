"""Options of all kinds of layers, as bases of the sections that they belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_packed.config.kinds.layer_kind import KINDS

if TYPE_CHECKING:
    # The bases for type checkers. Another kind is found without an entry here.
    from megatron_packed.config.kinds.attention import AttentionKernels, AttentionOptions
    from megatron_packed.config.kinds.experts import ExpertOptions
    from megatron_packed.config.kinds.gated_delta_net import (
        GatedDeltaNetCommunication,
        GatedDeltaNetKernels,
        GatedDeltaNetOptions,
    )
    from megatron_packed.config.kinds.mamba import MambaCommunication, MambaKernels, MambaOptions

    class KindModelOptions(ExpertOptions, AttentionOptions, GatedDeltaNetOptions, MambaOptions): ...

    class KindKernels(AttentionKernels, GatedDeltaNetKernels, MambaKernels): ...

    class KindCommunication(GatedDeltaNetCommunication, MambaCommunication): ...

else:
    KindModelOptions, KindKernels, KindCommunication = map(
        KINDS.options_of, ("model", "training", "parallel")
    )
