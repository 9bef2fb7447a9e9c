"""Measures models of the sizes that people train, on packed conversations, beside megatron-core.

    python benchmarks/real_sizes.py runs/packs --gpus 4 [--sizes NAME ...] [--beside-layers 16]

The data set comes from `prepare_packs.py`; it is repeated, because only the speed is measured. The
weights are random, and no checkpoint is written. Each run is a job of ``--gpus`` processes that calls
`megatron_packed.train` with the flags of a recipe's model, whole or with its first ``--layers``
layers. The step has 8 packs for each GPU, and 16 for the mixture of experts: routed at random with
even loads, and as its untrained router chooses. After 16 steps, of which the last 8 count, and one
more, 2 steps run under a profiler. The peak of memory stands beside that of ``megatron-packed plan``.

With ``--beside-layers`` megatron-core trains the first layers of each model on the same packs with
ZeRO-1 and both overlaps, and megatron_packed trains the same layers. A run that fails is in the
results with the end of its output.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

import harness
import layouts
from beside_megatron import TheirTraining, packs, their_config, their_model
from megatron_packed.config.environment_variables import apply_environment
from megatron_packed.config.layer_pattern import DEPTH
from megatron_packed.config.parser.parse import parse
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.inputs.run_data import build_data, most_documents
from megatron_packed.models.estimate.rank_memory import GIB
from megatron_packed.models.estimate.run_estimate import estimates, usual
from megatron_packed.models.flops import FlopCounter, peak_flops
from megatron_packed.resume import restore
from megatron_packed.training.callback import Callback
from megatron_packed.training.from_python import train
from train_real import ROOT
from workloads import device_from, filled_on_device

STEPS, COUNTED, PROFILED = 16, 8, 2
"""Number of timed steps, number of the last ones that count, and number of profiled steps.

When the metrics of a step arrive, the next step is queued. So one step is neither timed nor profiled.
"""
ADAPTERS = (
    *("real_sizes_1_1b", "real_sizes_1_1b_lora", "real_sizes_1_8b_13", "real_sizes_1_8b_13_lora"),
    "real_sizes_1_nano_lora",
)
RESULTS = {
    "real_sizes_2_8b": "",
    "real_sizes_4_8b": "",
    "real_sizes_4_nano_balanced": "--moe-dispatch rows",
    **dict.fromkeys(("real_sizes_2_nano_13_tokens", "real_sizes_2_nano_13_parts"), ""),
    **dict.fromkeys(ADAPTERS, ""),
}
"""Names of result files, and flags of what was the default when they were measured."""
MODELS = ROOT / "examples" / "recipes" / "models"
OURS, THEIRS = "megatron_packed", "megatron_core"
EXPERTS = "--moe-token-dispatcher-type alltoall --expert-model-parallel-size"


class Size(NamedTuple):
    """Model of a recipe and the packs of each GPU in a step.

    Args:
        flags: more flags; ``{gpus}`` is the number of GPUs.
    """

    recipe: str
    packs: int
    flags: str = ""


SIZES = {
    "hybrid_1b": Size("hybrid_1b", 8),
    "nemotron_h_8b": Size("nemotron_h_8b", 8),
    "qwen3_5_9b": Size("qwen3_5_9b", 8),
    "moe_30b_a3b_balanced": Size(
        "moe_30b_a3b", 16, f"{EXPERTS} {{gpus}} --moe-router-force-load-balancing"
    ),
    "moe_30b_a3b_routed": Size("moe_30b_a3b", 16, f"{EXPERTS} {{gpus}}"),
}
RUN = """--tokenizer-type NullTokenizer --null-tokenizer-eod-id 50256 --micro-batch-size 1 --lr 1e-5
--lr-decay-style constant --adam-beta2 0.95 --use-distributed-optimizer --overlap-grad-reduce
--overlap-param-gather --no-isolation-self-test --log-interval 1 --eval-iters 0"""
GPU_RUN = "--seq-length 8192 --bf16"
QUICK_RUN = """--seq-length 64 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 2
--num-query-groups 1 --kv-channels 16 --make-vocab-size-divisible-by 1 --vocab-size 50257"""
QUICK_KINDS = {
    "M": "--mamba-num-heads 4 --mamba-head-dim 16 --mamba-state-dim 16 --mamba-num-groups 1",
    "G": "--linear-num-key-heads 1 --linear-num-value-heads 2 --linear-key-head-dim 16 --linear-value-head-dim 16",
    "E": "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 24",
}
"""Sizes of a tiny run for the kinds of layers that its pattern has."""


def command_words(
    size: Size, data: str, gpus: int, layers: int | None, more: str, *, quick: bool, device: str
) -> list[str]:
    """Return the command line of a run.

    Args:
        layers: number of layers of the main model; all layers if None.
        more: flags of the user, which override the others.
    """
    model = f"@{MODELS / size.recipe}.args"
    words = [model, *RUN.split(), *size.flags.format(gpus=gpus).split()]
    pattern = pattern_of(model)
    words += ["--data-path", data, "--device", device, "--train-iters", str(STEPS + 1 + PROFILED)]
    words += ["--global-batch-size", str((1 if quick else size.packs) * gpus)]
    words += (QUICK_RUN if quick else GPU_RUN).split()
    if layers is not None:
        pattern = pattern[:layers]
        words += ["--hybrid-layer-pattern", pattern]
    if quick:
        words += [
            w for kind, flags in QUICK_KINDS.items() if kind in pattern for w in flags.split()
        ]
    return [*words, *shlex.split(more)]


def measured_runs(
    results: Mapping[str, Any], flags: str
) -> Iterator[tuple[str, list[str], Mapping[str, Any]]]:
    """Yield our runs of a result file that did not fail: name, command line and measurements.

    Args:
        flags: flags of what was the default.
    """
    for size, of_size in results["sizes"].items():
        for name, found in of_size["runs"].items():
            side, _, layers = name.removesuffix(" layers").partition(", ")
            if side != OURS or "failed" in found:
                continue
            more = f"--cuda-graph-impl {results['graphs']} {flags} {results['flags']}"
            depth = None if layers == "all" else int(layers)
            sizes = (SIZES[size], "none", results["gpus"], depth)
            words = command_words(*sizes, more, quick=False, device="cuda")
            kind = ", adapters" * ("--lora-rank" in results["flags"])
            kind += ", in parts" * ("--moe-comm-overlap-parts" in results["flags"])
            yield f"{size}, {layers} layers, {results['gpus']} GPUs{kind}", words, found


def pattern_of(model: str) -> str:
    """Return the layers of the main model that an @file describes."""
    words = shlex.split(Path(model[1:]).read_text(), comments=True)
    return words[words.index("--hybrid-layer-pattern") + 1].partition(DEPTH)[0]


class Watched(Callback):
    """Measures the peak of memory after the timed steps, and profiles the last steps.

    It has no ``on_step_end``: with that hook, a run gathers the weights before the next step begins.
    """

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._profile = Profile()

    def on_metrics(self, trainer: Any, metrics: Any) -> None:
        if metrics["iteration"] == STEPS and not self._profile.begun:
            self.found |= peaks()
            self._profile.begin()

    def on_train_end(self, trainer: Any) -> None:
        if self._profile.begun:
            self.found |= self._profile.end()
        config, model = trainer.config, trainer.step.model
        self.found["parameters"] = sum(each.numel() for each in model.parameters())
        if trainer.groups.rank == 0:
            planned = usual(
                estimates(
                    config,
                    trainer.groups.world_size,
                    config.model.vocab_size,
                    most_documents(trainer.data),
                )
            )
            self.found |= {
                "planned_gib": round(planned.allocated / GIB, 3),
                "planned_total_gib": round(planned.total / GIB, 3),
            }


class Profile:
    """Profile of some steps on a GPU; it records nothing on a CPU."""

    def __init__(self) -> None:
        self.begun = False
        self._profiler: Any = None

    def begin(self) -> None:
        self.begun = True
        if torch.cuda.is_available():
            from torch.profiler import ProfilerActivity, profile

            torch.cuda.synchronize()
            self._profiler = profile(activities=[ProfilerActivity.CUDA])
            self._profiler.__enter__()

    def end(self) -> dict[str, Any]:
        """Return milliseconds of one step: GPU-busy, exchanged, exposed and idle.

        Exchanges after the last computation are left out, because no step follows, under which the
        weights could be gathered.
        """
        if self._profiler is None:
            return {}
        torch.cuda.synchronize()
        self._profiler.__exit__(None, None, None)
        events = until_last_computation(harness.device_events(self._profiler))
        self._profiler = None
        times = layouts.exchange_ms(events, PROFILED)
        busy = harness.union_ms(events) / PROFILED
        return {
            "busy_ms": busy,
            "busy_share": busy / (busy + times["idle_ms"]),
            **times,
            "exposed": layouts.exposed_by_name(events, PROFILED),
        }


def until_last_computation(events: Sequence[Any]) -> list[Any]:
    """Return the events without the exchanges that end the list; it is sorted by the start."""
    kept = list(events)
    while kept and layouts.is_exchange(kept[-1].name):
        kept.pop()
    return kept


def peaks() -> dict[str, Any]:
    """Return the largest peaks of memory over all ranks, in GiB; nothing on a CPU."""
    if not torch.cuda.is_available():
        return {}
    torch.cuda.synchronize()
    free, whole = torch.cuda.mem_get_info()
    used = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), whole - free]
    most = torch.tensor(used, dtype=torch.float64, device="cuda")
    if dist.is_initialized():
        dist.all_reduce(most, dist.ReduceOp.MAX)
    names = ("peak_gib", "reserved_gib", "device_gib")
    return {name: round(value / GIB, 2) for name, value in zip(names, most.tolist(), strict=True)}


def counted(steps: Sequence[Mapping[str, Any]], gpus: int) -> dict[str, Any]:
    """Return the speed of the last steps, from records with time, tokens and FLOPs.

    Args:
        steps: records of the `STEPS` timed steps.
    """
    last = steps[STEPS - COUNTED : STEPS]
    seconds = [step["step_time_ms"] / 1e3 for step in last]
    tokens = sum(step["tokens_per_second"] * one for step, one in zip(last, seconds, strict=True))
    known = [step["mfu"] for step in last]
    work = None
    if None not in known:
        work = sum(mfu * one for mfu, one in zip(known, seconds, strict=True)) / sum(seconds)
    return {
        "steps": len(last),
        "step_ms": harness.Spread.of(seconds),
        "tokens_per_second_per_gpu": round(tokens / sum(seconds) / gpus, 1),
        "mfu": work and round(work, 4),
        "loss": [round(step["lm_loss"], 4) for step in steps[:STEPS]],
        "replays": sum(step.get("graph_replays", 0) for step in last),
        "fallbacks": sum(step.get("graph_fallbacks", 0) for step in last),
    }


def train_ours(words: list[str], device: torch.device) -> dict[str, Any]:
    """Train with megatron_packed in this process of the job, and return the measurements."""
    watched, records = Watched(), []
    fills = filled_on_device(device) if device.type == "cuda" else nullcontext()
    # A run refuses adapters of random weights. Here only the speed is measured.
    with fills, patch.object(restore, "refuse_random_base"):
        code = train(words, records.append, callbacks=[watched])
    assert code == 0, f"the run ended with code {code}"
    steps = [record for record in records if "lm_loss" in record]
    return {**watched.found, **(counted(steps, world()) if steps else {})}


def train_theirs(words: list[str], device: torch.device) -> dict[str, Any]:
    """Train with megatron-core in this process of the job, and return the measurements."""
    config = parse(words, world())
    apply_environment(config.training)
    groups = ParallelGroups.create(
        config.parallel, torch.device(device.type), layout=config.layout(world())
    )
    data = build_data(config, groups, print if groups.rank == 0 else lambda line: None)
    model = begun_model(config, groups, data.vocab_size)
    training = TheirTraining(config, model, reduced=REDUCED)
    profile, found, records = Profile(), {}, []
    counter = FlopCounter(config.model, data.vocab_size)
    for number, batches in enumerate(packs(config, data, groups.device, groups.dp.rank), start=1):
        begun = time.perf_counter()
        values = training.step(batches)
        seconds = time.perf_counter() - begun
        lengths = [n for one in batches for n in one.packed.cu_seqlens_cpu.diff().tolist() if n]
        work = torch.tensor(
            [sum(lengths), counter.training(lengths).total], dtype=torch.float64, device="cuda"
        )
        dist.all_reduce(work)
        tokens, flops = work.tolist()
        peak = peak_flops(groups.device)
        records.append(
            {
                "lm_loss": values["loss"],
                "step_time_ms": 1e3 * seconds,
                "tokens_per_second": tokens / seconds,
                "mfu": peak and flops / seconds / world() / peak,
            }
        )
        if number == STEPS:
            found |= peaks()
        elif number == STEPS + 1:
            profile.begin()
    found |= profile.end()
    data.close()
    parameters = sum(each.numel() for each in model.parameters())
    groups.shutdown()
    settings = {**REDUCED, **{key: str(value) for key, value in settings_of(config.model).items()}}
    return {"parameters": parameters, "settings": settings, **found, **counted(records, world())}


REDUCED = {
    "grad_reduce_in_fp32": False,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
"""Megatron-core's settings of data parallelism. Gradients in bf16 take less time than in fp32."""


def settings_of(model: ModelConfig) -> dict[str, Any]:
    """Return fields of megatron-core's configuration that make it fast, and those of the kinds.

    Products do not add to the gradients themselves, which would need APEX.
    """
    from megatron.core.activations import squared_relu
    from torch.nn.functional import silu

    found: dict[str, Any] = {
        "activation_func": silu if model.swiglu else squared_relu,
        "gated_linear_unit": model.swiglu,
        "bias_activation_fusion": model.swiglu,
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "te",
        "apply_rope_fusion": model.position_embedding_type == "rope",
        "attention_output_gate": model.attention_output_gate,
        "qk_layernorm": model.qk_layernorm,
        "layernorm_zero_centered_gamma": model.apply_layernorm_1p,
        "layernorm_epsilon": model.norm_epsilon,
    }
    if "G" in model.hybrid_layer_pattern:
        linear = ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
        found |= {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 1}
        found |= {f"linear_{name}": getattr(model, f"linear_{name}") for name in linear}
        found["linear_conv_kernel_dim"] = model.linear_conv_kernel_dim
    if "E" in model.hybrid_layer_pattern:
        same = (
            *("moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
            *("moe_router_score_function", "moe_router_topk_scaling_factor", "moe_aux_loss_coeff"),
            *("moe_router_enable_expert_bias", "moe_router_force_load_balancing"),
            *("moe_router_load_balancing_type", "moe_token_dispatcher_type"),
        )
        found |= {name: getattr(model, name) for name in same}
        found |= {
            "num_moe_experts": model.num_experts,
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": True,
            "moe_permute_fusion": True,
            "moe_router_fusion": True,
            "use_fused_weighted_squared_relu": model.squared_relu,
        }
    return found


def begun_model(config: RunConfig, groups: ParallelGroups, vocab_size: int) -> torch.nn.Module:
    """Set up megatron-core's groups and random states, and return its model on the GPU."""
    from megatron.core import parallel_state
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    experts = config.parallel.expert_model_parallel_size
    parallel_state.initialize_model_parallel(expert_model_parallel_size=experts)
    model_parallel_cuda_manual_seed(1, te_rng_tracker=True)
    options = settings_of(config.model)
    if experts > 1:
        options["expert_model_parallel_size"] = experts
    theirs = their_config(config.model, **options)
    model = their_model(theirs, config.model, vocab_size, hybrid_stack_spec)
    return model.to(groups.device).bfloat16()


def world() -> int:
    """Return the number of processes of this job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


SIDES: dict[str, Callable[[list[str], torch.device], dict[str, Any]]] = {
    OURS: train_ours,
    THEIRS: train_theirs,
}


def run_rank(job: Path) -> None:
    """Run one process of a job; rank 0 writes the measurements beside the job's file."""
    described = json.loads(job.read_text())
    device = torch.device(device_from(described["device"]).type)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    found = SIDES[described["side"]](described["words"], device)
    if os.environ.get("RANK", "0") == "0":
        job.with_suffix(".found").write_text(json.dumps(found))


def start(job: Path, gpus: int, limit: float) -> str:
    """Run a job in processes of its own; return why it failed, empty if it did not."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc_per_node", str(gpus), __file__, "--job", str(job)]
    # A session of its own, so that a signal reaches the launcher and its processes.
    launched = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = launched.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(launched.pid, signal.SIGKILL)
        printed, _ = launched.communicate()
        return f"{printed[-2000:]}\ntook more than {limit:.0f} s"
    print(printed[-3000:], flush=True)
    return "" if launched.returncode == 0 else printed[-2000:]


def measured(side: str, words: list[str], device: str, gpus: int, limit: float) -> dict[str, Any]:
    """Return the measurements of one job, or the end of its output if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        words = [*words, "--data-cache-path", str(Path(folder) / "cache")]
        job.write_text(json.dumps({"side": side, "words": words, "device": device}))
        begun = time.perf_counter()
        failed = start(job, gpus, limit)
        seconds = round(time.perf_counter() - begun, 1)
        if failed:
            return {"failed": failed.replace(folder, "."), "seconds_in_all": seconds}
        found: dict[str, Any] = json.loads(job.with_suffix(".found").read_text())
        return {**found, "seconds_in_all": seconds}


def sides_of(layers: int | None, beside_layers: int | None) -> list[tuple[str, int | None]]:
    """Return the side and the number of layers of each run of a size."""
    runs: list[tuple[str, int | None]] = [(OURS, layers)]
    if beside_layers is None:
        return runs
    if beside_layers != layers:
        runs.append((OURS, beside_layers))
    return [*runs, (THEIRS, beside_layers)]


def run_name(side: str, layers: int | None) -> str:
    return f"{side}, {'all' if layers is None else layers} layers"


def with_ratio(runs: Mapping[str, dict[str, Any]], beside_layers: int | None) -> dict[str, Any]:
    """Return the runs of a size, with the ratio of the sides' speeds if both have one."""
    speeds = [
        runs.get(run_name(side, beside_layers), {}).get("tokens_per_second_per_gpu")
        for side in (OURS, THEIRS)
    ]
    ratio = round(speeds[0] / speeds[1], 3) if all(speeds) else None
    return {"runs": dict(runs), "over_megatron_core": ratio}


COLUMNS = (
    *("size", "run", "parameters of a rank", "step ms", "tokens/s per GPU", "MFU", "GPU busy"),
    *("exposed, idle ms", "peak, planned GiB", RATIO := "ours over megatron-core's tokens/s"),
)


def rows_of(results: Mapping[str, Any]) -> list[dict[str, object]]:
    """Return a row for each run, from results in the form of a result file."""
    rows: list[dict[str, object]] = []
    for name, size in results["sizes"].items():
        for run, found in size["runs"].items():
            row: dict[str, object] = dict.fromkeys(COLUMNS, "")
            rows.append(row)
            ratio = size["over_megatron_core"]
            row |= {"size": name, "run": run, RATIO: "not measured" if ratio is None else ratio}
            if "failed" in found:
                row["step ms"] = f"failed after {found['seconds_in_all']} s"
                continue
            shares = "exposed_ms" in found
            row.update(
                {
                    "parameters of a rank": f"{found['parameters']:,}",
                    "step ms": harness.shown(found["step_ms"]),
                    "tokens/s per GPU": f"{found['tokens_per_second_per_gpu']:,.0f}",
                    "MFU": f"{100 * found['mfu']:.1f} %" if found["mfu"] else "",
                    "GPU busy": f"{100 * found['busy_share']:.1f} %" if shares else "",
                    "exposed, idle ms": (
                        f"{found['exposed_ms']:.1f}, {found['idle_ms']:.1f}" if shares else ""
                    ),
                    "peak, planned GiB": (
                        f"{found.get('peak_gib', '')}, {found.get('planned_gib', '')}"
                    ),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", help="data set of prepare_packs.py, without .bin")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--gpus", type=int, default=1, help="processes of a job, one for each GPU")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--layers", type=int, help="first layers of each model (default: all)")
    parser.add_argument("--beside-layers", type=int, help="layers of both sides' comparison")
    parser.add_argument(
        "--graphs", default="local", choices=("local", "full_iteration", "none"), help="graphs"
    )
    parser.add_argument(
        "--flags", default="", help="more flags of megatron_packed, for example recomputation"
    )
    parser.add_argument("--limit", type=float, default=540.0, help="seconds of one run")
    parser.add_argument("--suffix", default="", help="end of the name of the result file")
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    if arguments.job is not None:
        run_rank(arguments.job)
        return
    if arguments.data is None:
        parser.error("give the data set that prepare_packs.py has made")
    device = device_from(arguments.device).type
    results: dict[str, Any] = {
        "gpus": arguments.gpus,
        "graphs": arguments.graphs,
        "flags": arguments.flags,
        "sizes": {},
    }
    path = None
    for name in arguments.sizes:
        runs: dict[str, dict[str, Any]] = {}
        for side, layers in sides_of(arguments.layers, arguments.beside_layers):
            words = command_words(
                SIZES[name],
                arguments.data,
                arguments.gpus,
                layers,
                f"--cuda-graph-impl {arguments.graphs} {arguments.flags}",
                quick=arguments.quick,
                device=device,
            )
            run = runs[run_name(side, layers)] = measured(
                side, words, device, arguments.gpus, arguments.limit
            )
            results["sizes"][name] = with_ratio(runs, arguments.beside_layers)
            path = harness.save(f"real_sizes{arguments.suffix}", results, folder=arguments.results)
            shown = run.get("failed") or f"{run['tokens_per_second_per_gpu']} tokens/s per GPU"
            print(f"{name}, {run_name(side, layers)}: {shown[-300:]}", flush=True)
    print(harness.table(rows_of(harness.plain(results))))
    print(path)


if __name__ == "__main__":
    main()
