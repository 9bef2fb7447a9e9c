"""Parsing of flags generated from fields: precedence, spellings, suggestions, configuration and
argument files.
"""

import dataclasses
import os
from dataclasses import replace
from fractions import Fraction

import pytest

from megatron_packed.config.data_blend import BlendedPaths
from megatron_packed.config.parser.command_line import (
    every_field,
    known_flags,
    spellings,
    usable_flags,
)
from megatron_packed.config.parser.did_you_mean import edit_distance, nearest
from megatron_packed.config.parser.parse import parse, parse_with_sources
from megatron_packed.config.sections.data import CACHE_NAME
from megatron_packed.config.sections.data_parts.tokenizer import CHAT_TEMPLATES, PROMPT_FORMATS
from megatron_packed.config.sections.packing import PackingConfig
from support.command_lines import argv_of, problems_of


def problems(argv: list[str]) -> dict[str, str]:
    return {problem.option: f"{problem.rule} {problem.cure}" for problem in problems_of(argv)}


def test_every_field_has_help_and_its_own_spellings() -> None:
    seen: dict[str, str] = {}
    for field in every_field():
        assert field.option.help.endswith("."), field.key
        assert len(field.option.help) > 10, field.key
        assert len(set(field.spellings)) == len(field.spellings), field.key
        for spelling in field.spellings:
            assert seen.setdefault(spelling, field.key) == field.key
    assert len(seen) > 100


def test_every_flag_with_one_character_dropped_suggests_the_flag() -> None:
    """A flag within one edit of the typed word is within three edits of the flag that was meant, so
    only such flags compete with it.
    """
    wrong, flags = 0, list(usable_flags())
    for flag in flags:
        close = [
            other
            for other in flags
            if abs(len(other) - len(flag)) <= 3 and edit_distance(flag, other, 3) <= 3
        ]
        for i in range(2, len(flag)):
            typed = flag[:i] + flag[i + 1 :]
            if typed in known_flags() or len(typed) < 4:
                continue
            wrong += 1
            found = nearest(typed, close)
            assert flag in found, (typed, found)
            if i == 2 + wrong % 7:
                assert nearest(typed, flags) == found, typed
    assert wrong > 1500


def test_suggestions_also_know_swaps_underscores_and_abbreviations() -> None:
    assert edit_distance("ab", "ba") == 1
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("abcdef", "uvwxyz", limit=2) == 3
    assert nearest("--sqe-length", usable_flags()) == ["--seq-length"]
    assert nearest("--micro_batch_size", usable_flags()) == ["--micro-batch-size"]
    assert "--max-position-embeddings" in nearest("--max-position", usable_flags())
    assert nearest("--qqqqqqqqqq", usable_flags()) == []


def test_precedence_default_file_args_file_flag(right, tmp_path) -> None:
    (tmp_path / "run.yaml").write_text(
        "optim: {weight_decay: 0.2, clip_grad: 2.0, adam_beta1: 0.5}\nseed: 7\n"
    )
    (tmp_path / "run.args").write_text(
        "--clip-grad 3  # over the file\n--adam-beta1 0.6 \\\n  --bf16\n"
    )
    # The order on the command line does not matter, only the level of the source.
    parsed = parse_with_sources(
        ["--adam-beta1", "0.7", *argv_of(right), "@run.args", "--config", "run.yaml"]
    )
    optim = parsed.config.optim
    assert (optim.adam_beta2, optim.weight_decay, optim.clip_grad, optim.adam_beta1) == (
        0.999,
        0.2,
        3.0,
        0.7,
    )
    assert parsed.config.training.bf16 is True
    assert parsed.config.training.seed == 7
    sources = {key.partition(".")[2]: source for key, source in parsed.sources.items()}
    assert sources["adam_beta2"] == "default"
    assert sources["weight_decay"] == "run.yaml:1"
    assert sources["seed"] == "run.yaml:2"
    assert sources["clip_grad"] == sources["bf16"] == "@run.args"
    assert sources["adam_beta1"] == "flag"
    assert (
        sources["ffn_hidden_size"]
        == "derived: 4 x hidden size; with --swiglu 8/3 x hidden size, rounded down to a multiple of 64"
    )
    keys = (
        "optim.adam_beta1",
        "training.seed",
        "training.bf16",
        "optim.adam_beta2",
        "model.ffn_hidden_size",
    )
    assert [parsed.config.is_given(key) for key in keys] == [True, True, True, False, False]
    of_a_program = dataclasses.replace(parsed.config, origins=None)
    assert of_a_program == parsed.config and of_a_program.is_given("optim.adam_beta2")


@pytest.mark.parametrize(
    ("repeated", "key", "value", "said"),
    [
        (
            "--seed 1 --bf16 --seed 2 --seed 3",
            "training.seed",
            3,
            "--seed was given 3 times: --seed 1, --seed 2, --seed 3. The last one counts.",
        ),
        (
            "--seed one --seed=2",
            "training.seed",
            2,
            "--seed was given 2 times: --seed one, --seed 2. The last one counts.",
        ),
        (
            "--data-path train.jsonl valid.jsonl --data-path valid.jsonl",
            "data.data_path",
            ("valid.jsonl",),
            "--data-path was given 2 times: --data-path train.jsonl valid.jsonl, --data-path valid.jsonl. "
            "The last one counts.",
        ),
        (
            "--hybrid-override-pattern M* --hybrid-layer-pattern *M",
            "model.hybrid_layer_pattern",
            "*M",
            "--hybrid-layer-pattern was given 2 times: --hybrid-override-pattern M*, --hybrid-layer-pattern *M. "
            "The last one counts.",
        ),
        (
            "--enable-cuda-graph --cuda-graph-impl none",
            "cuda_graph.cuda_graph_impl",
            "none",
            "--cuda-graph-impl was given 2 times: --enable-cuda-graph, --cuda-graph-impl none. The last one counts.",
        ),
        (
            "--bf16 --no-bf16",
            "training.bf16",
            False,
            "--no-bf16 was given 2 times: --bf16, --no-bf16. The last one counts.",
        ),
        (
            "@a.args @b.args",
            "training.seed",
            5,
            "--seed was given 2 times: --seed 4, --seed 5. The last one counts.",
        ),
        (
            "--config a.yaml --config b.yaml",
            "training.seed",
            7,
            "--config was given 2 times: --config a.yaml, --config b.yaml. The last one counts.",
        ),
        (
            "--optimizer muon --optimizer adam --moe-router-dtype fp64 --moe-router-dtype fp32",
            "training.seed",
            1234,
            "--optimizer was given 2 times: --optimizer muon, --optimizer adam. The last one counts.",
        ),
    ],
)
def test_of_a_flag_given_twice_the_last_counts_and_a_line_says_so(
    right, tmp_path, repeated, key, value, said
) -> None:
    for name, text in {
        "a.args": "--seed 4",
        "b.args": "--seed 5",
        "a.yaml": "seed: 6",
        "b.yaml": "seed: 7",
    }.items():
        (tmp_path / name).write_text(text)
    argv = [
        *argv_of({flag: value for flag, value in right.items() if flag not in said}),
        *repeated.split(),
    ]
    parsed = parse_with_sources(argv)
    section, name = key.split(".")
    assert getattr(getattr(parsed.config, section), name) == value
    assert next(warning for warning in parsed.warnings if "times" in warning) == said
    assert all(warning.endswith("counts.") for warning in parsed.warnings)


def test_a_switch_can_be_taken_back_and_a_negated_one_given(right, tmp_path) -> None:
    (tmp_path / "run.yaml").write_text("bf16: true\nmodel: {add_bias_linear: false}\n")
    kept = parse([*argv_of(right), "--config", "run.yaml"])
    assert (kept.training.bf16, kept.model.add_bias_linear) == (True, False)
    back = parse([*argv_of(right), "--config", "run.yaml", "--no-bf16", "--add-bias-linear"])
    assert (back.training.bf16, back.model.add_bias_linear) == (False, True)
    assert parse([*argv_of(right), "--disable-bias-linear"]).model.add_bias_linear is False


def test_a_configuration_file_takes_flat_flag_names_and_numbers_that_yaml_reads_as_text(
    right, tmp_path
) -> None:
    del right["--lr"]
    (tmp_path / "run.yaml").write_text(
        "lr: 1e-4\ndisable-bias-linear: true\nuse-mcore-models: true\nhybrid-override-pattern: 'M*-M'\n"
        "packing:\n  packing_method: sequential\nrotary_base: 5000\ndata-path: train.jsonl\n"
        "cuda-graph-granularity: layer\n"
    )
    for flag in ("--hybrid-layer-pattern", "--data-path"):
        del right[flag]
    parsed = parse_with_sources([*argv_of(right), "--config", "run.yaml"])
    config = parsed.config
    assert config.optim.lr == 1e-4
    assert config.model.add_bias_linear is False
    assert config.model.hybrid_layer_pattern == "M*-M"
    assert config.packing.packing_method == "sequential"
    assert config.model.rotary_base == 5000.0
    assert isinstance(config.model.rotary_base, float)
    assert config.data.data_path == ("train.jsonl",)
    assert set(parsed.always) == {"--use-mcore-models", "--cuda-graph-granularity"}
    assert len(parsed.warnings) == 1
    assert "hybrid_layer_pattern" in parsed.warnings[0]


@pytest.mark.parametrize(
    ("text", "option", "cure"),
    [
        ("model:\n  hiden_size: 3\n", "run.yaml:2 model.hiden_size", "hidden_size"),
        ("modle:\n  hidden_size: 3\n", "run.yaml:1 modle", "model"),
        ("packing: {lr: 3}\n", "run.yaml:1 packing.lr", "remove it"),
        ("seed: 1\nseed: 2\n", "run.yaml:2 seed", "remove one"),
        ("seed: 1\ntraining: {seed: 2}\n", "run.yaml:2 training.seed", "keep one"),
        ("model: {swiglu: true}\nmodel: {add_qkv_bias: true}\n", "run.yaml:2 model", "remove one"),
        ("optim: 3\n", "run.yaml:1 optim", "indented"),
        ("- seed\n", "--config", "model:"),
        ("seed: [1\n", "--config", "line"),
        ("hybrid_layer_pattern: *M\n", "--config", "quotes"),
        ("seed: !!python/object/apply:os.getcwd []\n", "--config", "correct it"),
        ("seed: true\n", "--seed", "--seed N"),
        ("seed: null\n", "run.yaml:1 seed", "remove the key"),
        ("seed: 1.5\n", "--seed", "whole number"),
        ("bf16: 1\n", "run.yaml:1 bf16", "true or false"),
        ("bf16: 'true'\n", "run.yaml:1 bf16", "true or false"),
        ("save: 2026\n", "run.yaml:1 save", "quotes"),
        ("clip_grad: .nan\n", "--clip-grad", "finite"),
        ("clip_grad: one\n", "run.yaml:1 clip_grad", "number"),
        ("cuda-graph-granularity: chunk\n", "--cuda-graph-granularity", "--cuda-graph-impl local"),
        ("cuda-graph-impl: transformer_engine\n", "--cuda-graph-impl", "give local"),
        ("enable-cuda-graph: local\n", "run.yaml:1 enable-cuda-graph", "true or false"),
        ("? [a]\n: 1\n", "run.yaml:1", "name"),
        ("seed: \x00\n", "--config", "correct it"),
    ],
)
def test_a_wrong_configuration_file_names_the_line_and_the_cure(
    right, tmp_path, text, option, cure
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    found = problems([*argv_of(right), "--config", "run.yaml"])
    assert set(found) == {option}
    assert cure in found[option]


def test_a_misspelt_required_flag_is_one_problem(right) -> None:
    right["--hiden-size"] = right.pop("--hidden-size")
    assert set(problems(argv_of(right))) == {"--hiden-size"}


def test_argument_files_nest_but_not_in_a_circle(right, tmp_path) -> None:
    (tmp_path / "outer.args").write_bytes(
        b"\xef\xbb\xbf@inner.args \\\r\n--seed 5"
    )  # some editors save a byte-order mark and Windows line ends
    (tmp_path / "inner.args").write_text("--hybrid-layer-pattern 'M*-M'\n")
    del right["--hybrid-layer-pattern"]
    config = parse([*argv_of(right), "@outer.args"])
    assert (config.training.seed, config.model.num_layers) == (5, 4)
    (tmp_path / "inner.args").write_text("@outer.args\n")
    found = problems([*argv_of(right), "--hybrid-layer-pattern", "M", "@outer.args"])
    assert "(outer.args -> inner.args -> outer.args)" in found["@outer.args"]
    (tmp_path / "inner.args").write_text("--save 'open\n")
    assert (
        "quotation"
        in problems([*argv_of(right), "--hybrid-layer-pattern", "M", "@outer.args"])["@inner.args"]
    )


@pytest.mark.parametrize("pattern", ["-M*", "--M*-", "--M", "---", "*", "M"])
def test_patterns_that_look_like_flags(right, pattern: str) -> None:
    right["--hybrid-layer-pattern"] = pattern
    assert parse(argv_of(right)).model.hybrid_layer_pattern == pattern
    del right["--hybrid-layer-pattern"]
    assert (
        parse([*argv_of(right), f"--hybrid-layer-pattern={pattern}"]).model.hybrid_layer_pattern
        == pattern
    )


def test_the_global_batch_size_follows_the_number_of_processes(right) -> None:
    assert parse([*argv_of(right), "--micro-batch-size", "2"], 4).packing.global_batch_size == 8
    config = parse([*argv_of(right), "--global-batch-size", "24", "--micro-batch-size", "2"], 4)
    assert config.micro_batches_per_step(config.data_parallel_size(4)) == 3
    assert config.packs_per_step() == 12
    assert config.packing.tokens_per_pack == 256


def test_how_many_steps_samples_make_is_known_when_a_checkpoint_is_read(right) -> None:
    """A profiled step beyond the 2 steps of --train-samples is accepted: a resumed run whose
    earlier steps were smaller has more steps.
    """
    profiled = "--profile --use-pytorch-profiler"
    argv = argv_of(right, f"~--train-iters --train-samples 8 --global-batch-size 4 {profiled}")
    assert parse(argv).training.train_iters == 2


def test_documents_fill_a_sample_and_text_is_split(right) -> None:
    """The default maximum length of a document is one sample, also in packs of several samples.
    Longer text is split, and conversations are shortened.
    """
    samples = ("--micro-batch-size", "4")
    packing = parse([*argv_of(right), *samples]).packing
    assert (packing.tokens_per_pack, packing.max_document_length, packing.overlong_policy) == (
        512,
        128,
        "split",
    )
    longest = parse([*argv_of(right), *samples, "--max-document-length", "512"])
    assert longest.max_positions == longest.packing.max_document_length == 512
    assert parse([*argv_of(right), "--max-position-embeddings", "300"]).max_positions == 300
    assert parse([*argv_of(right), "--sft"]).packing.overlong_policy == "truncate_prompt"
    assert (
        parse([*argv_of(right), "--sft", "--overlong-policy", "split"]).packing.overlong_policy
        == "split"
    )
    of_a_program = replace(parse(argv_of(right)), packing=PackingConfig(seq_length=64))
    assert (of_a_program.packing.overlong_policy, of_a_program.packing.max_document_length) == (
        "split",
        64,
    )
    origin = parse_with_sources(argv_of(right)).sources["packing.overlong_policy"]
    assert origin.startswith("derived: split, which loses no token; with --sft ")


def test_documents_are_aligned_to_the_chunks_of_a_zigzag(right) -> None:
    def alignment(world_size: int, *more: str) -> int:
        return parse([*argv_of(right), *more], world_size).document_alignment

    shared = ("--context-parallel-size", "2", "--cp-comm-type")
    assert alignment(1) == alignment(2, *shared, "a2a") == 1
    zigzag = ("--cp-partition-mode", "zigzag")
    assert alignment(2, *shared, "allgather", *zigzag) == 4
    assert alignment(2, *shared, "p2p", *zigzag) == 4
    assert alignment(2, *shared, "p2p") == 1  # the lengths of the documents may change it
    assert [alignment(size, "--pad-packed-seq-alignment", "8") for size in (1, 2)] == [8, 8]
    assert alignment(2, *shared, "p2p", "--pad-packed-seq-alignment", "8") == 8
    assert parse([*argv_of(right), *shared, "allgather"], 2).parallel.cp_comm_type == "all_gather"


def test_numbers_of_the_launch_come_from_the_environment(right, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert parse(argv_of(right)).packing.global_batch_size == 2
    assert (
        "multiple of 2"
        in problems([*argv_of(right), "--global-batch-size", "3"])["--global-batch-size"]
    )
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert set(problems(argv_of(right))) == {"WORLD_SIZE"}


def test_variables_that_contradict_deterministic_mode(right, monkeypatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert set(problems([*argv_of(right), "--deterministic-mode"])) == {"NCCL_ALGO"}
    assert not parse(argv_of(right)).training.deterministic_mode


def test_a_run_that_resumes_itself_may_have_nothing_to_load_yet(right, tmp_path) -> None:
    config = parse([*argv_of(right), "--save", "ckpt", "--load", "./ckpt", "--save-interval", "5"])
    assert (config.checkpoint.save, config.checkpoint.load) == ("ckpt", "./ckpt")
    (tmp_path / "ckpt").mkdir()
    assert parse([*argv_of(right), "--load", "ckpt", "--finetune"]).checkpoint.finetune


def test_data_may_be_files_directories_and_patterns(right) -> None:
    right["--data-path"] = "."
    assert parse(argv_of(right)).data.train_paths == (".",)
    right["--data-path"] = "t*.jsonl"
    config = parse(
        [
            *argv_of(right),
            "--sft",
            "--chat-template",
            "chatml",
            "--tokenizer-type",
            "TrainedBPETokenizer",
        ]
    )
    assert config.data.train_paths == ("t*.jsonl",)


def test_data_may_be_blended_and_divided(right, tmp_path) -> None:
    (tmp_path / "corpus_text.idx").write_bytes(b"1")
    right["--data-path"] = "3"
    blend = ["train.jsonl", "1", "corpus_text"]
    data = parse([*argv_of(right), *blend, "--split", "96, 3, 1", "--eval-interval", "5"]).data
    assert data.train_blend == BlendedPaths(
        ("train.jsonl", "corpus_text"), (Fraction(3, 4), Fraction(1, 4))
    )
    assert (
        data.shares == (Fraction(96, 100), Fraction(3, 100), Fraction(1, 100))
        and data.has_validation
    )
    assert (
        BlendedPaths.from_arguments(("a", "b")).weights
        is BlendedPaths.from_arguments(()).weights
        is None
    )  # as in Megatron, two paths have no weights


def test_data_that_cannot_be_cached_beside_itself_needs_a_cache_path(
    right, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(
        "os.access", lambda place, mode: not (mode & os.W_OK and str(place) == str(tmp_path))
    )
    assert set(problems(argv_of(right))) == {"--data-cache-path"}
    (tmp_path / "cache").mkdir()
    assert parse([*argv_of(right), "--data-cache-path", "cache"]).data.data_cache_path == "cache"
    (tmp_path / CACHE_NAME).mkdir()
    assert parse(argv_of(right)).data.data_cache_path is None


def test_names_that_the_data_package_knows_as_well() -> None:
    from megatron_packed.data.sources.tokenized_dataset import DEFAULT_CACHE_NAME
    from megatron_packed.data.tokenizers.chat_format import BUILT_IN_TEMPLATES
    from megatron_packed.data.tokenizers.prompt_formats import FORMATS_BY_NAME as FORMATS

    assert (set(CHAT_TEMPLATES), CACHE_NAME) == (set(BUILT_IN_TEMPLATES), DEFAULT_CACHE_NAME)
    assert tuple(FORMATS) == PROMPT_FORMATS


def test_configs_cannot_be_changed(right) -> None:
    config = parse(argv_of(right))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.optim.lr = 1.0


def test_every_accepted_flag_has_the_type_of_its_field(right) -> None:
    assert spellings()["--adam-beta1"].field.kind.base is float
    assert spellings()["--valid-data-path"].field.kind.many
    assert spellings()["--num-experts"].field.kind.optional
    assert spellings()["--disable-bias-linear"].sets is False
    assert spellings()["--hybrid-override-pattern"].deprecated


def test_directories_that_are_missing_will_be_made(right) -> None:
    argv = [
        *argv_of(right),
        "--save",
        "a/b/c",
        "--log-jsonl",
        "d/e/log.jsonl",
    ]
    assert parse(argv).checkpoint.save == "a/b/c"


EXPERTS = ["--num-experts", "4", "--disable-bias-linear", "--hybrid-layer-pattern"]


def test_a_flex_dispatcher_is_taken_as_alltoall_with_one_line(right) -> None:
    argv = [*argv_of(right), *EXPERTS, "ME", "--moe-token-dispatcher-type"]
    flex, plain = (parse_with_sources([*argv, word]) for word in ("flex", "alltoall"))
    assert flex.config == plain.config and plain.warnings == flex.warnings[:-1]
    assert "--moe-token-dispatcher-type flex is taken as alltoall: " in flex.warnings[-1]
    backend = ["--moe-flex-dispatcher-backend", "hybridep", "--moe-hybridep-num-sms", "16"]
    of_library = parse_with_sources([*argv, "flex", *backend, "--moe-enable-deepep"])
    assert of_library.config == plain.config and len(of_library.accepted) == 3


def test_layers_of_a_depth_follow_the_pattern_once_for_each_depth(right) -> None:
    argv = [*argv_of(right), *EXPERTS]
    old = ["--mtp-hybrid-override-pattern", "*E"]
    parsed = parse_with_sources([*argv, "M*ME", *old, "--mtp-num-layers", "2"])
    unified = parse_with_sources([*argv, "M*ME/*E/*E"])
    assert parsed.config == unified.config and parsed.config.model.mtp_num_layers == 2
    assert parsed.warnings[-1].endswith("write --hybrid-layer-pattern M*ME/*E/*E.")
    for more, why in (
        (["M*ME/E", *old], "the pattern has depths"),
        (["M*ME", *old], "--mtp-num-layers gives no depth"),
    ):
        unchanged = parse_with_sources([*argv, *more])
        assert unchanged.config == parse([*argv, more[0]])
        assert unchanged.warnings[-1] == f"--mtp-hybrid-override-pattern has no effect: {why}."
