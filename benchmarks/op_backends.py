"""Tests and times every backend of every op: errors, isolation, determinism, capture and replay.

    python benchmarks/op_backends.py [op ...]

- Errors are relative norms of the difference to the float32 reference on the same inputs, for the
  output and every gradient. They are divided by the errors of plain PyTorch in bf16, which a kernel
  may exceed by a factor of two. Plain PyTorch is the reference under ``torch.autocast``, so that
  matrix products take bf16 operands as they do in a kernel.
- Isolation changes one token of one document. It counts the rows of other documents whose outputs
  or input gradients changed in any bit.
- Replay captures forward and backward once and compares the replay with eager on other packings.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

import harness
from megatron_packed.ops.activation.api import OP as ACTIVATION
from megatron_packed.ops.activation.api import activation
from megatron_packed.ops.backend_dispatch import NoBackendError, Op
from megatron_packed.ops.causal_conv1d.api import OP as CONV
from megatron_packed.ops.causal_conv1d.api import causal_conv1d
from megatron_packed.ops.cross_entropy.api import OP as CROSS_ENTROPY
from megatron_packed.ops.cross_entropy.api import linear_cross_entropy
from megatron_packed.ops.gated_rms_norm.api import OP as GATED_NORM
from megatron_packed.ops.gated_rms_norm.api import gated_rms_norm
from megatron_packed.ops.grouped_mlp.api import OP as GROUPED_MLP
from megatron_packed.ops.grouped_mlp.api import grouped_mlp
from megatron_packed.ops.permute.api import permute, unpermute
from megatron_packed.ops.rms_norm.api import OP as RMS_NORM
from megatron_packed.ops.rms_norm.api import rms_norm
from megatron_packed.ops.rope.api import OP as ROPE
from megatron_packed.ops.rope.api import apply_rope, rope_tables
from megatron_packed.ops.router_logits.api import OP as ROUTER
from megatron_packed.ops.router_logits.api import router_logits
from megatron_packed.ops.ssd.api import OP as SSD
from megatron_packed.ops.ssd.api import ssd
from megatron_packed.ops.varlen_attention.api import OP as ATTENTION
from megatron_packed.ops.varlen_attention.api import varlen_attention
from megatron_packed.packed.params import PackedSeqParams

T, CAPACITY = 4096, 32
PACKINGS = [
    # shorter than T: padding follows the last document
    [1, 2, 3, 127, 128, 129, 255, 700, 1, 1200, 500, 1, 3],
    [4096],
    [17] * 30 + [2000, 1586],
]
VICTIM = 7
"""Document of the first packing in which the isolation test changes one token.

The token is in the middle of a chunk that the document shares with other documents.
"""


READS_ON_THE_HOST = ("recurrence",)
"""Reference backends that read offsets on the host and so cannot be captured."""
ROUNDING = 2.0**-9
"""Unit roundoff of bf16. The ratio uses this value if the error of plain PyTorch is smaller."""


@dataclass
class Case:
    """Inputs of one op, and the function that calls the op on the rows of a pack.

    ``call(backend, tensors, packed)`` returns one output with a row per token. ``rows`` are inputs
    with one row per token, ``weights`` inputs that all tokens share. Every input gets a gradient.
    """

    op: Op
    rows: dict[str, tuple[int, ...]]
    weights: dict[str, Callable[[torch.Generator], Tensor]]
    call: Callable[[str, dict[str, Tensor], PackedSeqParams], Tensor]
    fp32: tuple[str, ...] = ()
    """Inputs that stay float32."""
    scale: dict[str, float] = field(default_factory=dict)


def gaussian(*shape: int, scale: float = 1.0) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: scale * torch.randn(shape, generator=generator)


@lru_cache(maxsize=2)
def _routes(device: torch.device) -> Tensor:
    """Return ``(T, 2)`` indices: two of eight experts for every token."""
    return torch.rand(T, 8, generator=torch.Generator().manual_seed(3)).topk(2).indices.to(device)


def _moe(backend: str, t: dict[str, Tensor], packed: PackedSeqParams) -> Tensor:
    ids_TK = _routes(t["x"].device)
    moved = permute(
        t["x"], ids_TK, 8, packed.valid, backend="auto" if backend != "reference" else "reference"
    )
    y_RD = grouped_mlp(
        moved.x_RD, t["w1"], t["w2"], moved.offsets_E, activation="squared_relu", backend=backend
    )
    weights_TK = torch.full(ids_TK.shape, 0.5, device=t["x"].device, dtype=torch.float32)
    return unpermute(y_RD, moved, weights_TK)


def _router(backend: str, t: dict[str, Tensor], packed: PackedSeqParams) -> Tensor:
    # A router computes in float32 in every precision, so plain PyTorch does so too.
    with torch.autocast(t["x"].device.type, enabled=False):
        return router_logits(t["x"], t["w"], backend=backend)


def _loss(backend: str, t: dict[str, Tensor], packed: PackedSeqParams) -> Tensor:
    labels = (torch.arange(T, device=t["x"].device) * 7919) % 1000
    mask = packed.valid.float()
    loss_sum, _ = linear_cross_entropy(
        t["x"], t["w"], labels, mask, vocab_size=1000, backend=backend
    )
    return loss_sum.reshape(1)


def cases() -> dict[str, Case]:
    heads, groups, head_dim = 8, 2, 128
    nheads, headdim, ngroups, state = 16, 64, 2, 128
    channels = 1536
    cos, sin = rope_tables(T, head_dim, 10000.0)
    tables = {
        "cpu": (cos, sin),
        "cuda": (cos.cuda(), sin.cuda()) if torch.cuda.is_available() else None,
    }

    def attention(
        backend: str, t: dict[str, Tensor], p: PackedSeqParams, *, deterministic: bool = False
    ) -> Tensor:
        return varlen_attention(
            t["q"],
            t["k"],
            t["v"],
            p.cu_seqlens,
            p.max_seqlen,
            seq_idx_1T=p.seq_idx,
            deterministic=deterministic,
            backend=backend,
        )

    def rope(backend: str, t: dict[str, Tensor], p: PackedSeqParams) -> Tensor:
        q, k = apply_rope(
            t["q"], t["k"], p.position_ids, *tables[t["q"].device.type], backend=backend
        )
        return torch.cat([q, k], dim=1)

    def scan(backend: str, t: dict[str, Tensor], p: PackedSeqParams) -> Tensor:
        return ssd(
            t["x"],
            t["dt"],
            t["A_log"],
            t["B"],
            t["C"],
            t["D"],
            t["dt_bias"],
            p.seq_idx,
            p.cu_seqlens,
            chunk_size=128,
            backend=backend,
        )

    qkv = {"q": (heads, head_dim), "k": (groups, head_dim), "v": (groups, head_dim)}
    per_head = {
        "A_log": lambda g: torch.log(1 + 15 * torch.rand(nheads, generator=g)),
        "D": gaussian(nheads),
        "dt_bias": lambda g: -5 + 3 * torch.rand(nheads, generator=g),
    }
    return {
        "attention": Case(ATTENTION, qkv, {}, attention),
        "attention_deterministic": Case(
            ATTENTION, qkv, {}, lambda b, t, p: attention(b, t, p, deterministic=True)
        ),
        "ssd": Case(
            SSD,
            {"x": (nheads, headdim), "dt": (nheads,), "B": (ngroups, state), "C": (ngroups, state)},
            per_head,
            scan,
            fp32=("A_log", "D", "dt_bias"),
        ),
        "causal_conv1d": Case(
            CONV,
            {"x": (channels,)},
            {"w": gaussian(channels, 4, scale=0.5), "b": gaussian(channels, scale=0.1)},
            lambda b, t, p: causal_conv1d(t["x"], t["w"], t["b"], p.seq_idx, backend=b),
        ),
        "rope": Case(ROPE, {"q": (heads, head_dim), "k": (groups, head_dim)}, {}, rope),
        "rms_norm": Case(
            RMS_NORM,
            {"x": (channels,)},
            {"w": gaussian(channels)},
            lambda b, t, p: rms_norm(t["x"], t["w"], 1e-5, backend=b),
        ),
        "gated_rms_norm": Case(
            GATED_NORM,
            {"x": (channels,), "z": (channels,)},
            {"w": gaussian(channels)},
            lambda b, t, p: gated_rms_norm(
                t["x"], t["z"], t["w"], 1e-5, group_size=channels // 2, backend=b
            ),
        ),
        "activation_squared_relu": Case(
            ACTIVATION,
            {"x": (channels,)},
            {},
            lambda b, t, p: activation(t["x"], "squared_relu", backend=b),
        ),
        "activation_swiglu": Case(
            ACTIVATION,
            {"x": (channels,)},
            {},
            lambda b, t, p: activation(t["x"], "swiglu", backend=b),
        ),
        "moe": Case(
            GROUPED_MLP,
            {"x": (512,)},
            {"w1": gaussian(8, 256, 512, scale=0.04), "w2": gaussian(8, 512, 256, scale=0.06)},
            _moe,
        ),
        "router_logits": Case(
            ROUTER,
            {"x": (2688,)},
            {"w": gaussian(128, 2688, scale=0.02)},
            _router,
            fp32=("w",),
        ),
        "cross_entropy": Case(
            CROSS_ENTROPY, {"x": (512,)}, {"w": gaussian(1024, 512, scale=0.05)}, _loss
        ),
    }


def make_inputs(case: Case, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = {
        name: torch.randn((T, *shape), generator=generator) for name, shape in case.rows.items()
    }
    # rounded to bf16, so that both precisions get the same numbers
    rows = {name: value.bfloat16().float() for name, value in rows.items()}
    weights = {name: make(generator) for name, make in case.weights.items()}
    return rows | {k: v if k in case.fp32 else v.bfloat16().float() for k, v in weights.items()}


def on_device(
    case: Case, inputs: dict[str, Tensor], dtype: torch.dtype, device: str
) -> dict[str, Tensor]:
    """Return the inputs as leaves that require gradients.

    They have ``dtype``, except those that the case keeps in float32.
    """
    return {
        name: value.to(device, torch.float32 if name in case.fp32 else dtype).requires_grad_()
        for name, value in inputs.items()
    }


def evaluate(
    case: Case,
    backend: str,
    inputs: dict[str, Tensor],
    packed: PackedSeqParams,
    dtype: torch.dtype,
    device: str,
    *,
    autocast: bool = False,
) -> dict[str, Tensor]:
    """Return the output and every gradient. The upstream gradient is the same in every call."""
    leaves = on_device(case, inputs, dtype, device)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        output = case.call(backend, leaves, packed)
    upstream = _upstream(output)
    gradients = torch.autograd.grad(output, list(leaves.values()), upstream)
    return {"output": output.detach(), **{f"d_{name}": g for name, g in zip(leaves, gradients)}}


def _upstream(output: Tensor) -> Tensor:
    """Return a fixed random upstream gradient.

    The values are rounded to bf16, so that both precisions get the same numbers.
    """
    values = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
    return values.bfloat16().to(output.device, output.dtype)


def relative_errors(found: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    return {
        name: float(
            (
                (found[name].float() - ref.float()).norm() / ref.float().norm().clamp(min=1e-30)
            ).item()
        )
        for name, ref in reference.items()
    }


def isolation(case: Case, backend: str, dtype: torch.dtype, device: str) -> dict[str, object]:
    """Count the rows of other documents that change when one token of document ``VICTIM`` changes.

    The result also contains the rows that change between two runs on the same input.
    """
    lengths = PACKINGS[0]
    packed = PackedSeqParams.from_lengths(lengths, T, device=device)
    start = sum(lengths[:VICTIM])
    inputs = make_inputs(case)
    changed = {name: value.clone() for name, value in inputs.items()}
    for name in case.rows:
        changed[name][start + 50] += 3.0
    others = torch.ones(T, dtype=torch.bool)
    others[start : start + lengths[VICTIM]] = False
    before = evaluate(case, backend, inputs, packed, dtype, device)
    after = evaluate(case, backend, changed, packed, dtype, device)
    again = evaluate(case, backend, inputs, packed, dtype, device)
    return {
        name: {
            "perturbed": _changed_rows(before[name], after[name], others.to(device)),
            "same_input_again": _changed_rows(before[name], again[name], others.to(device)),
        }
        for name in ("output", *(f"d_{row}" for row in case.rows))
        if before[name].shape[0] == T
    }


def _changed_rows(before: Tensor, after: Tensor, rows_T: Tensor) -> dict[str, float]:
    difference_R = (before.float() - after.float())[rows_T].abs().flatten(1).amax(1)
    return {"rows": int((difference_R > 0).sum()), "max_abs": float(difference_R.max())}


def determinism(
    case: Case, backend: str, dtype: torch.dtype, device: str, runs: int = 5
) -> list[str]:
    """Return the names of the results that differ in any bit between runs."""
    packed = PackedSeqParams.from_lengths(PACKINGS[0], T, device=device)
    inputs = make_inputs(case)
    first = evaluate(case, backend, inputs, packed, dtype, device)
    differ = set()
    for _ in range(runs - 1):
        again = evaluate(case, backend, inputs, packed, dtype, device)
        differ |= {name for name, value in first.items() if not torch.equal(value, again[name])}
    return sorted(differ)


def replay(case: Case, backend: str, dtype: torch.dtype) -> dict[str, object]:
    """Capture on one packing and replay on all of them.

    The result lists the names whose bits differ from eager, and contains the largest relative
    error.
    """
    packs = [
        PackedSeqParams.from_lengths(row, T, CAPACITY, max_seqlen=T, device="cuda")
        for row in PACKINGS
    ]
    static = PackedSeqParams.from_lengths(PACKINGS[0], T, CAPACITY, max_seqlen=T, device="cuda")
    inputs = make_inputs(case)
    leaves = on_device(case, inputs, dtype, "cuda")
    upstream: list[Tensor] = []

    def step() -> dict[str, Tensor]:
        output = case.call(backend, leaves, static)
        if not upstream:
            upstream.append(_upstream(output))
        gradients = torch.autograd.grad(output, list(leaves.values()), upstream[0])
        return {"output": output.detach(), **{f"d_{name}": g for name, g in zip(leaves, gradients)}}

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    differ, worst = set(), 0.0
    for packed in (*packs, packs[0]):
        for name in ("cu_seqlens", "seq_idx", "position_ids", "valid"):
            getattr(static, name).copy_(getattr(packed, name))
        graph.replay()
        eager = evaluate(case, backend, inputs, packed, dtype, "cuda")
        for name, value in eager.items():
            if not torch.equal(value, results[name]):
                differ.add(name)
        worst = max(worst, *relative_errors(results, eager).values())
    milliseconds = harness.device_time(graph.replay, warm=3, repeats=20)
    return {"differ": sorted(differ), "max_relative": worst, "forward_backward_ms": milliseconds}


def attempt(function: Callable[..., object], *arguments: object) -> object:
    try:
        return function(*arguments)
    except Exception as error:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return f"failed: {type(error).__name__}: {str(error)[:300]}"


def measure(case: Case, backend: str, device: str) -> dict[str, object]:
    dtype = torch.bfloat16
    exact = PackedSeqParams.from_lengths(PACKINGS[0], T, device=device)
    inputs = make_inputs(case)
    reference = evaluate(case, "reference", inputs, exact, torch.float32, device)
    plain = relative_errors(
        evaluate(case, "reference", inputs, exact, dtype, device, autocast=True), reference
    )
    found = relative_errors(evaluate(case, backend, inputs, exact, dtype, device), reference)
    row: dict[str, object] = {
        "errors": found,
        "plain_bf16_errors": plain,
        "worst_ratio": max(found[name] / max(plain[name], ROUNDING) for name in found),
        "isolation": attempt(isolation, case, backend, dtype, device),
        "run_to_run_differ": attempt(determinism, case, backend, dtype, device),
    }
    if device == "cuda" and backend in READS_ON_THE_HOST:
        row["replay"] = "refused: the backend reads cu_seqlens on the host"
    elif device == "cuda":
        row["replay"] = attempt(replay, case, backend, dtype)
    return row


def isolation_summary(found: object) -> str:
    """Return 'bitwise', or the largest change of each result whose rows changed.

    The change between two runs on the same input follows in parentheses.
    """
    if not isinstance(found, dict):
        return str(found)[:60]
    parts = [
        f"{name} {both['perturbed']['max_abs']:.0e} (by itself {both['same_input_again']['max_abs']:.0e})"
        for name, both in found.items()
        if both["perturbed"]["rows"]
    ]
    return ", ".join(parts) or "bitwise"


def main() -> None:
    known = cases()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ops", nargs="*", help=f"from {list(known)} (default: all)")
    parser.add_argument("--name", default="op_backends")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results: dict[str, dict[str, object]] = {}
    rows = []
    for name in arguments.ops or known:
        case = known[name]
        results[name] = {}
        for backend in case.op.names():
            try:
                result: object = measure(case, backend, device)
            except NoBackendError as error:
                result = f"refused: {error}"
            except Exception as error:
                result = f"failed: {type(error).__name__}: {str(error)[:300]}"
            results[name][backend] = result
            if isinstance(result, str):
                rows.append({"op": name, "backend": backend, "isolation": result[:90]})
                continue
            again = result.get("replay", "")
            rows.append(
                {
                    "op": name,
                    "backend": backend,
                    "worst/plain": f"{result['worst_ratio']:.2f}",
                    "max error": f"{max(result['errors'].values()):.1e}",
                    "isolation": isolation_summary(result["isolation"]),
                    "run to run": ",".join(result["run_to_run_differ"]) or "bitwise",
                    "replay": (",".join(again["differ"]) or "bitwise")
                    if isinstance(again, dict)
                    else str(again)[:60],
                    "replay error": f"{again['max_relative']:.1e}"
                    if isinstance(again, dict)
                    else "",
                    "graph ms": again["forward_backward_ms"].median
                    if isinstance(again, dict)
                    else "",
                }
            )
            print({k: rows[-1][k] for k in rows[-1]}, flush=True)
        path = harness.save(arguments.name, results)
    print(harness.table([{k: row.get(k, "") for k in max(rows, key=len)} for row in rows]))
    print(path)


if __name__ == "__main__":
    main()
