"""All supported Hugging Face families by ``model_type``."""

from __future__ import annotations

from megatron_packed.models.convert.families.llama import LLAMA, MIXTRAL
from megatron_packed.models.convert.families.nemotron_h import NEMOTRON_H

FAMILIES = {family.model_type: family for family in (NEMOTRON_H, LLAMA, MIXTRAL)}
"""Families in the order in which an export of a trained model tries them."""
