"""Which implementation each op of a model uses, and whose linears and norms its layers are built
from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Backends:
    """Backend names by op, as `megatron_packed.ops.backend_dispatch` understands them. ``auto`` takes the
    fastest that fits.
    """

    varlen_attention: str = "auto"
    context_parallel_attention: str = "auto"
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
    transformer_impl: str = "local"
    """Whose parallel linears and norms: ``local`` or ``transformer_engine``, whose attention
    ``auto`` then is too.
    """

    def __post_init__(self) -> None:
        for op in (
            ("varlen_attention", "context_parallel_attention")
            if self.transformer_impl == "transformer_engine"
            else ()
        ):
            if getattr(self, op) == "auto":
                object.__setattr__(self, op, "transformer_engine")

    @classmethod
    def of(cls, backends: Backends | Mapping[str, str] | None) -> Backends:
        """A mapping from op to backend name as `Backends`; ops that are not named, or all for None,
        get ``auto``.
        """
        return backends if isinstance(backends, cls) else cls(**(backends or {}))

    @classmethod
    def reference(cls) -> Backends:
        """Plain PyTorch everywhere: the oracle of every other choice."""
        ops = (
            field.name
            for field in fields(cls)
            if field.name not in ("deterministic", "transformer_impl")
        )
        return cls(**dict.fromkeys(ops, "reference"))
