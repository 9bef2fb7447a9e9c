"""Scripts refuse results with unequal work, other losses, fallbacks or spikes."""

import copy

import pytest
import torch

import beside_megatron
import graph_runs
import layouts
import packed_vs_padded
import train_real

NAN, CPU = float("nan"), torch.device("cpu")
RUN = "CUDA graphs: {} micro-batches replayed, {} run eagerly (hit rate 99.9 %)"
SOUND = {
    "beside_megatron": {
        "largest_loss_difference": 0.001,
        "megatron_packed": {"learning_rate": [0.0, 0.1], "replays": 8, "fallbacks": 0},
        "megatron_core": {"learning_rate": [0.0, 0.1]},
    },
    "graph_runs": {
        "equal": {
            "set": {
                "steps_that_differ": 0,
                "validations_that_differ": 0,
                "steps_counted_wrongly": 0,
                "replays": 300,
                "fallbacks": 100,
                "micro_batches": 400,
                "audits": ["audit at step 50"],
            }
        },
        "epochs": {
            "set": {
                "fallbacks_by_epoch": [0, 0, 0],
                "epochs": [0, 1, 2],
                "replays": 900,
                "in_all": RUN.format("1,000", 0),
            }
        },
    },
    "layouts": {
        "model": {
            "plan_hash": "abc",
            "layouts": {"tp2": {"loss_difference": 1e-3, "grad_norm_difference": 1e-3}},
        }
    },
    "packed_vs_padded": {
        "padded": {"targets": 10},
        "packed": {"targets": 10},
        "loss_difference": 1e-9,
    },
    "train_real": {
        "valid_loss": [[50, 4.0], [100, 3.0]],
        "unigram_entropy": 6.0,
        "largest_over_running_median": 1.1,
        "skipped_steps": 0,
    },
}
PROBLEMS = {
    "beside_megatron": beside_megatron.problems_of,
    "graph_runs": graph_runs.problems_of,
    "layouts": layouts.problems_of,
    "packed_vs_padded": lambda found: packed_vs_padded.problems_of("x", found, CPU),
    "train_real": lambda found: train_real.problems_of("x", found, 3.1),
}
FAULTS = [
    ("beside_megatron", "largest_loss_difference", 0.0031, "0.31%"),
    ("beside_megatron", "largest_loss_difference", NAN, "losses differ"),
    ("beside_megatron", "megatron_core learning_rate", [0.0, 0.11], "learning rates"),
    ("beside_megatron", "megatron_packed fallbacks", 1, "and 1 ran eagerly"),
    ("beside_megatron", "megatron_packed replays", 0, "0 micro-batches were replayed"),
    ("graph_runs", "equal set steps_that_differ", 1, ""),
    ("graph_runs", "equal set validations_that_differ", 1, ""),
    ("graph_runs", "equal set steps_counted_wrongly", 2, ""),
    ("graph_runs", "equal set replays", 299, ""),
    ("graph_runs", "equal set audits", [], ""),
    ("graph_runs", "epochs set fallbacks_by_epoch", [0, 1, 0], ""),
    ("graph_runs", "epochs set epochs", [0, 1], ""),
    ("graph_runs", "epochs set in_all", RUN.format(999, 1), ""),
    ("layouts", "model layouts tp2 loss_difference", 0.02, ""),
    ("layouts", "model layouts tp2 loss_difference", NAN, ""),
    ("layouts", "model layouts tp2 grad_norm_difference", 0.03, ""),
    ("layouts", "model layouts tp2 failed", "ValueError: no", ""),
    ("packed_vs_padded", "packed", {"targets": 11}, ""),
    ("packed_vs_padded", "loss_difference", NAN, ""),
    ("train_real", "valid_loss", [[100, 3.1]], "not below its bound"),
    ("train_real", "valid_loss", [[100, NAN]], "not below its bound"),
    ("train_real", "unigram_entropy", 2.9, "unigram entropy"),
    ("train_real", "largest_over_running_median", 1.51, "running median"),
    ("train_real", "largest_over_running_median", NAN, "running median"),
    ("train_real", "skipped_steps", 1, "skipped"),
]
"""Script, keys of a value in its sound results, a value that is wrong, and words of the problem."""


@pytest.mark.parametrize("script", SOUND)
def test_sound_results_have_no_problem(script):
    assert PROBLEMS[script](SOUND[script]) == []


@pytest.mark.parametrize(("script", "keys", "value", "words"), FAULTS)
def test_a_fault_is_a_problem(script, keys, value, words):
    found = inner = copy.deepcopy(SOUND[script])
    *outer, last = keys.split()
    for key in outer:
        inner = inner[key]
    inner[last] = value
    problems = PROBLEMS[script](found)
    assert problems and any(words in problem for problem in problems)
    assert script == "train_real" or len(problems) == 1
