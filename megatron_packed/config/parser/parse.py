"""Parser of a command line into a checked ``RunConfig``, without importing torch.

``parse`` raises ``ConfigError`` with all problems at once. Programs call ``parse_or_exit`` first.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from megatron_packed.config.cross_rules import cross_rules
from megatron_packed.config.environment_variables import environment_problems
from megatron_packed.config.errors import ConfigError, Problem, Problems, format_problems, printable
from megatron_packed.config.idle_options import sentence as idle_sentence
from megatron_packed.config.idle_options import without_effect
from megatron_packed.config.kernel_options import kernels_missing_here
from megatron_packed.config.launch_checks import (
    device_problems,
    environment_number,
    launch_problems,
    package_problems,
)
from megatron_packed.config.layer_pattern import DEPTH, LAYERS_OF_A_DEPTH, STAGE
from megatron_packed.config.options import Field
from megatron_packed.config.parser.launcher import report_to_launcher, wait_for_rank_0
from megatron_packed.config.parser.precedence import ADAPTERS, GivenOptions, gather
from megatron_packed.config.path_checks import path_problems
from megatron_packed.config.run import (
    SECTIONS,
    RunConfig,
    every_field,
    settle_partition,
    unchecked_run,
)
from megatron_packed.config.section import problems_of, unchecked
from megatron_packed.config.sections.checkpoint import saving_rules
from megatron_packed.config.sections.memory import forced_buffers
from megatron_packed.config.sections.model import MOST_DEPTHS
from megatron_packed.config.sections.parallel import REPLICA_SIZES, fewest_processes

if TYPE_CHECKING:
    from megatron_packed.config.parser.stored_options import ReadStored

EXIT_CODE = 2
EXIT_NOT_WRITTEN = 1
"""Exit code if the output of --help, --print-config or a similar flag could not be written, for
example to a full disk.
"""


class RefusedCommandLine(SystemExit):
    """End of a program whose command line is wrong; the problems were reported."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(EXIT_CODE)
        self.first = str(problems[0])
        """First problem, in one sentence."""


@dataclass(frozen=True)
class Parsed:
    """Configuration with the origin of each value.

    Args:
        config: the checked configuration.
        sources: by key, e.g. ``model.hidden_size``: ``default``, ``derived: ...``, ``run.yaml:3``,
            ``@run.args`` or ``flag``.
        always: given flags of Megatron whose effect is always on, with the reason.
        accepted: given flags of Megatron without effect, and what is done instead.
        warnings: sentences about deprecated spellings and repeated flags.
        idle: given options that have no effect in this run, by key, with the reason.
    """

    config: RunConfig
    sources: Mapping[str, str]
    always: Mapping[str, str]
    accepted: Mapping[str, str]
    warnings: tuple[str, ...]
    idle: Mapping[str, str]
    taken_options: str = ""
    """Line with the options that come from a checkpoint; empty without any."""


def parse(
    argv: Sequence[str],
    world_size: int | None = None,
    keywords: Mapping[str, object] | None = None,
) -> RunConfig:
    """Return the configuration that a command line and its files describe.

    The command line does not include the program's name.

    Args:
        argv: words of the command line.
        world_size: number of processes; by default WORLD_SIZE of the environment, else 1.
        keywords: options by name (`RunConfig.from_args`), which override the command line.
    Raises:
        ConfigError: lists every problem.
    """
    return parse_with_sources(argv, world_size, keywords=keywords).config


def parse_with_sources(
    argv: Sequence[str],
    world_size: int | None = None,
    *,
    on_this_machine: bool = True,
    read_stored: ReadStored | None = None,
    keywords: Mapping[str, object] | None = None,
) -> Parsed:
    """Return the configuration with the origin of each value; see ``parse``.

    Args:
        on_this_machine: False for a run on another machine. Paths, packages and the environment are then not
            checked, and the default world size is the smallest for the layout.
        read_stored: reads the checkpoint for ``--use-checkpoint-args``.
    """
    options = gather(argv, keywords)
    return _resolve(options, world_size, on_this_machine, on_this_machine, read_stored)


def parse_or_exit(
    argv: Sequence[str] | None = None,
    explain: Callable[[RunConfig], str] | None = None,
    *,
    launched: bool = True,
    world_size: int | None = None,
    on_this_machine: bool = True,
    typed: Mapping[str, str] | None = None,
    warns: bool = True,
    read_stored: ReadStored | None = None,
    infers: bool = False,
    shows_taken: bool = True,
) -> RunConfig:
    """Parse the command line for a program: print problems and exit, instead of raising.

    Also answers --help, --help-all, --version, --print-config and --explain. Only rank 0 prints,
    and the process exits with code 2. On another machine, its first rank reports wrong paths of
    that machine, since rank 0 cannot see them.

    Args:
        explain: function whose text answers --explain; it may import torch.
        launched: True if this process is a rank of the run. A program that only inspects a run
            passes False: its flags are checked for the fewest processes that form the layout.
        world_size: number of processes, if it is known.
        on_this_machine: True if the run is on this machine. For a run on another machine, paths, packages and
            the environment are not checked.
        typed: maps a flag of a run to the program's own flag, which problems name instead.
        warns: print warnings and options without effect; a launcher leaves them to its processes.
        read_stored: reads the checkpoint for ``--use-checkpoint-args``.
        infers: the program generates text; see `take_for_inference`. Requires ``read_stored``.
        shows_taken: print the options that come from a checkpoint.
    Raises:
        RefusedCommandLine: the command line is wrong.
        SystemExit: code 0 after --help and similar flags.
    """
    options = gather(sys.argv[1:] if argv is None else argv)
    speaks = environment_number(os.environ, "RANK", 0, options.problems) == 0
    _answer_without_checks(options, speaks)
    try:
        parsed = _resolve(options, world_size, launched, on_this_machine, read_stored, infers)
    except ConfigError as error:
        _refuse([_as_typed(problem, typed or {}) for problem in error.problems], speaks)
    if speaks and warns:
        if parsed.taken_options and shows_taken:
            _write(sys.stderr, f"{printable(parsed.taken_options, 4000)}\n")
        _write(
            sys.stderr,
            "".join(f"warning: {printable(warning, 1000)}\n" for warning in parsed.warnings),
        )
    # Programs that only inspect a run use few of its options, so they do not list idle options.
    if speaks and launched and warns:
        lines = [f"  {printable(flag)}: {instead}\n" for flag, instead in parsed.accepted.items()]
        _write(sys.stderr, "".join(["accepted without effect:\n", *lines] if lines else []))
        # A resumed run names idle options after it has taken the options that its checkpoint decides.
        waits = parsed.config.checkpoint.resumes and "--print-config" not in options.actions
        if parsed.idle and not waits:
            _write(sys.stderr, idle_sentence(parsed.idle, parsed.config) + "\n")
    _answer_with_options(options, parsed, speaks, explain)
    return parsed.config


def _answer_without_checks(options: GivenOptions, speaks: bool) -> None:
    """Answer --help, --help-all and --version, and end the process if one of them was given."""
    if options.actions & {"--help", "--help-all"}:
        from megatron_packed.config.parser.help_text import help_text

        _finish(help_text(everything="--help-all" in options.actions) if speaks else "")
    if "--version" in options.actions:
        from megatron_packed import __version__

        _finish(f"megatron_packed {__version__}\n" if speaks else "")


def _answer_with_options(
    options: GivenOptions, parsed: Parsed, speaks: bool, explain: Callable[[RunConfig], str] | None
) -> None:
    """Answer --print-config and --explain, and end the process if one of them was given."""
    if "--print-config" in options.actions:
        from megatron_packed.config.parser.print_config import config_yaml

        _finish(config_yaml(parsed) if speaks else "")
    if "--explain" in options.actions:
        if explain is None:
            sentence = "--explain only works with megatron-packed train and pretrain_hybrid.py; leave it out.\n"
            _write(sys.stderr, sentence if speaks else "")
            raise SystemExit(EXIT_CODE)
        _finish(explain(parsed.config) if speaks else "")


def _refuse(problems: Sequence[Problem], speaks: bool) -> NoReturn:
    """Report problems if this rank reports, and end the process with code 2."""
    report = _report(problems, speaks)
    _write(sys.stderr, report)
    if report:
        report_to_launcher(
            "the configuration is refused; its problems are listed above.", os.environ
        )
    else:
        wait_for_rank_0(os.environ)
    raise RefusedCommandLine(problems) from None


def _as_typed(problem: Problem, typed: Mapping[str, str]) -> Problem:
    for flag, name in typed.items():
        option = name if problem.option == flag else problem.option
        problem = replace(problem, option=option, cure=problem.cure.replace(flag, name))
    return problem


def _resolve(
    options: GivenOptions,
    world_size: int | None,
    launched: bool,
    on_this_machine: bool,
    read_stored: ReadStored | None = None,
    infers: bool = False,
) -> Parsed:
    lines = []
    if infers:
        from megatron_packed.config.parser.stored_options import take_for_inference

        assert read_stored is not None
        lines.append(take_for_inference(options, read_stored))
    if not infers and read_stored is not None and ADAPTERS in options.values:
        from megatron_packed.config.parser.stored_options import take_adapters

        lines.append(take_adapters(options, read_stored))
    # Programs that never read the checkpoint of another machine ignore its options.
    if not infers and options.uses_checkpoint and (on_this_machine or read_stored is not None):
        from megatron_packed.config.parser.stored_options import take_stored

        lines.append(take_stored(options, read_stored, trains=launched))
    taken_options = "; ".join(filter(None, lines))
    problems = list(options.problems)
    unsound = set(options.unsound)
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for key, value in options.values.items():
        section_name, _, field_name = key.partition(".")
        values[section_name][field_name] = value
    sections = {name: unchecked(kind, values[name]) for name, kind in SECTIONS.items()}
    run = unchecked_run(sections)
    if world_size is None and launched:
        world_size = environment_number(os.environ, "WORLD_SIZE", 1, problems)
    elif world_size is None:
        world_size = fewest_processes(run.parallel)
    warnings = [*options.warnings, *_other_meanings(options), *_with_depths(options, run, unsound)]
    stages = _without_stages(run, unsound)
    _derive_global_batch_size(run, max(world_size, 1), unsound)
    _derive_iterations(run, unsound)
    for name, section in sections.items():
        wrong_fields = {key.partition(".")[2] for key in unsound if key.startswith(name + ".")}
        problems += problems_of(section, wrong_fields)
        unsound |= {f"{name}.{field}" for field in wrong_fields}

    def sound(*keys: str) -> bool:
        return not unsound.intersection(keys)

    if not on_this_machine:
        problems = [problem for problem in problems if not problem.node_dependent]
    problems += _megatron_problems(options, run)
    problems += [*cross_rules(run, sound), *launch_problems(run, world_size, sound)]
    if launched:
        problems += saving_rules(run.checkpoint, run.logging, sound)
    if on_this_machine:
        problems += [*path_problems(run, sound), *package_problems(run, sound)]
        problems += environment_problems(run.training)
        if run.memory.offloads:
            forced_buffers(os.environ, problems)
    if on_this_machine and launched:  # programs that only inspect a run do not run its kernels
        problems += kernels_missing_here(run, os.environ, sound)
        problems += device_problems(run, os.environ, sound)
    if problems:
        if read_stored is not None:
            from megatron_packed.config.parser.stored_options import with_stored_cure

            problems = with_stored_cure(options, problems)
        raise ConfigError(dict.fromkeys(problems))
    settle_partition(run)
    sources = {field.key: _origin(options, run, field) for field in every_field()}
    object.__setattr__(run, "origins", sources)
    always, accepted = {}, {}
    for flag, (texts, taken) in options.megatron_flags.items():
        if taken.has_effect:
            always[flag] = taken.reason
        else:
            accepted[" ".join((flag, *texts))] = taken.reason
    if stages:
        accepted["| in --hybrid-layer-pattern"] = "there is one pipeline stage"
    idle = without_effect(run, world_size)
    return Parsed(run, sources, always, accepted, tuple(warnings), idle, taken_options)


def _origin(options: GivenOptions, run: RunConfig, field: Field) -> str:
    """Return the origin of a value; see `Parsed`."""
    derived = field.option.derived and run.value_of(field) is not None
    otherwise = f"derived: {field.option.derived}" if derived else "default"
    return options.sources.get(field.key, otherwise)


def _other_meanings(options: GivenOptions) -> Iterator[str]:
    """Yield a sentence for each given word that is taken as another choice of its option."""
    for field in every_field():
        value = options.values.get(field.key)
        clause = field.option.other_meaning(value)
        if clause:
            yield f"{field.flag} {value} {clause}."


def _with_depths(options: GivenOptions, run: RunConfig, unsound: set[str]) -> Iterator[str]:
    """Add the depths that Megatron's deprecated flag describes to the pattern; yield a sentence.

    As in Megatron, the flag has no effect without ``--mtp-num-layers``, or if the pattern has depths.
    """
    texts, _ = options.megatron_flags.get(LAYERS_OF_A_DEPTH, ((), None))
    pattern, depths = run.model.hybrid_layer_pattern, run.model.mtp_num_layers
    keys = {"model.hybrid_layer_pattern", "model.mtp_num_layers"}
    if len(texts) != 1 or not isinstance(pattern, str) or unsound & keys:
        return
    if DEPTH in pattern or not _is_size(depths):
        why = "the pattern has depths" if DEPTH in pattern else "--mtp-num-layers gives no depth"
        yield f"{LAYERS_OF_A_DEPTH} has no effect: {why}."
        return
    # A larger number of depths is refused, with this number of parts too.
    joined = pattern + f"{DEPTH}{texts[0]}" * min(depths, MOST_DEPTHS + 1)
    object.__setattr__(run.model, "hybrid_layer_pattern", joined)
    yield f"{LAYERS_OF_A_DEPTH} is deprecated; write --hybrid-layer-pattern {joined}."


def _without_stages(run: RunConfig, unsound: set[str]) -> bool:
    """Remove the marks of one pipeline stage from the pattern; return whether it had marks."""
    pattern = run.model.hybrid_layer_pattern
    if not isinstance(pattern, str) or "model.hybrid_layer_pattern" in unsound:
        return False
    layers = pattern.replace(STAGE, "")
    if layers in ("", pattern) or run.parallel.pipeline_model_parallel_size != 1:
        return False
    object.__setattr__(run.model, "hybrid_layer_pattern", layers)
    return True


def _derive_global_batch_size(run: RunConfig, world_size: int, unsound: set[str]) -> None:
    """Set the default global batch size: one micro-batch on every data-parallel rank."""
    size = run.packing.micro_batch_size
    axes = (getattr(run.parallel, axis) for axis in REPLICA_SIZES)
    if (
        run.packing.global_batch_size is None
        and all(map(_is_size, (size, *axes)))
        and "packing.global_batch_size" not in unsound
    ):
        object.__setattr__(
            run.packing, "global_batch_size", size * run.data_parallel_size(world_size)
        )


def _derive_iterations(run: RunConfig, unsound: set[str]) -> None:
    """Set the default iterations with --train-samples: the number of whole global batches.

    The iterations of --train-epochs are known only after the data is packed.
    """
    training, batch = run.training, run.packing.global_batch_size
    samples = training.train_samples
    keys = {"training.train_iters", "training.train_samples", "packing.global_batch_size"}
    if training.train_epochs is not None or training.train_iters is not None or unsound & keys:
        return
    if samples is not None and _is_size(samples) and _is_size(batch) and samples >= batch:
        object.__setattr__(training, "train_iters", run.last_iteration())


def _is_size(value: object) -> bool:
    """Return whether an unchecked value is a whole number of at least 1."""
    return type(value) is int and value >= 1


def _megatron_problems(options: GivenOptions, run: RunConfig) -> Problems:
    for flag, (texts, taken) in options.megatron_flags.items():
        rule = taken.differs(texts, run) if taken.differs is not None else ""
        if rule:
            yield Problem(flag, " ".join(texts), rule, "correct it, or leave it out")


def _report(problems: Sequence[Problem], speaks: bool) -> str:
    if speaks:
        return format_problems(problems)
    local = [problem for problem in problems if problem.node_dependent]
    first_of_its_machine = (
        os.environ.get("LOCAL_RANK") == "0" and os.environ.get("GROUP_RANK", "0") != "0"
    )
    if not local or not first_of_its_machine:
        return ""
    return f"On {socket.gethostname()}: {format_problems(local)}"


def _finish(text: str) -> NoReturn:
    _write(sys.stdout, text)
    failed = getattr(
        sys.stdout, "failed", None
    )  # guarded streams store their failure and do not raise
    raise SystemExit(
        0 if failed is None or isinstance(failed, BrokenPipeError) else EXIT_NOT_WRITTEN
    )


def _write(stream: TextIO, text: str) -> None:
    """Write any text to any terminal, even if a reader such as ``head`` has closed the pipe."""
    try:
        stream.write(
            text.encode(stream.encoding or "utf-8", "backslashreplace").decode(
                stream.encoding or "utf-8"
            )
        )
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
