"""Which implementation each op of a model uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Backends:
    """Backend names by op, as `megatron_packed.ops.dispatch` understands them. ``auto`` takes the fastest that fits."""

    varlen_attention: str = "auto"
    zigzag_attention: str = "auto"
    rope: str = "auto"
    rms_norm: str = "auto"
    gated_rms_norm: str = "auto"
    activation: str = "auto"
    causal_conv1d: str = "auto"
    ssd: str = "auto"
    permute: str = "auto"
    grouped_mlp: str = "auto"
    cross_entropy: str = "auto"
    deterministic: bool = False
    """Ask kernels that have a choice for their run-to-run deterministic variant."""

    @classmethod
    def of(cls, backends: Backends | Mapping[str, str] | None) -> Backends:
        """A mapping from op to backend name as `Backends`; ops that are not named, or all for None, get ``auto``."""
        return backends if isinstance(backends, cls) else cls(**(backends or {}))

    @classmethod
    def reference(cls) -> Backends:
        """Plain PyTorch everywhere: the oracle of every other choice."""
        return cls(**{field.name: "reference" for field in fields(cls) if field.name != "deterministic"})
