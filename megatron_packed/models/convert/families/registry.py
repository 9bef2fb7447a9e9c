"""All supported Hugging Face families by ``model_type``."""

from __future__ import annotations

from megatron_packed.models.convert.families.granite import BAMBA, GRANITE
from megatron_packed.models.convert.families.llama import (
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
)
from megatron_packed.models.convert.families.mamba2 import MAMBA2
from megatron_packed.models.convert.families.nemotron_h import NEMOTRON_H
from megatron_packed.models.convert.families.olmo_hybrid import OLMO_HYBRID
from megatron_packed.models.convert.families.qwen_hybrid import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_TEXT,
    QWEN3_5_TEXT,
    QWEN3_NEXT,
)

FAMILIES = {
    family.model_type: family
    for family in (
        NEMOTRON_H,
        LLAMA,
        MIXTRAL,
        QWEN3_NEXT,
        QWEN3_5_TEXT,
        QWEN3_5_MOE_TEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        OLMO_HYBRID,
        MISTRAL,
        QWEN2,
        QWEN3,
        QWEN3_MOE,
        MAMBA2,
        BAMBA,
        GRANITE,
    )
}
"""Families in the order in which an export of a trained model tries them."""
WRITTEN = tuple(name for name, family in FAMILIES.items() if family.architecture)
"""Families of which a new config.json can be written."""
