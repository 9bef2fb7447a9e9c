"""Options of all kinds of layers, as bases of the sections that they belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_packed.config.kinds.layer_kind import KINDS

if TYPE_CHECKING:
    # The bases with options that modules of no kind read. Functions of a kind read the class of its
    # own options, and need no entry here.
    from megatron_packed.config.kinds.attention import AttentionKernels, AttentionOptions
    from megatron_packed.config.kinds.experts import ExpertOptions
    from megatron_packed.config.kinds.mamba import MambaOptions
    from megatron_packed.config.section import Section

    class KindModelOptions(ExpertOptions, AttentionOptions, MambaOptions): ...

    class KindKernels(AttentionKernels): ...

    class KindCommunication(Section): ...

else:
    KindModelOptions, KindKernels, KindCommunication = map(
        KINDS.options_of, ("model", "training", "parallel")
    )
