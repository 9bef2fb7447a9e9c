"""Writes the measured rates by which `megatron-packed plan` computes the time of a step.

    python benchmarks/plan_rates.py

The script runs nothing on a GPU. It reads `benchmarks/results`, and writes
`megatron_packed/models/estimate/gpu_rates.json`. Each rate has the names of the result files that it
comes from. Rates come from benchmarks of kernels and exchanges, and from profiles of steps. No rate
is fitted to the time of a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import harness
from capacity_cost import CONFIGS
from megatron_packed.layers.moe.expert_room import HEAD_ROOM
from megatron_packed.models.estimate.gpu_rates import TABLE

TOKENS_OF_PRODUCTS = 4096
PRODUCTS = {
    "shard8b in_proj": (4096, 2320),
    "shard8b out_proj": (1024, 4096),
    "shard8b fc1": (4096, 2688),
    "shard8b fc2": (2688, 4096),
    "shard8b qkv": (4096, 768),
    "hybrid1b in_proj": (2048, 10304),
    "hybrid1b fc1": (2048, 8192),
    "hybrid1b fc2": (8192, 2048),
    "head": (4096, 16384),
}
"""Layer of `cublas_workspace.json` -> input and output features."""
HEADS, HEAD_DIM, TOKENS = 16, 128, 8192
"""Sizes of `attention_head_256.json`."""
FULL = "8,192 tokens"
SIZE_OF_STATE = {64: "state 64", 128: FULL, 256: "state 256"}
SHORT = "1,024 tokens"
"""Sizes of `ssd_two_tiles.json`."""
TENSORS = {
    "rms_norm": ("rms_norm, residual", 2),
    "squared_relu": ("squared_relu", 2),
    "gelu": ("gelu", 2),
    "swiglu": ("swiglu", 3),
    "sigmoid_gate": ("sigmoid_gate", 3),
    "gated_rms_norm": ("gated_rms_norm, Mamba", 3),
    "causal_conv1d": ("causal_conv1d", 2),
    "rope": ("rope", 2),
    "softmax of the loss": ("softmax of the loss", 2),
}
"""Op, or kind of an activation -> kernel of `elementwise.json`, and how many tensors as large as the
result its forward pass moves."""
Entry = dict[str, Any]


def results(name: str) -> Any:
    return json.loads((harness.RESULTS / f"{name}.json").read_text())["results"]


def entry(value: Any, *sources: str, **kernels: str) -> Entry:
    """Return a rate with its result files, and the kernel of each op that an option may choose."""
    measured_with = {"kernels": kernels} if kernels else {}
    return {"value": value, "results": list(sources), **measured_with}


def rounded(value: float) -> float:
    """Return a number with four digits, which is more than its measurement has."""
    return float(f"{value:.4g}")


def median(spread: Sequence[float], unit: float = 1e-3) -> float:
    """Return the median of a measured spread in seconds; ``unit`` is that of the spread."""
    return spread[0] * unit


def product_rates() -> dict[str, Entry]:
    """Return FLOP/s of products with weights: of the mean time of an operation over all products."""
    rows = results("cublas_workspace")["none"]["rows"]
    seconds = [
        median(row["us"], 1e-6)
        / (2 * TOKENS_OF_PRODUCTS * np.prod(PRODUCTS[row["layer"]], dtype=float))
        for row in rows
    ]
    return {"product_flops": entry(rounded(1 / float(np.mean(seconds))), "cublas_workspace")}


def grouped_rates(copy_bytes: float) -> dict[str, Entry]:
    """Return FLOP/s of grouped products without the time in which their weights travel."""
    grouped = results("grouped_products")
    flops = seconds = 0.0
    for name, size in grouped["sizes"].items():
        weights = size["experts"] * size["channels"] * size["hidden"]
        for kind, times in grouped["times"][name].items():
            moved = weights * (8 if kind == "weight gradient" else 2)
            flops += 2 * size["rows"] * size["channels"] * size["hidden"]
            seconds += median(times["quack"]) - moved / copy_bytes
    return {"grouped_flops": entry(rounded(flops / seconds), "grouped_products")}


def attention_rates() -> dict[str, Entry]:
    """Return the time of attention, by least squares over packs of different lengths and heads."""
    rows = []
    for name, size in results("capacity_cost").items():
        heads = CONFIGS[name.rpartition("_")[0]]["heads"]
        lengths = np.array(size["lengths"], dtype=float)
        exact = size["attention"]["flash_attn_4"]["longest"]["exact"]
        rows.append((size["tokens"], heads, np.square(lengths).sum() / 2, median(exact["ms"])))
    kernel = results("attention_head_256")[0]["backends"]["flash_attn_4"]
    longest = 5 * TOKENS // 8
    lengths = np.array([longest, *((TOKENS - longest) * part // 66 for part in range(1, 12))])
    both = median(kernel["forward_backward_ms"])
    rows.append((TOKENS, HEADS, np.square(lengths).sum() / 2, both))
    times = np.array([row[3] for row in rows])
    terms = np.array(
        [
            (3 * 4 * pairs * heads * HEAD_DIM, tokens * heads * HEAD_DIM, 1.0)
            for tokens, heads, pairs, _ in rows
        ]
    )
    flop, element, call = np.linalg.lstsq(terms / times[:, None], np.ones(len(times)))[0]
    sources = ("capacity_cost", "attention_head_256")
    return {
        "attention_flops": entry(rounded(1 / flop), *sources, varlen_attention="flash_attn_4"),
        "attention_element": entry(rounded(element), *sources),
        "attention_call": entry(rounded(call), *sources),
        "attention_forward": entry(rounded(median(kernel["forward_ms"]) / both), sources[1]),
    }


def scan_rates() -> dict[str, Entry]:
    """Return the times of the Mamba-2 scan, and of the gated delta rule."""
    scans, source = results("ssd_two_tiles"), "ssd_two_tiles"
    passes = ("forward", "forward + backward")

    def seconds(name: str) -> list[float]:
        return [median(scans["times"][name][each]["triton"]) for each in passes]

    full, short = scans["sizes"][FULL], scans["sizes"][SHORT]
    share = short["tokens"] / full["tokens"]
    calls = [(b - share * a) / (1 - share) for a, b in zip(seconds(FULL), seconds(SHORT))]
    elements = full["tokens"] * full["heads"] * full["head_dim"]
    of_states = {
        str(size): [rounded((each - call) / elements) for each, call in zip(seconds(name), calls)]
        for size, name in SIZE_OF_STATE.items()
    }
    rule = results("gated_delta_rule")
    busy, size = rule["ratios"], rule["size"]  # single calls contain gaps between launches
    entries = size["tokens"] * size["value_heads"] * size["value_dim"] * size["key_dim"]
    forward, backward = (median(busy[name]["triton"]) for name in ("forward", "backward"))
    of_rule = [forward / entries, (forward + backward) / entries]
    return {
        "scan_element": entry(of_states, source, ssd="triton"),
        "scan_call": entry([rounded(call) for call in calls], source),
        "state_entry": entry(
            {"gated_delta_rule": [rounded(each) for each in of_rule]},
            "gated_delta_rule",
            gated_delta_rule="triton",
        ),
    }


def op_rates(copy_bytes: float) -> dict[str, Entry]:
    """Return the times of other ops for each byte of the result."""
    kernels = results("elementwise")["kernels"]
    rates = {}
    for op, (name, tensors) in TENSORS.items():
        kernel = kernels[name]
        size = kernel["forward"]["bytes"] / tensors
        forward = median(kernel["forward"]["ms"])
        backward = median(kernel["backward"]["ms"]) if "backward" in kernel else 0.0
        rates[op] = [rounded(forward / size), rounded((forward + backward) / size)]
    # A permutation reads and writes each row in each pass.
    rates["permute"] = [rounded(2 / copy_bytes), rounded(4 / copy_bytes)]
    return {
        "op_byte": entry(rates, "elementwise", causal_conv1d="triton"),
        "copy_bytes": entry(copy_bytes, "elementwise"),
    }


def edge_rates() -> dict[str, Entry]:
    """Return the rates of the profile of a whole step: small kernels, and the update."""
    run = results("step_edge")["runs"]["full_iteration"]
    kernels: list[tuple[str, float, float]] = run["kernel_ms"]

    def of(name: str) -> float:
        return sum(ms for kernel, ms, _ in kernels if name in kernel) * 1e-3

    parameters = 1067405568  # of hybrid_1b
    gaps = (run["short_gaps_ms"] + run["long_gaps_ms"]) * 1e-3 / run["launches"]
    small = [(ms, calls) for name, ms, calls in kernels if "elementwise" in name and ms < 0.03]
    kernel = sum(ms for ms, _ in small) * 1e-3 / sum(calls for _, calls in small)
    update = of("FusedOptimizer") + of("NormTwoOps<float")
    return {
        "kernel": entry(rounded(kernel + gaps), "step_edge"),
        "update_element": entry(rounded(update / parameters), "step_edge", adamw="torch"),
        "zero_element": entry(rounded(of("FillFunctor<float>") / parameters), "step_edge"),
    }


def exchange_rates() -> dict[str, Entry]:
    """Return the rates of exchanges between two and four GPUs."""
    parts = results("exchanges")
    small, large = "8", "185"
    times = {
        way: [parts[size][way]["us"] * 1e-6 for size in (small, large)]
        for way in ("nccl", "symmetric_memory, 16 MiB")
    }
    span = (int(large) - int(small)) * 1e6
    of_parts = {way: span / (last - first) for way, (first, last) in times.items()}
    call = times["nccl"][0] - int(small) * 1e6 / of_parts["nccl"]
    pair = results("layouts_2_hybrid1b_kinds")["hybrid1b"]["layouts"]
    elements = pair["one process"]["parameters"]
    graph = "full_iteration"
    gather = _exposed(pair["dp2 zero"]["graphs"][graph], "AllGather")
    copied = results("layouts_2_hybrid1b_cp_state")["hybrid1b"]["layouts"]["cp2 a2a copies"]
    reduce = _exposed(copied["graphs"][graph], "AllReduce_Sum_f32")
    of_four = four_gpus(call)
    two = {
        "all_gather": elements * 2 / 2 / gather,
        "all_reduce": elements * 4 / reduce,
        "all_to_all": of_parts["nccl"],
        "all_to_all_copies": of_parts["symmetric_memory, 16 MiB"],
    }
    # All-reduces and copies among four GPUs were not measured.
    of_four |= {"all_reduce": of_four["all_gather"], "all_to_all_copies": of_four["all_to_all"]}
    hidden = results("layouts_2_hybrid1b_cp_overlap")["hybrid1b"]["layouts"]["cp2 a2a zero overlap"]
    share = _overlapped_share(hidden["graphs"][graph])
    return {
        "exchange_call": entry(rounded(call), "exchanges"),
        "exchanges": entry(
            {
                "2": {kind: rounded(rate) for kind, rate in two.items()},
                "4": {kind: rounded(of_four[kind]) for kind in two},
            },
            "exchanges",
            "layouts_2_hybrid1b_kinds",
            "layouts_2_hybrid1b_cp_state",
            "command_line_runs",
        ),
        "overlapped_share": entry(rounded(share), "layouts_2_hybrid1b_cp_overlap"),
    }


def four_gpus(call: float) -> dict[str, float]:
    """Return the rates of exchanges between four GPUs, from a profile of an expert-parallel step.

    All-gathers carry the parameters of the dense layers. All-to-alls carry the rows of balanced
    experts, with the head room of the parts in CUDA graphs.
    """
    profile = results("command_line_runs")["profile"]
    rows = HEAD_ROOM * profile["rows"]
    messages = {
        "all_gather": profile["dense_parameters"] * 2,
        "all_to_all": profile["all_to_all"]["calls"] * rows * profile["channels"] * 2,
    }
    return {
        kind: 0.75 * message / (profile[kind]["ms"] * 1e-3 - profile[kind]["calls"] * call)
        for kind, message in messages.items()
    }


def _exposed(profile: Mapping[str, Any], name: str) -> float:
    """Return the exposed seconds of a kind of exchange in the profile of a step."""
    return sum(ms for kernel, ms in profile["exposed"].items() if name in kernel) * 1e-3


def _overlapped_share(profile: Mapping[str, Any]) -> float:
    """Return the exposed share of sums of gradients that run beside the backward pass; nothing else
    of this step overlaps."""
    exposed = _exposed(profile, "ReduceScatter")
    others = profile["exposed_ms"] * 1e-3 - exposed
    return exposed / (profile["exchange_ms"] * 1e-3 - others)


def host_rates() -> dict[str, Entry]:
    copies = results("offload")["hybrid1b"]["copies"]["offload, 2 buffers"]
    rate = min(copies[way]["gb_per_s"][0] for way in ("DtoH", "HtoD")) * 1e9
    return {"host_bytes": entry(rounded(rate), "offload")}


def table() -> dict[str, dict[str, Entry]]:
    """Return the contents of the table of rates."""
    copy_bytes = results("elementwise")["copy_GB_per_s"] * 1e9
    return {
        "H200": {
            **product_rates(),
            **grouped_rates(copy_bytes),
            **attention_rates(),
            **scan_rates(),
            **op_rates(copy_bytes),
            **edge_rates(),
            **exchange_rates(),
            **host_rates(),
        }
    }


def rows_of() -> list[dict[str, object]]:
    """Return a row for each rate, with the result files that it comes from."""
    rates = next(iter(json.loads(TABLE.read_text()).values()))
    return [
        {
            "rate": name,
            "value": _shown(value),
            "measured by": ", ".join(
                f"`{result}.json` ({_date(result)})" for result in rate["results"]
            ),
        }
        for title, rate in rates.items()
        for name, value in _named(title, rate["value"])
    ]


def _named(title: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the rates of a mapping, each with its own name, or one rate."""
    if not isinstance(value, Mapping):
        yield title, value
        return
    for name, inner in value.items():
        yield from _named(f"{title}, {name}", inner)


def _shown(value: Any) -> str:
    """Return a rate, or a pair of rates, as text."""
    return " / ".join(f"{each:.4g}" for each in (value if isinstance(value, list) else [value]))


def _date(result: str) -> str:
    document = json.loads((harness.RESULTS / f"{result}.json").read_text())
    day: str = document["date"].split()[0]
    return day


if __name__ == "__main__":
    TABLE.write_text(json.dumps(table(), indent=1) + "\n")
