"""Write the checkpoint of megatron-core 0.19.2 that a unit test reads, with TP 2 and its optimizer.

The folder of the test also gets megatron-core's logits and the losses of its next steps.
"""

from __future__ import annotations

import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch

import common.megatron_core as core
from common import TESTS
from common.megatron_training import documents_of
from megatron_checkpoints import TOKENS, on_rank, spawn

TARGET = TESTS / "unit" / "models" / "convert" / "megatron_core"
PATTERN = "MG*E-"
SMALL: dict[str, Any] = {
    "hybrid_layer_pattern": PATTERN,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "kv_channels": 4,
    "ffn_hidden_size": 8,
    "mamba_num_heads": 2,
    "mamba_head_dim": 8,
    "mamba_state_dim": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_num_value_heads": 2,
    "moe_ffn_hidden_size": 4,
    "moe_shared_expert_intermediate_size": 4,
}


def on_small_rank(rank: int, world: int, *arguments: Any) -> None:
    """Save a checkpoint of the small model, on one rank."""
    core.ARGS.update(SMALL)
    core.PATTERN = PATTERN
    on_rank(rank, world, "hybrid", *arguments)


def main() -> int:
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        one, two = (str(Path(temporary) / name) for name in ("one", "tp2"))
        spawn(on_small_rank, 1, 1, "one", one, None)
        spawn(on_small_rank, 2, 2, "tp2", two, one)
        with tarfile.open(TARGET / "checkpoint.tar.xz", "w:xz") as archive:
            for path in sorted(Path(two).iterdir()):
                archive.add(path, path.name)
        found = torch.load(f"{one}.pt")
    expected = {
        "tokens": TOKENS.tolist(),
        "logits": [[round(x, 7) for x in row] for row in found["float32"][::8].tolist()],
        "documents": documents_of(7).tolist(),
        "losses": found["after"],
    }
    (TARGET / "expected.json").write_text(json.dumps(expected) + "\n")
    for path in sorted(TARGET.iterdir()):
        print(f"{path.name}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
