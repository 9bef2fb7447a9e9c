"""Measures the gated delta rule beside the kernels of FlashQLA, at eight sizes.

    PYTHONPATH=SITE python benchmarks/beside_flash_qla.py

SITE is a folder with FlashQLA and TileLang, without flash-attn 4: they need other versions of tvm-ffi.
FlashQLA has heads of 128 and no gates. ``kernels`` gets q and k of unit norm, the logarithms of the
decays and beta; ``whole`` computes them, as megatron_packed's kernels do, by PyTorch and FlashQLA's
norm. Each runs with and without its automatic parts (``auto_cp``). All get the lengths of the documents
on the host beforehand.

A call is forward and backward. Its time is that between events on the GPU, in rounds in which all take
turns. A ratio above 1 means that FlashQLA takes longer. Errors are norms relative to the reference in
float64. ``bits`` says whether two calls are equal bit for bit, and whether the first documents keep
their bits when the last one changes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import harness
from gated_delta_rule import FULL, NAMES, QUICK, Size, call_of, leaves, lengths_of
from harness import Spread
from megatron_packed.ops.gated_delta_rule.reference import gates
from workloads import device_from

SIZES = (
    FULL,
    FULL._replace(documents=1),
    FULL._replace(documents=200),
    FULL._replace(tokens=2048),
    FULL._replace(tokens=32768),
    FULL._replace(key_heads=4, value_heads=8),
    FULL._replace(key_heads=32),
    FULL._replace(value_heads=64),
)
OURS, KERNELS, WHOLE = "megatron_packed", "kernels", "whole"
ROUNDS = 5

Call = Callable[[], Tensor]


def flash_qla_call(
    tensors: Sequence[Tensor], lengths: list[int], whole: bool, auto_cp: bool
) -> tuple[Call, list[Tensor]]:
    """Return FlashQLA's call, and its inputs with gradients."""
    from flash_qla import chunk_gated_delta_rule
    from flash_qla.utils.index import prepare_varlen_metadata

    offsets = torch.tensor([0, *lengths]).cumsum(0)
    cu_seqlens = prepare_varlen_metadata(offsets.to(tensors[0].device), offsets)
    run = partial(chunk_gated_delta_rule, auto_cp=auto_cp, cu_seqlens=cu_seqlens)
    if whole:
        q, k, v, a, b, A_log, dt_bias = tensors

        def call() -> Tensor:
            g, beta = gates(a, b, A_log, dt_bias, torch.float32, allow_neg_eigval=False)
            inputs = (each[None] for each in (q, k, v, g, beta))
            o: Tensor = run(*inputs, use_qk_l2norm_in_kernel=True)[0][0]
            return o

        return call, list(tensors)
    q, k, v, a, b, A_log, dt_bias = (each.detach() for each in tensors)
    g, beta = gates(a, b, A_log, dt_bias, torch.float32, allow_neg_eigval=False)
    q, k = (normalize(each.float(), dim=-1).to(each) for each in (q, k))
    given = [each[None].requires_grad_() for each in (q, k, v, g, beta)]

    def kernels() -> Tensor:
        o: Tensor = run(*given)[0][0]
        return o

    return kernels, given


def gradients(call: Call, leaves_of_call: Sequence[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of all inputs."""
    o = call()
    return [o, *torch.autograd.grad(o, leaves_of_call, torch.cos(o.detach().double()).to(o))]


def bits(tensors: list[Tensor], lengths: list[int], auto_cp: bool) -> dict[str, bool]:
    """Return whether calls repeat their bits, and whether documents keep theirs beside another.

    A single document has none beside it.
    """
    call, given = flash_qla_call(tensors, lengths, True, auto_cp)
    first, second = gradients(call, given), gradients(call, given)
    found = {"repeated": all(map(torch.equal, first, second))}
    kept = sum(lengths[:-1])
    if not kept:
        return found
    changed = [each.detach().clone() for each in tensors]
    for each in changed[:5]:
        each[kept:] = each[kept:].flip(0) * 0.5
    call, given = flash_qla_call([x.requires_grad_() for x in changed], lengths, True, auto_cp)
    other = gradients(call, given)
    # the gradients of A_log and dt_bias are sums over all documents
    pairs = zip(first[:6], other[:6])
    return found | {"isolated": all(torch.equal(a[:kept], b[:kept]) for a, b in pairs)}


def errors(tensors: list[Tensor], lengths: list[int], call: Call) -> dict[str, float]:
    """Return the relative error of the output and of each gradient of ``tensors``."""
    wide = [x.detach().double().requires_grad_() for x in tensors]
    reference = call_of(wide, lengths, len(lengths), "reference")
    wanted, found = gradients(reference, wide), gradients(call, tensors)
    return {
        name: ((got.double() - want).norm() / want.norm()).item()
        for name, got, want in zip(NAMES, found, wanted)
    }


def measured(size: Size, device: torch.device, quick: bool) -> dict[str, Any]:
    """Return the times, the ratios to megatron_packed, the errors and the bits of one size."""
    lengths = lengths_of(size)
    tensors = leaves(size, torch.float32 if device.type == "cpu" else torch.bfloat16, device)
    backend = "reference" if device.type == "cpu" else "triton"
    calls = {OURS: (call_of(tensors, lengths, len(lengths), backend), tensors)}
    found: dict[str, Any] = {"size": size._asdict()}
    for form, auto_cp in product((KERNELS, WHOLE), (False, True)):
        name = f"{form}, auto_cp" if auto_cp else form
        try:
            call, given = flash_qla_call(tensors, lengths, form == WHOLE, auto_cp)
            gradients(call, given)
        except Exception as failure:  # the package is missing, or refuses or fails at this size
            found.setdefault("failed", {})[name] = f"{type(failure).__name__}: {failure}"[:500]
        else:
            calls[name] = call, given
    timed = harness.wall if device.type == "cpu" else harness.device_time
    repeats = {"warm": 1, "repeats": 2} if quick else {"warm": 5, "repeats": 20}
    series: dict[str, list[Spread]] = {name: [] for name in calls}
    for number in range(1 if quick else ROUNDS):
        for name in list(calls) if number % 2 == 0 else reversed(calls):
            call, given = calls[name]
            upstream = torch.ones_like(call())
            of_call = partial(both_passes, call, given, upstream)
            series[name].append(timed(of_call, **repeats))
            if number == 0 and device.type == "cuda":
                found.setdefault("busy", {})[name] = harness.gpu_busy(of_call)._asdict()
    ours = [each.median for each in series[OURS]]
    found["ms"] = {
        name: Spread.of([each.median / 1e3 for each in times]) for name, times in series.items()
    }
    found["ratio"] = {
        name: Spread.of_ratios([each.median for each in times], ours)
        for name, times in series.items()
        if name != OURS
    }
    found["errors"] = {
        name: errors(tensors, lengths, call)
        for name, (call, given) in calls.items()
        if not name.startswith(KERNELS)
    }
    found["bits"] = {
        name: bits(tensors, lengths, "auto_cp" in name) for name in calls if name.startswith(WHOLE)
    }
    return found


def both_passes(call: Call, given: Sequence[Tensor], upstream: Tensor) -> None:
    torch.autograd.grad(call(), given, upstream)


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the table, from results in the form of a result file."""
    rows: list[dict[str, object]] = []
    for found in results["sizes"]:
        size, ratios = Size(**found["size"]), found["ratio"]
        row: dict[str, object] = {
            "tokens": size.tokens,
            "documents": size.documents,
            "heads": f"{size.key_heads} / {size.value_heads}",
            "ms": harness.shown(found["ms"][OURS]),
        }
        for form in (KERNELS, WHOLE):
            fastest = min(
                (name for name in ratios if name.startswith(form)),
                key=lambda name: ratios[name][0],
                default=None,
            )
            row[f"FlashQLA, {form}: ms"] = (
                harness.shown(found["ms"][fastest]) if fastest else "failed"
            )
            row[f"{form} / ours"] = harness.shown(ratios[fastest]) if fastest else ""
        rows.append(row)
    return rows


def main() -> None:
    """Measure every size, and save the results after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    device = device_from(arguments.device)
    results: dict[str, Any] = {"sizes": []}
    for size in (QUICK,) if arguments.quick else SIZES:
        results["sizes"].append(measured(size, device, arguments.quick))
        path = harness.save("beside_flash_qla", results, folder=arguments.results)
        print(harness.table(rows_of(harness.plain(results))[-1:]), flush=True)
    print(path)


if __name__ == "__main__":
    main()
