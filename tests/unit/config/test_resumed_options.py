"""Options that a checkpoint decides, unless the user gives them."""

from dataclasses import replace

import pytest

from megatron_packed.config.parser.parse import parse
from megatron_packed.config.resumed_options import (
    implied_keys,
    packs_as_stored,
    partition_as_stored,
    sums_as_stored,
    with_implied,
)
from megatron_packed.config.run import every_field, keys_deciding
from megatron_packed.config.serialise import to_dict
from support.command_lines import argv_of

KEYS = {
    "packing.overlong_policy",
    "packing.max_document_length",
    "packing.keep_pieces_without_targets",
    "data.split_order",
    "data.answer_end",
    "data.data_rules",
}
SUMS = {"model.moe_dispatch", "parallel.mamba_cp_comm_type", "parallel.linear_cp_mode"}
RULES = "--micro-batch-size 2 --sft --split 9,1"


@pytest.fixture
def argv(right) -> list[str]:
    return argv_of(right, RULES)


def old(config) -> dict:
    """Return a stored configuration of an old version, which has only the over-long policy of these
    options.
    """
    stored = to_dict(config)
    for key in KEYS:
        section, _, name = key.partition(".")
        del stored[section][name]
    stored["packing"]["overlong_policy"] = "truncate"
    return stored


def test_an_old_checkpoint_decides_what_is_not_given(argv) -> None:
    config = parse(argv)
    length = 2 * config.packing.seq_length
    taken, flags = packs_as_stored(config, old(config))
    assert (taken.packing.max_document_length, taken.packing.keep_pieces_without_targets) == (
        length,
        True,
    )
    assert (taken.packing.overlong_policy, taken.data.split_order) == ("truncate", "file")
    assert taken.data.answer_end == "document"
    others = {"--keep-pieces-without-targets", "--split-order file", "--overlong-policy truncate"}
    assert set(flags) == others | {
        f"--max-document-length {length}",
        "--answer-end document",
        "--data-rules 1",
    }
    assert packs_as_stored(taken, old(config)) == (taken, [])
    assert packs_as_stored(config, to_dict(taken)) == (
        taken,
        flags,
    )  # a checkpoint of the resumed run stores these options
    assert implied_keys(config) == KEYS | SUMS


EXPERTS = """--hybrid-layer-pattern ME --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16
--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --disable-bias-linear"""


def test_a_checkpoint_of_before_goes_on_with_the_sums_of_its_time(right) -> None:
    """It has rows: as the value of a default, or no value if the option did not exist."""
    words = argv_of(right, EXPERTS)
    config = parse(words, 2)
    assert config.model.moe_dispatch == "tokens"
    stored = to_dict(config)
    stored["model"]["moe_dispatch"] = "rows"
    older = to_dict(config)
    del older["model"]["moe_dispatch"]
    for each in (stored, older):
        taken, flags, unfit = sums_as_stored(config, each, 2)
        assert (taken.model.moe_dispatch, flags, unfit) == ("rows", ["--moe-dispatch rows"], [])
        assert packs_as_stored(config, each) == (config, [])
    assert sums_as_stored(config, to_dict(config), 2) == (config, [], [])
    gathers = parse([*words, "--moe-token-dispatcher-type", "allgather"], 2)
    assert sums_as_stored(gathers, stored, 2) == (gathers, [], [])  # the option has no effect
    given = parse([*words, "--moe-dispatch", "tokens"], 2)
    assert sums_as_stored(given, stored, 2) == (given, [], [])


@pytest.mark.parametrize(
    ("layer", "option", "heads", "states"),
    [
        ("M", "mamba_cp_comm_type", "heads", "state"),
        ("G", "linear_cp_mode", "headwise", "chunkwise"),
    ],
)
def test_layers_of_a_checkpoint_of_before_go_on_exchanging_heads(
    layer: str, option: str, heads: str, states: str, right
) -> None:
    words = argv_of(right, f"--hybrid-layer-pattern {layer}- --context-parallel-size 2")
    flag = "--" + option.replace("_", "-")
    config = parse(words, 2)
    assert getattr(config.parallel, option) == states
    stored = to_dict(config)
    stored["parallel"][option] = heads
    older = to_dict(config)
    del older["parallel"][option]
    for each in (stored, older):
        taken, flags, unfit = sums_as_stored(config, each, 2)
        assert getattr(taken.parallel, option) == heads
        assert (flags, unfit) == ([f"{flag} {heads}"], [])
    assert sums_as_stored(config, to_dict(config), 2) == (config, [], [])
    given = parse([*words, flag, states], 2)
    alone = parse(argv_of(right, f"--hybrid-layer-pattern {layer}-"))
    without = parse(argv_of(right, "--hybrid-layer-pattern * --context-parallel-size 2"), 2)
    for run, processes in ((given, 2), (alone, 1), (without, 2)):
        assert sums_as_stored(run, stored, processes) == (run, [], [])


def test_an_option_that_does_not_fit_the_layout_is_named_and_the_others_are_taken(right) -> None:
    """Two ranks cannot share one key head, so delta rules pass states; Mamba layers exchange heads."""
    words = argv_of(
        right,
        "--hybrid-layer-pattern MG --context-parallel-size 2 --linear-num-key-heads 1 "
        "--linear-num-value-heads 2",
    )
    config = parse(words, 2)
    stored = to_dict(config)
    stored["parallel"] |= {"mamba_cp_comm_type": "heads", "linear_cp_mode": "headwise"}
    taken, flags, unfit = sums_as_stored(config, stored, 2)
    assert (taken.parallel.mamba_cp_comm_type, taken.parallel.linear_cp_mode) == (
        "heads",
        "chunkwise",
    )
    assert (flags, unfit) == (["--mamba-cp-comm-type heads"], ["--linear-cp-mode headwise"])


@pytest.mark.parametrize(
    ("of_checkpoint", "flags", "mode"),
    [
        ({}, "", "zigzag"),  # saved before the option existed
        ({"cp_partition_mode": "zigzag"}, "", "zigzag"),
        ({"cp_partition_mode": "contiguous"}, "", "contiguous"),
        ({"cp_partition_mode": "auto", "cp_comm_type": "a2a"}, "", "contiguous"),
        ({"context_parallel_size": 1}, "", "contiguous"),
        ({"context_parallel_size": 4}, "", "auto"),  # neither keeps an alignment of 8
        ({"context_parallel_size": 4}, "--pad-packed-seq-alignment 8", "zigzag"),
        ({"cp_partition_mode": "contiguous"}, "--cp-partition-mode zigzag", "zigzag"),
        # One partition fits kernels of GPUs, but the packs are those of the other.
        ({"cp_partition_mode": "zigzag"}, "--window-size 8,0", "zigzag"),
        ({"cp_partition_mode": "zigzag"}, "--kv-channels 4", "zigzag"),
        ({"cp_partition_mode": "contiguous"}, "--kv-channels 4", "contiguous"),
    ],
)
def test_a_resumed_run_chooses_the_partition_of_its_packs(
    right, of_checkpoint, flags, mode
) -> None:
    exchange = "--hybrid-layer-pattern *- --context-parallel-size 2 --cp-comm-type p2p"
    config = parse(argv_of(right, f"{exchange} {flags}"), 2)
    stored = to_dict(config)
    del stored["parallel"]["cp_partition_mode"]
    stored["parallel"] |= of_checkpoint
    kept, said = partition_as_stored(config, stored)
    assert kept.parallel.cp_partition_mode == mode
    changed = config.parallel.cp_partition_mode != mode
    assert said == [f"--cp-partition-mode {mode}"] * changed


@pytest.mark.parametrize("mode", ["zigzag", "contiguous"])
def test_a_given_alignment_keeps_the_partition_of_the_checkpoint(right, mode) -> None:
    exchange = "--hybrid-layer-pattern *- --context-parallel-size 2 --cp-comm-type p2p"
    config = parse(argv_of(right, f"{exchange} --pad-packed-seq-alignment 8"), 2)
    stored = to_dict(config)
    stored["parallel"]["cp_partition_mode"] = mode
    assert partition_as_stored(config, stored)[0].parallel.cp_partition_mode == mode


def test_what_is_given_counts(argv) -> None:
    config = parse(
        [
            *argv,
            "--split-order",
            "shuffled",
            "--overlong-policy",
            "split",
            "--max-document-length",
            "9",
            "--answer-end",
            "turn",
            "--data-rules",
            "2",
        ]
    )
    taken, flags = packs_as_stored(config, old(config))
    assert flags == ["--keep-pieces-without-targets"]
    assert taken == replace(
        config, packing=replace(config.packing, keep_pieces_without_targets=True)
    )
    assert packs_as_stored(replace(config, origins=None), old(config)) == (
        config,
        [],
    )  # all options of a program count as given


def test_text_has_pieces_with_targets_alone_and_keeps_its_order(argv) -> None:
    config = parse([word for word in argv if word != "--sft"])
    full = with_implied(old(config))
    assert (
        full["packing"]["keep_pieces_without_targets"] is False
        and full["data"]["split_order"] == "file"
        and full["data"]["answer_end"] == "turn"
    )


def test_what_fits_no_more_is_left_to_the_refusal(argv) -> None:
    """No option is taken from a checkpoint whose values do not fit the run.

    The checkpoint allows documents that are twice as long as the run's packs.
    """
    config = parse(argv)
    stored = old(config)
    stored["packing"]["seq_length"] *= 2
    assert packs_as_stored(config, stored) == (config, [])


def test_weights_of_no_run_decide_nothing(argv) -> None:
    config = parse(argv)
    assert packs_as_stored(config, {"model": {}, "training": {}}) == (config, [])


def test_options_of_packing_and_of_text_decide_packs_and_tokens() -> None:
    """Options of these sections that decide nothing in a resumed run are listed here."""
    without = {
        "packing.global_batch_size",
        "packing.rampup_batch_size",
        *(f"data.{part}_data_path" for part in ("valid", "test")),  # trained on by no step
        *(f"data.{name}" for name in ("max_bad_fraction", "data_cache_path", "num_workers")),
        *(f"data.{name}" for name in ("mmap_bin_files", "padded_vocab_size")),
    }
    options = [field for field in every_field() if field.section in ("packing", "data")]
    assert without == {field.key for field in options if field.option.resume is None}
    assert set(keys_deciding("packs")) >= {"training.seed", "packing.seq_length"}


def test_a_phase_keeps_the_tokenizer() -> None:
    assert not any(field.option.phase for field in every_field() if field.option.resume)
