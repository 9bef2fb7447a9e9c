"""Kill a run at random moments, finish it, and compare it with an undisturbed run."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import _paths  # noqa: F401  helpers of the tests

from support.runs import Data, assert_same_state, in_folder, run, start, steps, tiny_options

KILLED = -9
LAST = 160
"""Number of iterations of the run."""


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


def main(kills: int, processes: int, seed: int) -> int:
    """Return the exit code."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = options_of(folder)
        undisturbed, killed = folder / "undisturbed", folder / "killed"
        assert run({**options, **in_folder(undisturbed)}, undisturbed, processes).exit_code == 0
        log, done, begun = killed / "log.jsonl", 0, time.monotonic()
        while done < kills:
            started = start({**options, **in_folder(killed)}, killed, processes)
            trained = steps(log)[-1]["iteration"] if log.exists() and steps(log) else 0
            ahead = draw.randint(0, 4)  # 0: at any time during the start
            if ahead:
                started.wait_for_line(min(trained + ahead, LAST - 1), log)
            time.sleep(draw.uniform(0, 0.1 if ahead else 2.0))
            ranks = list(range(processes))
            draw.shuffle(ranks)
            started.kill(*ranks[: draw.randint(1, processes)])
            finished = started.wait()
            died = KILLED in finished.exit_codes
            done += died
            reached = steps(log)[-1]["iteration"] if log.exists() and steps(log) else 0
            print(f"life {done}: exit codes {finished.exit_codes}, step {reached}", flush=True)
            assert died or reached < LAST, (
                "the run ended before it was killed often enough; raise LAST"
            )
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
    arguments = parser.parse_args()
    sys.exit(main(arguments.kills, arguments.processes, arguments.seed))
