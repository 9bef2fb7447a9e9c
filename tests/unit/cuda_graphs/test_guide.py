"""The guide to CUDA graphs lists the reasons that the code gives."""

import re
from pathlib import Path

from megatron_packed.cuda_graphs import fallback_reasons

PAGE = Path(__file__).parents[3] / "docs" / "cuda_graphs.md"
PLACEHOLDER = 7


def test_guide_lists_every_reason_of_a_micro_batch() -> None:
    """docs/cuda_graphs.md lists each reason why a complete micro-batch runs eagerly."""
    listed = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)
    reasons = {
        fallback_reasons.ADDRESSES_CHANGED,
        fallback_reasons.NO_CAPTURE_SIZE,
        fallback_reasons.NO_GRAPHS_OF_SIZE,
        fallback_reasons.more_documents(PLACEHOLDER).replace("7", "N"),
        fallback_reasons.more_documents_elsewhere(PLACEHOLDER).replace("7", "N"),
        fallback_reasons.other_tokens(PLACEHOLDER).replace("7", "T"),
    }
    assert reasons <= set(listed)
