"""Trains one model with megatron_packed and with megatron-core, and compares the losses.

    python benchmarks/beside_megatron.py runs/beside.zip
    python benchmarks/beside_megatron.py runs/beside.zip --ours beside_megatron_ours.json

The archive comes from `prepare_real.py`. Model, batch and schedule are those of Megatron-LM's
functional test ``hybrid_mr_mcore_te_tp1_pp1_cp1``. The tests ``tp2_pp1_cp1`` and ``tp2_pp1_cp4``
train the same model in other layouts.

First `pretrain_hybrid.py` trains in a separate process, with the flags of that test and whole steps
in CUDA graphs. After its end, this process imports and trains megatron-core, from the same initial
weights on the same packs in the same order. It uses megatron-core's model,
`DistributedDataParallel`, forward-backward schedule, optimizer and learning-rate schedule, and calls
them in the order of Megatron-LM's training step. Both sides train in bf16 without dropout. Losses
are means over the target tokens of a step.

Each side prints a line for its first and every tenth step. The curves of megatron_packed are
written to `beside_megatron_ours.json` before megatron-core starts. If the script is stopped after
that, ``--ours`` takes these curves, and only megatron-core trains.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import harness
from graph_runs import Run
from megatron_packed.config.parser.parse import parse
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.data.loader import Loader
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.inputs.run_data import RunData, build_data
from megatron_packed.models.run_model import build_model
from megatron_packed.packed.micro_batch import MicroBatch
from model_step import begin_alone, begin_megatron, copy_weights
from train_real import command_line
from workloads import device_from

TEST = "hybrid_mr_mcore_te_tp1_pp1_cp1"
MODEL = {
    "hybrid-layer-pattern": "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
    "hidden-size": 1024,
    "num-attention-heads": 16,
    "num-query-groups": 8,
    "seq-length": 1024,
    "max-position-embeddings": 1024,
    "micro-batch-size": 4,
    "global-batch-size": 32,
}
TINY_MODEL = {
    "hybrid-layer-pattern": "M-*-",
    "hidden-size": 32,
    "num-attention-heads": 2,
    "num-query-groups": 1,
    "mamba-num-heads": 4,
    "mamba-head-dim": 16,
    "mamba-state-dim": 16,
    "mamba-num-groups": 1,
    "seq-length": 64,
    "max-position-embeddings": 64,
    "micro-batch-size": 2,
    "global-batch-size": 4,
}
TRAINING = {
    "train-iters": 50,
    "lr": 0.00015,
    "min-lr": 1.0e-5,
    "lr-decay-style": "cosine",
    "lr-decay-iters": 320000,
    "lr-warmup-fraction": 0.01,
    "weight-decay": 1e-2,
    "clip-grad": 1.0,
    "use-distributed-optimizer": True,
    "eval-interval": 1000,
    "eval-iters": 10,
}
"""Flags of the test. Its paths, its flags of logs and checkpoints, ``--transformer-impl`` and
``--attention-backend`` are left out: each side chooses its kernels.
"""
OURS = {"tokenizer-type": "HuggingFaceTokenizer", "no-isolation-self-test": True}
GRAPHS = {"cuda-graph-impl": "full_iteration"}
LARGEST = 0.003
"""Largest relative difference of the losses of a step that the check allows."""
EVERY = 10
"""Interval of the printed steps."""
POLL = 0.5
"""Seconds between two looks at the log of the other process."""
OURS_FILE = "beside_megatron_ours"
SIDES = {"megatron_packed": "megatron_packed, graphs", "megatron_core": "megatron-core, eager"}
COLOURS = {"megatron_packed": "#1f77b4", "megatron_core": "#d62728"}


def their_config(model: ModelConfig, **options: Any) -> Any:
    """Return megatron-core's configuration of a model without experts, as Megatron-LM sets it.

    Args:
        model: configuration of megatron_packed.
        options: fields that replace those of the GPU run.
    """
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        **{
            "num_layers": len(model.hybrid_layer_pattern),
            "hidden_size": model.hidden_size,
            "num_attention_heads": model.num_attention_heads,
            "num_query_groups": model.num_query_groups,
            "kv_channels": model.kv_channels,
            "ffn_hidden_size": model.ffn_hidden_size,
            "mamba_num_heads": model.mamba_num_heads,
            "mamba_head_dim": model.mamba_head_dim,
            "mamba_state_dim": model.mamba_state_dim,
            "mamba_num_groups": model.mamba_num_groups,
            "normalization": model.normalization,
            "add_bias_linear": model.add_bias_linear,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "bias_activation_fusion": True,
            "bias_dropout_fusion": True,
            "calculate_per_token_loss": True,
            "bf16": True,
            "params_dtype": torch.bfloat16,
            "pipeline_dtype": torch.bfloat16,
            **options,
        }
    )


def their_model(config: Any, model: ModelConfig, rows: int, spec: Any) -> torch.nn.Module:
    """Return megatron-core's hybrid model.

    Args:
        config: result of `their_config`.
        model: configuration of megatron_packed.
        rows: rows of the table of words.
        spec: megatron-core's specification of the layers.
    """
    from megatron.core.models.hybrid.hybrid_model import HybridModel as MegatronHybridModel

    return MegatronHybridModel(
        config=config,
        hybrid_stack_spec=spec,
        vocab_size=rows,
        max_sequence_length=model.max_position_embeddings,
        hybrid_layer_pattern=model.hybrid_layer_pattern,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
    )


class TheirTraining:
    """Training step of megatron-core on one GPU, in the order of Megatron-LM's training step.

    Args:
        run: configuration of the run.
        model: result of `their_model`, with its initial weights, on the device.
        reduced: fields of ``DistributedDataParallelConfig`` that replace those of the test.
    """

    def __init__(
        self, run: RunConfig, model: Any, *, reduced: Mapping[str, Any] | None = None
    ) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer.module import Float16Module

        config = model.config
        wrapped = Float16Module(config, model) if config.bf16 else model
        shared = DistributedDataParallelConfig(
            **{"grad_reduce_in_fp32": True, "use_distributed_optimizer": True, **(reduced or {})}
        )
        self.model = DistributedDataParallel(config, shared, wrapped)
        self.model.train()
        if shared.overlap_grad_reduce:
            config.no_sync_func = self.model.no_sync
        self.optimizer = self._optimizer(run, config, shared.overlap_param_gather)
        self.schedule = self._schedule(run)
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        self._forward_backward = get_forward_backward_func()
        self._samples = run.packing.global_batch_size
        self._device = next(model.parameters()).device

    def _optimizer(self, run: RunConfig, config: Any, overlap_gather: bool) -> Any:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        optim = run.optim
        options = OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            min_lr=optim.min_lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.adam_beta1,
            adam_beta2=optim.adam_beta2,
            adam_eps=optim.adam_eps,
            clip_grad=optim.clip_grad,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=overlap_gather,
        )
        return get_megatron_optimizer(options, [self.model])

    def _schedule(self, run: RunConfig) -> Any:
        """Return the learning-rate schedule. megatron-core counts it in samples."""
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        optim, samples = run.optim, run.packing.global_batch_size
        warmup = optim.lr_warmup_fraction or 0.0
        decay = optim.lr_decay_iters or run.training.train_iters
        return OptimizerParamScheduler(
            self.optimizer,
            init_lr=optim.lr_warmup_init,
            max_lr=optim.lr,
            min_lr=optim.min_lr,
            lr_warmup_steps=warmup * decay * samples,
            lr_decay_steps=decay * samples,
            lr_decay_style=optim.lr_decay_style,
            start_wd=optim.weight_decay,
            end_wd=optim.weight_decay,
            wd_incr_steps=run.training.train_iters * samples,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
        )

    def step(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Run one optimizer step, and return loss, norm of the gradients and learning rate."""
        rate = self.optimizer.param_groups[0]["lr"]
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = self._forward_backward(
            forward_step_func=self._forward,
            data_iterator=iter(micro_batches),
            model=[self.model],
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0].packed.total_tokens,
            micro_batch_size=1,
            forward_only=False,
        )
        successful, norm, _ = self.optimizer.step()
        assert successful
        self.schedule.step(increment=self._samples)
        loss, targets = torch.stack([one["lm loss"] for one in sums]).sum(0).tolist()
        return {"loss": loss / targets, "grad_norm": float(norm), "learning_rate": rate}

    def _forward(self, batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
        batch = next(batches).to(self._device)
        losses = model(
            input_ids=batch.tokens.long()[None],
            position_ids=batch.packed.position_ids.long()[None],
            attention_mask=None,
            labels=batch.labels.long()[None],
            packed_seq_params=batch.packed.to_megatron_core(),
        )
        return losses, partial(_summed, batch.loss_mask)


def _summed(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of the losses, the number of target tokens, and both for the log."""
    loss, targets = (losses.float().view(-1) * mask).sum(), mask.sum()
    return loss, targets.int(), {"lm loss": torch.stack([loss.detach(), targets.float()])}


def packs(
    config: RunConfig, data: RunData, device: torch.device, dp_rank: int = 0
) -> Iterator[list[MicroBatch]]:
    """Yield the micro-batches of each step of a data-parallel rank, each with exactly the size of its
    documents.

    The loader of the data would pad them for graphs.
    """
    stream, tokens = data.train, config.packing.tokens_per_pack
    with Loader(
        stream.dataset, stream.plan, dp_rank=dp_rank, total_tokens=tokens, device=device
    ) as loader:
        for step in range(config.training.train_iters or 0):
            yield loader.micro_batches(step)


def run_theirs(config: RunConfig, data: RunData, device: torch.device) -> dict[str, Any]:
    """Train megatron-core's model on a GPU, and return its curves and step times."""
    begun = time.perf_counter()
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    begin_megatron()
    # The import lets mamba-ssm's tuners compile in threads.
    import_module("megatron_packed.ops.ssd.mamba_ssm")
    ours = build_model(config, data.vocab_size, device)
    rows = ours.embedding.weight.shape[0]
    if rows != data.vocab_size:
        raise SystemExit(
            f"the vocabulary has {data.vocab_size} entries and {rows} rows; megatron-core would "
            "count the additional rows. Choose another --vocab-size of prepare_real.py."
        )
    theirs = their_model(their_config(config.model), config.model, rows, hybrid_stack_spec)
    theirs = theirs.to(device).bfloat16()
    copy_weights(ours, theirs, config.model.hybrid_layer_pattern)
    del ours
    training = TheirTraining(config, theirs)
    print(f"{SIDES['megatron_core']}: model built, {time.perf_counter() - begun:.1f} s", flush=True)
    steps = trained(training, packs(config, data, device))
    return side(list(reported("megatron_core", steps, begun)))


def trained(
    training: TheirTraining, steps: Iterable[list[MicroBatch]]
) -> Iterator[dict[str, float]]:
    """Train, and yield loss, norm of the gradients, learning rate and time of each step."""
    for micro_batches in steps:
        # A step ends when its loss has been read, as with --log-interval 1.
        begun = time.perf_counter()
        values = training.step(micro_batches)
        yield {**values, "step_time_ms": 1e3 * (time.perf_counter() - begun)}


def reported(name: str, steps: Iterable[dict[str, Any]], begun: float) -> Iterator[dict[str, Any]]:
    """Yield the steps of a side. Print step, loss and seconds since ``begun`` for the first and
    every tenth one.
    """
    for number, step in enumerate(steps, start=1):
        if number == 1 or number % EVERY == 0:
            seconds = time.perf_counter() - begun
            print(
                f"{SIDES[name]}: step {number}, loss {step['loss']:.4f}, {seconds:.1f} s",
                flush=True,
            )
        yield step


def side(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the curves of one side, and its step time after a quarter of the steps.

    The first quarter compiles and tunes kernels, and captures graphs.
    """
    settled = steps[len(steps) // 4 :]
    return {
        "loss": [round(step["loss"], 6) for step in steps],
        "grad_norm": [round(step["grad_norm"], 5) for step in steps],
        "learning_rate": [step["learning_rate"] for step in steps],
        "step_ms": harness.Spread.of([step["step_time_ms"] / 1e3 for step in settled]),
    }


def steps_of(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the steps of `pretrain_hybrid.py` from its log while it is running.

    The log is read at most every `POLL` seconds, so the reading does not slow the run.
    """
    read = 0
    while True:
        running = run.running()  # before the reading: a run that has ended writes no more lines
        text = run.log.read_bytes()[read:] if run.log.exists() else b""
        complete = text[: text.rfind(b"\n") + 1]
        read += len(complete)
        for record in map(json.loads, complete.splitlines()):
            if "lm_loss" in record:
                yield {**record, "loss": record["lm_loss"]}
        if not running:
            return
        time.sleep(POLL)


def run_ours(run: Run) -> dict[str, Any]:
    """Wait for the end of `pretrain_hybrid.py`. Return its curves and the hash of its pack plan.

    Raises:
        SystemExit: the run failed.
    """
    steps = list(reported("megatron_packed", steps_of(run), time.perf_counter()))
    run.result()
    found = side(steps)
    found["replays"] = sum(step.get("graph_replays", 0) for step in steps)
    found["fallbacks"] = sum(step.get("graph_fallbacks", 0) for step in steps)
    return {"plan_hash": steps[0]["plan_hash"], "megatron_packed": found}


def stored_ours(path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of `run_ours` that an earlier call stored.

    Args:
        path: file that an earlier call has written.
        options: flags of this call; the file must have the same.
    Raises:
        SystemExit: the run of the file had other flags, another GPU or other libraries.
    """
    document = json.loads(path.read_text())
    stored = document["results"]
    here = {
        "device": harness.device_name(),
        "versions": harness.versions(),
        "flags": harness.plain(options),
    }
    for what, value in here.items():
        found = stored["flags"] if what == "flags" else document[what]
        if found != value:
            raise SystemExit(
                f"{path}: its run had other {what}: {found}; here: {value}. "
                "Leave out --ours to train both sides."
            )
    curves = {name: stored[name] for name in ("plan_hash", "megatron_packed")}
    return {**curves, "megatron_packed_date": document["date"]}


def compared(sides: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the relative differences of the losses of megatron_packed from megatron-core's."""
    ours, theirs = sides["megatron_packed"], sides["megatron_core"]
    differences = {
        name: [abs(a - b) / b for a, b in zip(ours[name], theirs[name], strict=True)]
        for name in ("loss", "grad_norm")
    }
    return {
        "loss_difference": [float(f"{value:.3g}") for value in differences["loss"]],
        "largest_loss_difference": max(differences["loss"]),
        "largest_norm_difference": max(differences["grad_norm"]),
        "step_ratio": round(theirs["step_ms"][0] / ours["step_ms"][0], 3),
    }


def problems_of(results: Mapping[str, Any]) -> list[str]:
    ours, theirs = results["megatron_packed"], results["megatron_core"]
    problems = []
    if not results["largest_loss_difference"] <= LARGEST:
        problems.append(
            f"losses differ by up to {results['largest_loss_difference']:.2%}, not {LARGEST:.1%}"
        )
    rates = zip(ours["learning_rate"], theirs["learning_rate"], strict=True)
    if any(abs(a - b) > 1e-6 * b for a, b in rates):
        problems.append("learning rates differ")
    if ours["fallbacks"] or not ours["replays"]:
        problems.append(
            f"{ours['replays']} micro-batches were replayed and {ours['fallbacks']} ran eagerly"
        )
    return problems


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each side, from results in the form of a result file."""
    return [
        {
            "side": SIDES[name],
            "steps": len(results[name]["loss"]),
            "first loss": results[name]["loss"][0],
            "last loss": results[name]["loss"][-1],
            "loss differs by at most": percentage(results["largest_loss_difference"]),
            "gradient norm differs by at most": percentage(results["largest_norm_difference"]),
            "step ms": harness.shown(results[name]["step_ms"]),
            "plan": results["plan_hash"][:12],
        }
        for name in SIDES
    ]


def percentage(share: float) -> str:
    return f"{100 * share:.3f} %"


def chart_of(results: dict[str, Any]) -> str:
    """Return the loss curves of both sides as an SVG image."""
    width, height, left, bottom = 720, 320, 50, 40
    losses = {name: results[name]["loss"] for name in SIDES}
    values = [value for curve in losses.values() for value in curve]
    low, high, steps = min(values), max(values), len(losses["megatron_core"])

    def x(step: float) -> float:
        return left + (width - left - 10) * (step - 1) / max(1, steps - 1)

    def y(value: float) -> float:
        return 10 + (height - bottom - 20) * (high - value) / ((high - low) or 1.0)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for part in range(5):
        value, step = low + (high - low) * part / 4, 1 + (steps - 1) * part / 4
        lines += [
            f'<path d="M{left} {y(value):.1f}H{width - 10}" stroke="#ddd"/>',
            f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>',
            f'<text x="{x(step):.1f}" y="{height - 22}" text-anchor="middle">{step:.0f}</text>',
        ]
    lines.append(f'<text x="{width / 2:.0f}" y="{height - 5}" text-anchor="middle">step</text>')
    # The dashes of one curve leave the other visible where both have the same values.
    for number, (name, curve) in enumerate(reversed(losses.items())):
        points = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in enumerate(curve, start=1))
        dashes = ' stroke-dasharray="6 5"' if number else ""
        lines += [
            f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" '
            f'stroke-width="2.5"{dashes}/>',
            f'<text x="{width - 20}" y="{34 + 18 * number}" text-anchor="end" '
            f'fill="{COLOURS[name]}">{SIDES[name]}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", type=Path, help="file made by prepare_real.py, with one set")
    parser.add_argument(
        "--ours",
        type=Path,
        metavar="FILE",
        help=f"take the curves of megatron_packed from {OURS_FILE}.json of an earlier call",
    )
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    device = device_from(arguments.device)
    if device.type != "cuda":
        raise SystemExit("beside_megatron.py trains megatron-core's model and needs a GPU.")
    # The flags of graphs are part of the pack plan, so megatron-core's packs need them too.
    options = {
        **(TINY_MODEL if arguments.quick else MODEL),
        **TRAINING,
        "bf16": True,
        **OURS,
        **GRAPHS,
    }
    results: dict[str, Any] = {"test": TEST}
    if arguments.ours:
        results |= stored_ours(arguments.ours, options)
    with tempfile.TemporaryDirectory() as root:
        with zipfile.ZipFile(arguments.archive) as archive:
            archive.extractall(root)
        (folder,) = Path(root).iterdir()
        if not arguments.ours:
            ours = run_ours(Run("beside", folder, options))
            path = harness.save(OURS_FILE, {"flags": options, **ours}, folder=arguments.results)
            print(f"curves of megatron_packed: {path}", flush=True)
            results |= ours
        begin_alone(port=29517)
        config = parse(command_line(folder.name, folder, options)[2:], 1)
        data = build_data(config, ParallelGroups.single(device), print)
        if results["plan_hash"] != (plan := data.train.plan.hash):
            raise SystemExit(f"the sides have the pack plans {results['plan_hash']} and {plan}")
        results["megatron_core"] = run_theirs(config, data, device)
        data.close()
    results |= compared(results)
    path = harness.save("beside_megatron", results, folder=arguments.results)
    print(harness.table(rows_of(harness.plain(results))))
    print(f"{path}; step of megatron-core / step of megatron_packed: {results['step_ratio']}")
    if problems := problems_of(results):
        raise SystemExit("failed: " + "; ".join(problems))


if __name__ == "__main__":
    main()
