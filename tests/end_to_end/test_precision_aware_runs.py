"""Runs with bf16 moments and with masters that are bf16 weights with remainders."""

from functools import partial
from pathlib import Path
from typing import Any

from support.faults import SITES, kill_at, kill_in_save
from support.runs import (
    Data,
    assert_same_log,
    assert_same_state,
    in_folder,
    run,
    tiny_options,
    trained,
)

LAST = 6
KILLED = -9


def options_of(data: Data, **changes: Any) -> dict[str, Any]:
    low_state = {
        "bf16": True,
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "bf16",
        "exp_avg_sq_dtype": "bf16",
    }
    given = {"train_iters": LAST, "global_batch_size": 2, "save_interval": 1}
    return tiny_options(data, **given, **low_state, **changes)


def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_run(data: Data, tmp_path: Path) -> None:
    """Runs of two ranks are killed around the update, and in saves of the state."""
    folders = [tmp_path / name for name in ("killed", "undisturbed")]
    options = options_of(data, use_distributed_optimizer=True)
    faults = [partial(kill_at, site, 2, 1) for site in SITES if "update" in site]
    faults += [partial(kill_in_save, "shard.piece_written", 1, 1)]
    faults += [partial(kill_in_save, "manifest.renamed", 1, 0)]
    folders[0].mkdir()
    for fault in faults:
        finished = run({**options, **in_folder(folders[0])}, folders[0], 2, fault)
        assert KILLED in finished.exit_codes, f"{fault} did not happen: {finished}"
    for folder in folders:
        folder.mkdir(exist_ok=True)
        trained(folder, 2, options)
    assert_same_state(*(folder / "checkpoints" for folder in folders), LAST)


def test_captured_steps_have_the_bits_of_eager_steps(data: Data, tmp_path: Path) -> None:
    impls = ("none", "local", "full_iteration")
    packs = {"packing_method": "best_fit_decreasing"}  # the same packs with graphs and without
    for impl in impls:
        folder = tmp_path / impl
        folder.mkdir()
        trained(folder, 1, options_of(data, cuda_graph_impl=impl, **packs))
    for impl in impls[1:]:
        assert_same_state(*(tmp_path / name / "checkpoints" for name in (impl, "none")), LAST)
        assert_same_log(tmp_path / impl, tmp_path / "none")
