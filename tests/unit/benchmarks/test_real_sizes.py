"""`prepare_packs.py` and `real_sizes.py` of the benchmarks: packs, command lines and measurements."""

import json

import numpy as np
import pytest

import harness
import real_sizes
from megatron_packed.config.parser.parse import parse_with_sources
from megatron_packed.data.index.indexed_file import IndexedFile
from megatron_packed.data.index.indexed_writer import IndexedWriter
from real_sizes import OURS, SIZES, STEPS, THEIRS, counted, rows_of, run_name, sides_of, with_ratio
from support.benchmark_inputs import conversations, write_jsonl
from support.data_helpers import byte_level

TINY = "--vocab-size 301 --null-tokenizer-eod-id 300"


@pytest.fixture
def data(tmp_path):
    random = np.random.default_rng(0)
    with IndexedWriter(tmp_path / "packs", np.uint16) as writer:
        for _ in range(40):
            writer.add_document(random.integers(0, 300, int(random.integers(5, 60))))
    return tmp_path / "packs"


@pytest.mark.parametrize("adapters", [False, True])
def test_a_run_of_each_kind_of_model_is_measured(adapters, data, run_script, monkeypatch):
    """In this process in place of a job of its own; a CPU has neither a profile nor a peak."""
    monkeypatch.setattr(
        real_sizes, "start", lambda job, gpus, limit: real_sizes.run_rank(job) or ""
    )
    options = ("--quick", "--device", "cpu", "--layers", "3", "--graphs", "none", "--flags", TINY)
    sizes = ("nemotron_h_8b", "moe_30b_a3b_balanced")
    options = (*options[:-1], f"{TINY} --lora-rank 2") if adapters else options
    document = run_script("real_sizes", data, *options, "--sizes", *sizes)
    for name in sizes:
        (found,) = document["results"]["sizes"][name]["runs"].values()
        assert found["steps"] == 8 and len(found["loss"]) == STEPS
        assert (
            found["tokens_per_second_per_gpu"] > 0
            and found["planned_total_gib"] > found["planned_gib"] >= 0
        )
    assert str(data.parent) not in json.dumps(document)
    first, second = rows_of(document["results"])
    assert first["size"] == "nemotron_h_8b" and second["run"] == "megatron_packed, 3 layers"


@pytest.mark.parametrize("layers", [None, 9])
@pytest.mark.parametrize("name", SIZES)
def test_the_command_line_of_each_size_is_taken(name, layers, data):
    words = real_sizes.command_words(
        SIZES[name], str(data), 4, layers, "", quick=False, device="cuda"
    )
    config = parse_with_sources(words, 4, on_this_machine=False).config
    all_layers = {"hybrid_1b": 28, "qwen3_5_9b": 64}.get(name, 52)
    assert len(config.model.hybrid_layer_pattern) == (layers or all_layers)
    assert config.micro_batches_per_step(4) == SIZES[name].packs
    assert config.parallel.overlap_grad_reduce and config.parallel.overlap_param_gather
    experts = config.model.num_experts is not None
    assert config.parallel.expert_model_parallel_size == (4 if experts else 1)
    assert config.model.moe_router_force_load_balancing == name.endswith("balanced")


def record(number, milliseconds):
    return {
        "step_time_ms": milliseconds,
        "tokens_per_second": 2e6 / milliseconds,  # 2,000 tokens in each step
        "mfu": 100 / milliseconds,
        "lm_loss": 1 / number,
        "graph_replays": 2,
    }


def test_the_last_steps_count():
    steps = [record(1 + n, 9e9 if n < STEPS - 8 else 200 + 100 * (n % 2)) for n in range(STEPS + 2)]
    found = counted(steps, 2)
    assert found["tokens_per_second_per_gpu"] == 4000  # 16,000 tokens in 2 s on 2 GPUs
    assert found["mfu"] == 0.4 and found["replays"] == 16 and len(found["loss"]) == STEPS


def test_both_sides_run_at_the_same_depth_and_their_speeds_have_a_ratio():
    assert sides_of(None, None) == [(OURS, None)]
    assert sides_of(None, 8) == [(OURS, None), (OURS, 8), (THEIRS, 8)]
    assert sides_of(8, 8) == [(OURS, 8), (THEIRS, 8)]
    runs = {
        run_name(OURS, 8): {"tokens_per_second_per_gpu": 300.0},
        run_name(THEIRS, 8): {"tokens_per_second_per_gpu": 200.0},
    }
    assert with_ratio(runs, 8)["over_megatron_core"] == 1.5
    assert with_ratio({}, 8)["over_megatron_core"] is None


def test_a_failed_run_is_in_the_results(data, tmp_path, monkeypatch):
    monkeypatch.setattr(real_sizes, "start", lambda job, gpus, limit: f"{job.parent}: no memory\n")
    found = real_sizes.measured(OURS, [], "cpu", 1, 1.0)
    assert found["failed"] == ".: no memory\n"
    (row,) = rows_of({"sizes": {"a": with_ratio({"b": harness.plain(found)}, None)}})
    assert row["step ms"] == f"failed after {found['seconds_in_all']} s"


def test_a_ratio_that_was_not_measured_is_shown_as_such():
    (row,) = rows_of({"sizes": {"a": with_ratio({"b": {"failed": "", "seconds_in_all": 1}}, 8)}})
    assert row[real_sizes.RATIO] == "not measured"


def test_our_runs_of_a_result_have_the_command_lines_that_were_measured():
    sizes = {
        "moe_30b_a3b_balanced": with_ratio({run_name(OURS, 9): {}, run_name(THEIRS, 9): {}}, 9)
    }
    found = {"gpus": 4, "graphs": "local", "flags": "--main-grads-dtype bf16", "sizes": sizes}
    [(name, words, run)] = real_sizes.measured_runs(found, "--moe-dispatch rows")
    assert name == "moe_30b_a3b_balanced, 9 layers, 4 GPUs" and run == {}
    assert words[words.index("--expert-model-parallel-size") + 1] == "4"
    config = parse_with_sources(words, 4, on_this_machine=False).config
    assert (
        len(config.model.hybrid_layer_pattern) == 9 and config.cuda_graph.cuda_graph_impl == "local"
    )
    assert config.parallel.main_grads_dtype == "bf16"


def test_conversations_of_the_first_packs_are_stored(tmp_path, run_script):
    write_jsonl(tmp_path / "chat.jsonl", conversations(30))
    byte_level(["<|endoftext|>"]).model.save(str(tmp_path))
    options = ("--packs", "2", "--slots", "256", "--vocab-file", tmp_path / "vocab.json")
    options += ("--merge-file", tmp_path / "merges.txt")
    run_script("prepare_packs", tmp_path / "made", tmp_path / "chat.jsonl", *options)
    stored = IndexedFile(tmp_path / "made")
    assert len(stored) > 2 and 0.8 * 512 < stored.num_tokens <= 512
    assert stored.dtype.itemsize == 2
