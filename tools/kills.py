"""Kill a run at random moments or inside saves, finish it, and compare it with an undisturbed run."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import common  # noqa: F401  paths of helpers
from megatron_packed.checkpoint.save_sites import SAVE_SITES
from support.faults import kill_in_save
from support.runs import (
    Data,
    Finished,
    assert_same_state,
    in_folder,
    run,
    start,
    steps,
    tiny_options,
)

KILLED = -9
LAST = 160
"""Number of iterations of the run."""
_EVERY_RANK = ("save.begin", "shard.")
"""Beginnings of the places of a save that every rank passes; rank 0 passes all places."""
_NEVER = "save.old_moved"
"""Place that only a save of a step that has a checkpoint passes."""
Options = dict[str, object]
OF_SAVES: Options = {
    "save_retain": 1,
    "tokenizer_type": "TrainedBPETokenizer",
    "tokenizer_vocab_size": 280,
}
"""Options with which saves pass all places: they attach a tokenizer and remove old checkpoints."""


def options_of(folder: Path) -> dict[str, object]:
    """Return the options of a run that draws random numbers in every step.

    It skips loss spikes, and validates and saves at different steps.
    """
    data = Data.make(folder)
    return tiny_options(
        data,
        train_iters=LAST,
        hidden_dropout=0.1,
        valid_data_path=data.valid,
        eval_interval=4,
        eval_iters=2,
        save_interval=3,
        loss_spike_policy="skip",
        loss_spike_window=8,
        grad_norm_spike_factor=1.2,
    )


def kill_at_random(
    options: Options, folder: Path, processes: int, draw: random.Random
) -> tuple[str, Finished]:
    """Kill some ranks at a random moment; return it in words and the end of the run."""
    log = folder / "log.jsonl"
    started = start(options, folder, processes)
    trained = last_step(log)
    ahead = draw.randint(0, 4)  # 0: at any time during the start
    if ahead:
        started.wait_for_line(min(trained + ahead, LAST - 1), log)
    time.sleep(draw.uniform(0, 0.1 if ahead else 2.0))
    ranks = list(range(processes))
    draw.shuffle(ranks)
    started.kill(*ranks[: draw.randint(1, processes)])
    return "at a random moment", started.wait()


def kill_inside_a_save(
    options: Options, folder: Path, processes: int, draw: random.Random
) -> tuple[str, Finished]:
    """Kill one rank at a random place of its next save or of the save after that."""
    site = draw.choice([site for site in SAVE_SITES if site != _NEVER])
    rank = draw.randrange(processes) if site.startswith(_EVERY_RANK) else 0
    # The first save of a run has no old checkpoint to remove.
    save = draw.randint(2 if site == "save.old_removed" else 1, 3)
    fault = partial(kill_in_save, site, save, rank)
    return f"at {site} of rank {rank}, save {save}", run(options, folder, processes, fault)


def last_step(log: Path) -> int:
    """Return the last step in the log, 0 without one."""
    return steps(log)[-1]["iteration"] if log.exists() and steps(log) else 0


def main(kills: int, processes: int, seed: int, inside_saves: bool = False) -> int:
    """Return the exit code."""
    draw, kill = random.Random(seed), kill_inside_a_save if inside_saves else kill_at_random
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = options_of(folder) | (OF_SAVES if inside_saves else {})
        undisturbed, killed = folder / "undisturbed", folder / "killed"
        assert run({**options, **in_folder(undisturbed)}, undisturbed, processes).exit_code == 0
        log, done, begun = killed / "log.jsonl", 0, time.monotonic()
        while done < kills:
            place, finished = kill({**options, **in_folder(killed)}, killed, processes, draw)
            died = KILLED in finished.exit_codes
            done += died
            reached = last_step(log)
            print(f"life {done}: {place}: {finished.exit_codes}, step {reached}", flush=True)
            assert died or reached < LAST, (
                "the run ended before it was killed often enough; raise LAST"
            )
            assert died or not inside_saves, f"no rank reached the place\n{finished.console}"
        assert run({**options, **in_folder(killed)}, killed, processes).exit_code == 0
        assert_same_state(killed / "checkpoints", undisturbed / "checkpoints", LAST)
        assert steps(log) == steps(undisturbed / "log.jsonl")
        print(f"{done} of {kills} kills left no trace, in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inside-saves", action="store_true", help="kill at places of a save")
    arguments = parser.parse_args()
    sys.exit(main(arguments.kills, arguments.processes, arguments.seed, arguments.inside_saves))
