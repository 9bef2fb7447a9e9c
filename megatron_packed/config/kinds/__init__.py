"""Kinds of layers, one module for each: its options, their rules, and a record of its properties.

Every module of this folder with a record `KIND` adds a kind; no list names the modules.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.config.kinds.layer_kind import KINDS as KINDS
    from megatron_packed.config.kinds.layer_kind import LayerKind as LayerKind
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__, {"layer_kind": ["KINDS", "LayerKind"]})
