"""Runs that train adapters of a base (``--lora-rank``) and are killed."""

from functools import partial
from pathlib import Path

from support.faults import SITES, kill_at, kill_in_save
from support.runs import Data, assert_same_state, in_folder, run, tiny_options, trained

LAST = 4
KILLED = -9


def test_killed_adapters_end_with_the_bits_of_an_undisturbed_run(
    data: Data, tmp_path: Path
) -> None:
    """Two ranks are killed around the update and in saves; one command begins and resumes the run."""
    given = {"train_iters": LAST, "global_batch_size": 2, "save_interval": 1, "bf16": True}
    (tmp_path / "base").mkdir()
    trained(tmp_path / "base", 1, tiny_options(data, **{**given, "train_iters": 3}))
    options = tiny_options(
        data,
        **given,
        lora_rank=2,
        lora_dropout=0.1,
        pretrained_checkpoint=str(tmp_path / "base" / "checkpoints"),
        use_distributed_optimizer=True,
    )
    folders = [tmp_path / name for name in ("killed", "undisturbed")]
    site = next(site for site in SITES if "in the update" in site)
    faults = [partial(kill_at, site, 2, 1), partial(kill_in_save, "shard.piece_written", 1, 1)]
    faults.append(partial(kill_in_save, "manifest.renamed", 1, 0))
    folders[0].mkdir()
    for fault in faults:
        finished = run({**options, **in_folder(folders[0])}, folders[0], 2, fault)
        assert KILLED in finished.exit_codes, f"{fault} did not happen: {finished}"
    for folder in folders:
        folder.mkdir(exist_ok=True)
        trained(folder, 2, options)
    assert_same_state(*(folder / "checkpoints" for folder in folders), LAST)
