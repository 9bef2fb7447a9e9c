"""Options of all kinds of layers, as bases of the sections that they belong to."""

from __future__ import annotations

from types import new_class
from typing import TYPE_CHECKING

from megatron_packed.config.kinds.layer_kind import KINDS

if TYPE_CHECKING:
    # The bases for type checkers. Another kind is found without an entry here.
    from megatron_packed.config.kinds.attention import AttentionKernels, AttentionOptions
    from megatron_packed.config.kinds.experts import ExpertOptions
    from megatron_packed.config.kinds.gated_delta_net import (
        GatedDeltaNetKernels,
        GatedDeltaNetOptions,
    )
    from megatron_packed.config.kinds.mamba import MambaCommunication, MambaKernels, MambaOptions

    class KindModelOptions(ExpertOptions, AttentionOptions, GatedDeltaNetOptions, MambaOptions): ...

    class KindKernels(AttentionKernels, GatedDeltaNetKernels, MambaKernels): ...

    class KindCommunication(MambaCommunication): ...

else:

    def _joined(section: str) -> type:
        """Return a class with the options that all kinds add to a section, in order of the kinds."""
        added = [kind.options[section] for kind in KINDS.values() if section in kind.options]
        # Kinds may share a class, and a class may be a base of another one.
        bases = dict.fromkeys(
            kind_class
            for kind_class in added
            if sum(issubclass(other, kind_class) for other in {*added}) == 1
        )
        owners: dict[str, type] = {}
        for kind_class in added:
            for name in vars(kind_class).get("__annotations__", {}):
                if owners.setdefault(name, kind_class) is not kind_class:
                    raise ValueError(
                        f"{kind_class.__name__} and {owners[name].__name__} both have {name}"
                    )
        # Dataclass fields follow the bases from right to left.
        return new_class(section, tuple(reversed(bases)))

    KindModelOptions, KindKernels = _joined("model"), _joined("training")
    KindCommunication = _joined("parallel")
