"""Choice of the backend of each op, and of the implementation of linear layers and norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Backends:
    """Backend name of each op, for `megatron_packed.ops.backend_dispatch`.

    ``auto`` selects the fastest backend that supports the inputs.
    """

    varlen_attention: str = "auto"
    context_parallel_attention: str = "auto"
    rope: str = "auto"
    rms_norm: str = "auto"
    gated_rms_norm: str = "auto"
    activation: str = "auto"
    dense_mlp: str = "auto"
    residual_projection: str = "auto"
    causal_conv1d: str = "auto"
    ssd: str = "auto"
    gated_delta_rule: str = "auto"
    permute: str = "auto"
    grouped_mlp: str = "auto"
    router_logits: str = "auto"
    lora_expand: str = "auto"
    cross_entropy: str = "auto"
    deterministic: bool = False
    """True selects the run-to-run deterministic variant of kernels that offer one."""
    transformer_impl: str = "local"
    """Implementation of parallel linear layers and norms: ``local`` or ``transformer_engine``.

    With ``transformer_engine``, ``auto`` attention also uses TransformerEngine.
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
    def from_mapping(cls, backends: Backends | Mapping[str, str | bool] | None) -> Backends:
        """Convert a mapping from field to value to `Backends`; other ops get ``auto``.

        For None all ops get ``auto``. A `Backends` is returned unchanged.
        """
        if isinstance(backends, Backends):
            return backends
        values: dict[str, Any] = dict(backends or {})
        return cls(**values)

    @classmethod
    def reference(cls) -> Backends:
        """Return the plain PyTorch backend for every op, with which tests compare the others."""
        ops = (
            field.name
            for field in fields(cls)
            if field.name not in ("deterministic", "transformer_impl")
        )
        values: dict[str, Any] = dict.fromkeys(ops, "reference")
        products = ("dense_mlp", "residual_projection", "lora_expand")
        return cls(**values | dict.fromkeys(products, "torch"))
