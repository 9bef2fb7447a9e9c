"""Measures the time of one generated token after short and long texts.

    python benchmarks/generation.py

A hybrid model of hidden size 512 with two attention layers has read texts of 128 and of 2,048
tokens. `step` adds one token to each document of a batch, with the states that the layers keep.
`recompute` is one forward pass over the complete text, the cost of a token without states. The
lengths take turns. The last column is the time of a step divided by that of the shortest text,
call by call. `prefill` reads all prompts of the batch in one pack.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import harness
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.decoder import Decoder
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.packed.params import PackedSeqParams
from workloads import device_from

LENGTHS = (128, 2048)
BATCHES = (1, 32)
VOCAB = 32768


def model_on(device: torch.device, hidden_size: int) -> HybridModel:
    config = ModelConfig(
        hybrid_layer_pattern="M-*-M-*-",
        hidden_size=hidden_size,
        num_attention_heads=hidden_size // 64,
        num_query_groups=max(1, hidden_size // 128),
        mamba_num_groups=1,
        position_embedding_type="rope",
        add_bias_linear=False,
        normalization="RMSNorm",
        squared_relu=True,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return HybridModel(
        config, vocab_size=VOCAB, max_positions=2 * max(LENGTHS), device=device, dtype=dtype
    ).eval()


def measure(model: HybridModel, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Return the times of each length for one batch size."""
    device = model.embedding.weight.device
    prompts = {
        length: [[(7 * n + at) % VOCAB for at in range(length)] for n in range(batch)]
        for length in LENGTHS
    }
    decoders = {length: Decoder(model) for length in LENGTHS}
    prefill = {
        length: harness.wall(
            lambda length=length: decoders[length].prefill(prompts[length]), warm=2, repeats=rounds
        )
        for length in LENGTHS
    }
    tokens = list(range(batch))
    steps = harness.interleaved_seconds(
        {
            str(length): lambda decoder=decoder: decoder.step(tokens)
            for length, decoder in decoders.items()
        },
        warm=3,
        repeats=2 * rounds,
    )
    rows = []
    for length in LENGTHS:
        text = torch.tensor(prompts[length][0], dtype=torch.int32, device=device)
        packed = PackedSeqParams.from_lengths([length], length, device=device)
        with torch.no_grad():
            recompute = harness.wall(
                lambda text=text, packed=packed: model.hidden_states(text, model.prepare(packed)),
                warm=2,
                repeats=rounds,
            )
        rows.append(
            {
                "documents": batch,
                "tokens": length,
                "prefill_ms": prefill[length],
                "recompute_ms": recompute,
                "step_ms": harness.Spread.of(steps[str(length)]),
                "ratio": harness.Spread.of_ratios(steps[str(length)], steps[str(LENGTHS[0])]),
            }
        )
    return rows


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    return [
        {
            "documents": row["documents"],
            "tokens of the text": row["tokens"],
            "prefill ms": harness.shown(row["prefill_ms"]),
            "recompute ms": harness.shown(row["recompute_ms"]),
            "step ms": harness.shown(row["step_ms"]),
            f"step / step at {LENGTHS[0]}": harness.shown(row["ratio"]),
        }
        for row in results["rows"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden-size", type=int, default=512, help="hidden size (default 512)")
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=BATCHES,
        help="numbers of documents (default 1 and 32)",
    )
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    model = model_on(device_from(arguments.device), arguments.hidden_size)
    rounds = 2 if arguments.quick else 20
    results: dict[str, Any] = {"hidden_size": arguments.hidden_size, "rows": []}
    for batch in arguments.batches:
        results["rows"] += measure(model, batch, rounds)
        path = harness.save("generation", results, folder=arguments.results)
    print(harness.table(rows_of(harness.plain(results))))
    print(path)


if __name__ == "__main__":
    main()
