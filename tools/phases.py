"""Kill a run of three phases at random moments, and compare it with an undisturbed run."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import common  # noqa: F401  paths of helpers
from support.phases import phase_options
from support.runs import assert_same_state, in_folder, run, start, steps

KILLED = -9
LAYOUTS = {
    "1 process": (1, {}),
    "2 tensor-parallel": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}


def main(kills: int, steps_of_phase: int, seed: int) -> int:
    """Return the exit code."""
    for name, (processes, layout) in LAYOUTS.items():
        draw, begun = random.Random(seed), time.monotonic()
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            phases = phase_options(folder, seq_length=512, steps=steps_of_phase, **layout)
            undisturbed, killed = folder / "undisturbed", folder / "killed"
            for options in phases:
                assert (
                    run({**options, **in_folder(undisturbed)}, undisturbed, processes).exit_code
                    == 0
                )
            for options, wanted in zip(phases, shares(kills, len(phases))):
                kill_and_finish({**options, **in_folder(killed)}, killed, processes, wanted, draw)
            last = phases[-1]["train_iters"]
            assert_same_state(killed / "checkpoints", undisturbed / "checkpoints", last)
            assert steps(killed / "log.jsonl") == steps(undisturbed / "log.jsonl")
        seconds = time.monotonic() - begun
        print(f"{name}: {kills} of {kills} kills left no trace, in {seconds:.0f} s", flush=True)
    return 0


def shares(kills: int, phases: int) -> list[int]:
    """Return the kills of each phase."""
    return [kills // phases + (number < kills % phases) for number in range(phases)]


def kill_and_finish(
    options: dict[str, object], folder: Path, processes: int, kills: int, draw: random.Random
) -> None:
    """Kill a phase's processes at random moments, then let the phase end."""
    log, done = folder / "log.jsonl", 0
    while done < kills:
        started = start(options, folder, processes)
        trained = steps(log)[-1]["iteration"] if log.exists() and steps(log) else 0
        ahead = draw.randint(0, 3)  # 0: at any time during the start
        if ahead:
            started.wait_for_line(min(trained + ahead, options["train_iters"] - 1), log)
        time.sleep(draw.uniform(0, 0.1 if ahead else 2.0))
        # During the start, a launcher ends all processes; later, a process sees that another is dead.
        started.kill(*([draw.randrange(processes)] if ahead else []))
        finished = started.wait()
        died = KILLED in finished.exit_codes
        done += died
        print(
            f"{options['begin_phase']}, life {done}: exit codes {finished.exit_codes}", flush=True
        )
        assert died or finished.exit_code == 0, finished.console
        assert died, "the phase ended before it was killed often enough; raise --steps"
    finished = run(options, folder, processes)
    assert finished.exit_code == 0, finished.console


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    sys.exit(main(arguments.kills, arguments.steps, arguments.seed))
