"""Rules between sections: combinations of options that exclude each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_packed.config.errors import Problem, Problems
from megatron_packed.config.kernel_options import kernel_rules
from megatron_packed.config.section import Sound
from megatron_packed.config.sections.cuda_graph import graph_rules
from megatron_packed.config.sections.data import TRAINING_DATA
from megatron_packed.config.sections.data_parts.tokenizer import vocabulary_rules
from megatron_packed.config.sections.memory import offload_rules, recompute_rules
from megatron_packed.config.sections.model_parts.divisors import nearest_multiples
from megatron_packed.config.sections.model_parts.lora import adapter_run_rules
from megatron_packed.config.sections.optim import SAMPLE_UNITS, OptimizerConfig
from megatron_packed.config.sections.parallel import parallel_rules
from megatron_packed.config.sections.profiling import profiling_rules
from megatron_packed.config.value_checks import INT32_MAX

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig


def cross_rules(run: RunConfig, sound: Sound) -> Problems:
    """Yield problems between sections.

    Args:
        sound: ``sound("model.hidden_size", ...)`` is True if no problem was found with those fields.
    """
    for rule in _RULES:
        yield from rule(run, sound)


def _padding_rules(run: RunConfig, sound: Sound) -> Problems:
    """Yield a problem if --padded-vocab-size contradicts --vocab-size. Without --vocab-size the
    vocabulary is known after the tokenizer is read.
    """
    model = run.model
    are_sound = sound(
        "data.padded_vocab_size",
        "model.vocab_size",
        "model.make_vocab_size_divisible_by",
        "parallel.tensor_model_parallel_size",
    )
    if are_sound and model.vocab_size and (problem := run.padding_problem(model.vocab_size)):
        yield run.data.problem("padded_vocab_size", *problem)


def _document_rules(run: RunConfig, sound: Sound) -> Problems:
    """Yield problems of the longest document with the model's positions or the kind of data."""
    model, packing, data = run.model, run.packing, run.data
    if sound("model.max_position_embeddings", "packing.seq_length", "packing.max_document_length"):
        positions, longest = model.max_position_embeddings, packing.max_document_length
        if (
            positions is not None
            and positions < longest
            and model.position_embedding_type == "rope"
        ):
            yield model.problem(
                "max_position_embeddings",
                f"is less than the longest document of a pack (--max-document-length {longest})",
                f"raise it, leave it out, or give --max-document-length {positions}",
            )
    if sound("packing.overlong_policy", "data.sft") and run.shorten_to is not None and not data.sft:
        yield Problem(
            "--overlong-policy",
            "truncate_prompt",
            "keeps the answers of conversations, but without --sft documents are plain text",
            "add --sft, or give split, truncate, drop or error",
        )


def _expert_rules(run: RunConfig, sound: Sound) -> Problems:
    """Yield problems of packs with the number of rows for experts."""
    model, packing = run.model, run.packing
    if sound(
        "model.moe_router_topk",
        "model.num_experts",
        "packing.seq_length",
        "packing.micro_batch_size",
    ):
        rows = packing.tokens_per_pack * model.moe_router_topk
        if (
            model.num_experts is not None
            and rows > INT32_MAX
            and packing.tokens_per_pack <= INT32_MAX
        ):
            yield model.problem(
                "moe_router_topk",
                f"needs {rows} rows of expert input for a pack of {packing.tokens_per_pack} tokens, but "
                "row offsets are 32-bit integers",
                "reduce --seq-length or --micro-batch-size",
            )


def _evaluation_rules(run: RunConfig, sound: Sound) -> Problems:
    """Yield problems of evaluations without data, of unused evaluation data, and of evaluation data
    that is also trained on.
    """
    data, training = run.data, run.training
    if not sound(*TRAINING_DATA, "data.valid_data_path", "data.test_data_path", "data.split"):
        return
    if sound("training.eval_interval", "training.eval_iters") and not data.named.fault:
        # --split 100,0,0 says that no data is for validation; without effect is then no surprise.
        expected = training.validation_interval is not None and data.split is None
        if expected and not data.has_validation:
            yield training.problem(
                "eval_interval",
                "there is no validation data",
                "give --valid-data-path FILE [FILE ...] or --split, or leave it out",
            )
        nothing = not run.validates and not run.tests
        if sound("training.skip_train") and training.skip_train and nothing:
            yield training.problem(
                "skip_train",
                "leaves nothing to do, because there is no validation or test data",
                "give --valid-data-path FILE and --eval-interval 1, or leave it out",
            )
        wanted = training.eval_iters or training.full_validation
        if wanted and training.eval_interval is None and data.valid_data_path:
            yield data.problem(
                "valid_data_path",
                "is never used without --eval-interval",
                "give --eval-interval N, or leave it out",
            )
    if sound("training.validation_set_names") and not data.named.fault:
        yield from _set_name_rules(run)
    for split, blend, verb in (
        ("valid", data.valid_blend, "validate"),
        ("test", data.test_blend, "test"),
    ):
        both = sorted(set(data.train_paths) & set(blend.paths))
        if both:
            yield Problem(
                data.flag_of(split),
                " ".join(both),
                f"is also training data, so it cannot {verb} the model",
                "give files that are not trained on",
            )


def _set_name_rules(run: RunConfig) -> Problems:
    """Yield a problem unless the names of validation sets are distinct, one for each path."""
    names, sets = run.training.validation_set_names, len(run.data.validation_paths)
    shown_names, flag = " ".join(names), "--validation-set-names"
    mismatched = len(names) != sets or len({*names, ""}) <= sets
    if names and run.training.multiple_validation_sets and run.data.has_validation and mismatched:
        yield Problem(
            flag,
            shown_names,
            f"must be {sets} different names, one for each path of the validation data",
            f"give {sets} names, or leave it out",
        )


def _best_validation_rules(run: RunConfig, sound: Sound) -> Problems:
    """Yield problems of options that use validations, in a run without them, and of the task metric
    without conversations.
    """
    training = run.training
    if sound("training.valid_metric", "data.sft") and training.valid_metric and not run.data.sft:
        yield training.problem(
            "valid_metric",
            "compares answers of conversations, but without --sft documents are plain text",
            "add --sft, or leave it out",
        )
    keys = ("training.eval_interval", "training.eval_iters", "data.valid_data_path", "data.split")
    if not sound(*keys, *TRAINING_DATA) or run.data.named.fault or run.validates:
        return
    saves = (run.checkpoint, "save_best") if run.checkpoint.save is not None else None
    for section, name in filter(
        None, (saves, (training, "early_stopping_patience"), (training, "valid_metric"))
    ):
        if sound(f"{section.title}.{name}") and getattr(section, name):
            yield section.problem(
                name,
                "needs validations, and the run has none",
                "give --eval-interval N, and --valid-data-path FILE or --split",
            )


def _device_rules(run: RunConfig, sound: Sound) -> Problems:
    on_gpus = sound("parallel.distributed_backend") and run.parallel.distributed_backend == "nccl"
    if on_gpus and sound("training.device") and run.training.device == "cpu":
        yield run.parallel.problem(
            "distributed_backend",
            "cannot run on --device cpu",
            "give gloo, or leave it out",
        )


def _capture_rules(run: RunConfig, sound: Sound) -> Problems:
    if (
        sound("cuda_graph.cuda_graph_impl", "training.device")
        and run.cuda_graph.uses_transformer_engine
        and run.training.device == "cpu"
    ):
        yield run.cuda_graph.problem(
            "cuda_graph_impl",
            "TransformerEngine captures graphs only on GPUs, and --device is cpu",
            "give local, which runs eagerly on a CPU, or leave it out",
        )


def _kind_rules(run: RunConfig, sound: Sound) -> Problems:
    for kind in run.model.kinds if sound("model.hybrid_layer_pattern") else ():
        if kind.cross_rules is not None:
            yield from kind.cross_rules(run, sound)


def _schedule_rules(run: RunConfig, sound: Sound) -> Problems:
    optim = run.optim
    keys = (f"optim.{name}" for names in SAMPLE_UNITS.items() for name in names)
    if not sound(
        *keys,
        "optim.lr_warmup_fraction",
        "optim.lr_decay_style",
        "training.train_iters",
        "training.train_samples",
        "training.train_epochs",
        "packing.global_batch_size",
    ):
        return
    training, batch = run.training, run.packing.global_batch_size
    if sound("packing.rampup_batch_size") and run.packing.rampup_batch_size:
        yield from _ramp_rules(run)
    if training.train_iters is None:  # --train-epochs: checked again after the data is packed
        return
    if training.train_samples is not None and training.train_iters != run.last_iteration():
        yield training.problem(
            "train_samples",
            f"contradicts --train-iters ({training.train_iters}): with --global-batch-size "
            f"{batch} the samples give {run.last_iteration()} iterations",
            "leave one of the two flags out",
        )
        return
    end, warmup = run.decay_iters, run.warmup_iters
    name, value = _given_length(optim, "lr_warmup_iters")
    if optim.lr_warmup_fraction is not None:
        name, value = "--lr-warmup-fraction", str(optim.lr_warmup_fraction)
    source, decay = _given_length(optim, "lr_decay_iters")
    if not decay:
        source = training.length_flag
    if warmup >= end:
        yield Problem(
            name,
            value,
            f"warms up for {warmup:g} iterations, but the decay ends at iteration {end:g} "
            f"({source})",
            f"warm up for at most {end - 1:g} iterations",
        )


def _ramp_rules(run: RunConfig) -> Problems:
    """Yield a problem of ``--rampup-batch-size`` in a run whose lengths are not all in samples, or
    which ends before the batch has grown.
    """
    flag, shown = "--rampup-batch-size", " ".join(map(str, run.packing.rampup_batch_size))
    samples = run.training.train_samples
    if run.training.length_flag != "--train-samples" or "iters" in run.schedule_units:
        yield Problem(
            flag,
            shown,
            "needs the length of the run and of its schedule in samples, because the samples of a "
            "step change",
            "give --train-samples, --lr-warmup-samples, --lr-decay-samples, "
            "--lr-wsd-decay-samples and --weight-decay-incr-samples, or --lr-warmup-fraction",
        )
    elif samples is not None and run.packing.rampup_batch_size[-1] >= samples:
        yield Problem(
            flag,
            shown,
            f"grows the batch until the end of the run (--train-samples {samples})",
            f"give fewer than {samples} SAMPLES",
        )


def _given_length(optim: OptimizerConfig, name: str) -> tuple[str, str]:
    """Return the flag and the value of the option that gives a length of the schedule, in
    iterations or in samples.

    If the user gave neither option, return the flag of the option in iterations, and an empty
    value.
    """
    for option in (SAMPLE_UNITS[name], name):
        if getattr(optim, option):
            return optim.flag(option), str(getattr(optim, option))
    return optim.flag(name), ""


def batch_rule(run: RunConfig, world_size: int, sound: Sound) -> Problems:
    """Yield a problem if the global batch does not divide into micro-batches for every
    data-parallel rank.
    """
    packing = run.packing
    if not sound("packing.global_batch_size", "packing.micro_batch_size"):
        return
    ranks = run.data_parallel_size(world_size)
    unit = packing.micro_batch_size * ranks
    # If the global batch is no multiple of the micro-batch size, PackingConfig reports the problem.
    splits_into_micro_batches = packing.global_batch_size % packing.micro_batch_size == 0
    if splits_into_micro_batches and packing.global_batch_size % unit:
        yield packing.problem(
            "global_batch_size",
            f"must be a multiple of {unit}: --micro-batch-size ({packing.micro_batch_size}) x data-parallel "
            f"ranks ({ranks})",
            nearest_multiples(packing.global_batch_size, unit),
        )
    elif packing.rampup_batch_size and sound("packing.rampup_batch_size"):
        yield from packing.ramp_rules(unit)


_RULES: Sequence[Callable[[RunConfig, Sound], Problems]] = (
    _document_rules,
    _expert_rules,
    _evaluation_rules,
    _best_validation_rules,
    _device_rules,
    _kind_rules,
    _capture_rules,
    adapter_run_rules,
    kernel_rules,
    vocabulary_rules,
    _padding_rules,
    _schedule_rules,
    graph_rules,
    parallel_rules,
    profiling_rules,
    recompute_rules,
    offload_rules,
)
"""Rules in the order in which their problems are listed."""
