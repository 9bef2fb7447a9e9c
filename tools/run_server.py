"""Process that runs the ``pretrain_hybrid.py`` of one checkout, once for each line of its input.

    PYTHONPATH=CHECKOUT python tools/run_server.py CHECKOUT [module to preload ...]

It imports nothing from the checkout that contains this file, because the checkout in its argument
may be older and use other names. An input line is ``{"folder": ..., "arguments": [...],
"processes": N, "fresh": ...}``; the answer is a line with the exit codes. Ranks come from a fork server, with the
environment that torchrun sets. They run in the folder, so that equal runs of two checkouts see
equal paths. A fresh rank imports torch itself, after it has set its environment variables.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from typing import Any

SECONDS = 600.0
"""Seconds after which a run counts as hanging."""


def environment_of(rank: int, processes: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def rank_main(checkout: str, job: dict[str, Any], environment: dict[str, str]) -> None:
    """Run the script as one rank; its output goes to ``output_RANK.txt``."""
    os.chdir(job["folder"])
    file = os.open(f"output_{environment['RANK']}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    script = f"{checkout}/pretrain_hybrid.py"
    if job["fresh"]:
        os.execv(sys.executable, [sys.executable, script, *job["arguments"]])
    import megatron_packed

    assert Path(megatron_packed.__file__).is_relative_to(checkout), megatron_packed.__file__
    sys.argv = [script, *job["arguments"]]
    runpy.run_path(script, run_name="__main__")


def run(checkout: str, job: dict[str, Any]) -> list[int]:
    """Return the exit code of each rank."""
    import torch.distributed as dist

    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = []
    for rank in range(job["processes"]):
        environment = environment_of(rank, job["processes"], store.port)
        process = context.Process(target=rank_main, args=(checkout, job, environment), daemon=True)
        process.start()
        started.append(process)
    for process in started:
        process.join(SECONDS)
        process.kill()
        process.join()
    return [process.exitcode for process in started]


def main() -> None:
    checkout, *preload = sys.argv[1:]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    for line in sys.stdin:
        print(json.dumps(run(checkout, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
