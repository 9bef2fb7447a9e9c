"""If one of two ranks fails, both end soon with the same exit code and one reason.

Only one rank prints the reason, and STATUS.json contains it.
"""

import json
import re
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_packed.data.loader import Loader
from megatron_packed.distributed.failure_watch import PATIENCE_SECONDS
from megatron_packed.training.train_step import TrainStep
from support.faults import (
    LOG_SITE,
    all_out_of_memory,
    damaged_block,
    defect,
    fail_at_the_end,
    kill_at,
    leaking_attention,
    one_pack_fewer,
    out_of_memory,
    sleep_at,
    stop_at,
    stop_beside_gpus,
    watched,
    while_waiting,
    without_agent,
)
from support.runs import Data, Finished, in_folder, run, start, steps, tiny_options, torchrun

UNFORESEEN, DATA, LEAK, OUT_OF_MEMORY = 1, 3, 21, 22
SOON = 30.0
"""Seconds that a run of a few steps and its end may take.

A rank that waits for another rank would wait for minutes.
"""
LAST = 8
UPDATE = "between all-reduce and update"
EXPERTS: dict[str, Any] = {"expert_model_parallel_size": 2}
TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
OVERLAP: dict[str, Any] = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "ddp_bucket_size": 2000,
}
SILENT = "Rank 1 does not answer: it was killed or is stopped"
HANGS_FOR = 4.0
"""Seconds that collectives wait in these tests. The default is minutes."""


@pytest.fixture
def options(data: Data, tmp_path: Path) -> dict[str, Any]:
    """Return the options of a run with two micro-batches per step and rank."""
    return tiny_options(data, train_iters=LAST, lr_warmup_iters=0, **in_folder(tmp_path))


def status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "checkpoints" / "STATUS.json").read_text())


def assert_says(
    finished: Finished, folder: Path, code: int, rank: int | None, step: int | None, reason: str
) -> None:
    """Check that the failed rank prints the reason once and the other rank prints no error.

    A traceback is expected only for an unforeseen error.
    """
    assert finished.exit_code == code, finished.console
    written = status(folder)
    assert reason in written.pop("reason")
    assert written == {"exit_code": code, "rank": rank, "step": step}
    voices = [(folder / f"output_{number}.txt").read_text() for number in range(2)]
    assert sum(voice.count(reason) for voice in voices) == 1, finished.console
    speaker = 0 if reason in voices[0] else 1
    assert rank in (speaker, None)
    assert not re.search(r"(?i)error|process was lost|c10d|trace", voices[1 - speaker]), (
        finished.console
    )


@pytest.mark.parametrize(
    ("fault", "code", "rank", "step", "reason"),
    [
        pytest.param(
            partial(out_of_memory, 9, 1),
            OUT_OF_MEMORY,
            1,
            5,
            "out of memory on rank 1 in step 5: Tried to allocate 2.00 GiB; lower --seq-length or --micro-batch-size",
            id="out-of-memory",
        ),
        pytest.param(
            partial(damaged_block, 9, 1),
            DATA,
            1,
            5,
            "data error on rank 1 in step 5: ",
            id="damaged-block",
        ),
        pytest.param(
            partial(defect, UPDATE, 5, 0),
            UNFORESEEN,
            0,
            5,
            "unexpected AssertionError on rank 0 in step 5: the sum is 3.",
            id="defect",
        ),
        pytest.param(
            partial(defect, LOG_SITE, 4, 0),
            UNFORESEEN,
            0,
            5,
            "AssertionError on rank 0 in step 5: ",
            id="on-rank-0-alone",
        ),
        pytest.param(
            fail_at_the_end,
            UNFORESEEN,
            0,
            LAST,
            f"RuntimeError on rank 0 in step {LAST}: no curves today.",
            id="when-the-other-is-done",
        ),
        pytest.param(
            partial(while_waiting, partial(defect, UPDATE, 4, 1), 0),
            UNFORESEEN,
            1,
            4,
            "unexpected AssertionError on rank 1 in step 4: ",
            id="other-waits-without-end",
        ),
    ],
)
def test_the_rank_that_fails_speaks_for_all(
    fault: Callable[[], None],
    code: int,
    rank: int,
    step: int,
    reason: str,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    begun = time.monotonic()
    finished = run({**options, "report": tmp_path / "report.html"}, tmp_path, 2, fault)
    assert time.monotonic() - begun < SOON
    assert_says(finished, tmp_path, code, rank, step, reason)
    assert finished.console.count("Traceback (most recent call last)") == (code == UNFORESEEN)
    trained = [line["iteration"] for line in steps(tmp_path / "log.jsonl")]
    assert trained in (list(range(1, step - 1)), list(range(1, step)), list(range(1, step + 1)))


@pytest.mark.parametrize("rank", [0, 1])
def test_without_torchrun(rank: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Without torchrun every rank reports the reason, also if rank 0, which hosts the store, fails.

    The test also covers a rank that is killed, and a run that ends normally.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fault = partial(without_agent, partial(out_of_memory, 5, rank), port)
    finished = run(options, tmp_path, 2, fault)
    assert_says(
        finished, tmp_path, OUT_OF_MEMORY, rank, 3, f"out of memory on rank {rank} in step 3"
    )
    killed = partial(
        without_agent, partial(kill_at, "between backward and all-reduce", 3, rank), port
    )
    finished = run({**options, **in_folder(tmp_path / "killed")}, tmp_path / "killed", 2, killed)
    assert finished.exit_codes[1 - rank] == UNFORESEEN, finished.console
    written = status(tmp_path / "killed")
    assert (written["exit_code"], written["rank"], written["step"]) == (UNFORESEEN, rank, 3)
    assert (
        f"Rank {rank} does not answer: it was killed or is stopped; rank {1 - rank} was in "
        in written["reason"]
    )
    begun = time.monotonic()
    good = run(
        {**options, "train_iters": 2}, tmp_path / "good", 2, partial(without_agent, int, port)
    )
    assert good.exit_code == 0 and "c10d" not in good.console, good.console
    assert time.monotonic() - begun < PATIENCE_SECONDS


def test_what_both_find_is_said_once(options: dict[str, Any], tmp_path: Path) -> None:
    finished = run(options, tmp_path, 2, partial(all_out_of_memory, 5))
    speaker = status(tmp_path)["rank"]
    assert_says(finished, tmp_path, OUT_OF_MEMORY, speaker, 3, "out of memory on rank")


ON_GPU: dict[str, Any] = {
    "hybrid_layer_pattern": "*-",
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_attention_heads": 4,
    "num_experts": None,
    "moe_ffn_hidden_size": None,
    "moe_router_score_function": None,
    "moe_router_enable_expert_bias": None,
    "moe_aux_loss_coeff": None,
    "bf16": True,
    "device": "cuda",
}


@pytest.mark.multi_gpu
def test_while_the_other_waits_for_its_gpu(options: dict[str, Any], tmp_path: Path) -> None:
    """A failure ends a run whose other rank waits for its GPU.

    The GPU of that rank is in an all-reduce that never ends, and the host polls for the metrics.
    """
    finished = run({**options, **ON_GPU}, tmp_path, 2, partial(out_of_memory, 9, 1))
    assert_says(finished, tmp_path, OUT_OF_MEMORY, 1, 5, "out of memory on rank 1 in step 5")


@pytest.mark.multi_gpu
@pytest.mark.parametrize("impl", [None, "local", "full_iteration", "transformer_engine"])
def test_a_gpu_that_waits_for_a_stopped_process(
    impl: str | None, options: dict[str, Any], tmp_path: Path
) -> None:
    """A GPU that waits for a stopped process ends the run. The error names the rank and the step.

    NCCL's watchdog would kill the process without naming a step, and does not see replays. The
    failure watch of megatron_packed acts earlier.
    """
    fault = partial(stop_beside_gpus, "before a micro-batch", 10, 1, 20.0)
    started = start({**options, **ON_GPU, **TENSOR, "cuda_graph_impl": impl}, tmp_path, 2, fault)
    started.processes[0].join(90)
    started.kill(1)
    finished = started.wait()
    assert finished.exit_codes[0] == UNFORESEEN, finished.console
    assert ("CUDA graphs: capturing" in finished.console) == (impl is not None), finished.console
    written = status(tmp_path)
    assert written["rank"] == 1 and written["step"] in (3, 4), written
    # The host can query the GPU in the loop that waits for a step, but not while it is in the
    # driver.
    where = r"training/late_metrics.*, while its GPU was in nccl:\w+ over \w+|\w+/.*: \w+, in step"
    assert re.search(rf"{SILENT}; rank 0 was in ({where})", written["reason"]), written


@pytest.mark.parametrize(
    ("site", "code"),
    [((Loader, "micro_batches"), 0), ((TrainStep, "forward_backward"), UNFORESEEN)],
    ids=["loads data", "is in a step"],
)
def test_a_run_that_stands_still_where_a_gpu_would(
    site: tuple[Any, str], code: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Only a stall inside a step ends a run. Loading data may take any time."""
    fault = partial(watched, 1.0, site, 1, 2.0)
    finished = run({**options, "train_iters": 2}, tmp_path, 1, fault)
    assert finished.exit_code == code, finished.console
    assert (
        "another process was lost in step 1: the GPU has made no progress" in finished.console
    ) == (code != 0)


def test_alone(options: dict[str, Any], tmp_path: Path) -> None:
    finished = run(options, tmp_path, 1, partial(out_of_memory, 9, 0))
    assert finished.exit_code == OUT_OF_MEMORY
    assert "\nout of memory in step 3: Tried to allocate 2.00 GiB; lower " in finished.console
    assert status(tmp_path).items() >= {"exit_code": OUT_OF_MEMORY, "rank": None, "step": 3}.items()


@pytest.mark.parametrize(
    "layout",
    [{}, {"tensor_model_parallel_size": 2}, {"expert_model_parallel_size": 2}],
    ids=["data-parallel", "tensor-parallel", "expert-parallel"],
)
def test_a_rank_that_is_killed(
    layout: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """If a rank is killed, the other rank reports what it observed.

    STATUS.json of the previous run is removed.
    """
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "STATUS.json").write_text('{"exit_code": 0}')
    finished = run(
        {**options, **layout},
        tmp_path,
        2,
        partial(kill_at, "between backward and all-reduce", 3, 1),
    )
    assert finished.exit_codes == (UNFORESEEN, -9), finished.console
    written = status(tmp_path)
    assert (written["exit_code"], written["rank"], written["step"]) == (UNFORESEEN, 1, 3)
    assert f"{SILENT}; rank 0 was in " in written["reason"]
    assert finished.console.count("another process was lost on rank 0 in step 3: ") == 1
    assert "Traceback" not in finished.console


@pytest.mark.parametrize(
    ("layout", "fault", "step", "where"),
    [
        pytest.param(
            TENSOR,
            partial(stop_at, "before a forward pass", 10, 1, HANGS_FOR),
            3,
            SILENT + r"; rank 0 was in \w+ over tp \(ranks 0, 1\), called by "
            r"layers/\w+\.py: \w+, in step 3\.",
            id="stopped-tensor-parallel",
        ),
        pytest.param(
            OVERLAP,
            partial(stop_at, "before a forward pass", 5, 1, HANGS_FOR),
            3,
            SILENT
            + r"; rank 0 was in (all_gather|reduce_scatter) over all ranks \(ranks 0, 1\), called by "
            r"(models/hybrid_model|layers/hybrid_layer|training/train_step)\.py: \w+, in step 3\.",
            id="stopped-overlap",
        ),
        pytest.param(
            EXPERTS,
            partial(stop_at, "between backward and all-reduce", 3, 1, HANGS_FOR),
            3,
            SILENT + r"; rank 0 was in \w+ over all ranks \(ranks 0, 1\), called by "
            r"training/train_step\.py: \w+, in step 3\.",
            id="stopped-expert-parallel",
        ),
        pytest.param(
            EXPERTS,
            partial(sleep_at, "before a forward pass", 5, 1, HANGS_FOR),
            3,
            r"Rank 0 was in \w+ over ep \(ranks 0, 1\), called by layers/[\w/]+\.py: \w+, in step 3; "
            r"rank 1 was in models/hybrid_model\.py: forward_backward, in step 3\.",
            id="asleep-expert-parallel",
        ),
    ],
)
def test_a_rank_that_hangs(
    layout: dict[str, Any],
    fault: Callable[[], None],
    step: int,
    where: str,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    """If a rank hangs, the others wait for the configured time, then one rank reports.

    The report names the rank, the step and the collective.
    """
    begun = time.monotonic()
    started = start({**options, **layout}, tmp_path, 2, fault)
    started.processes[0].join(2 * SOON)
    started.kill(1)  # the launcher does the same, because a stopped process cannot end by itself
    finished = started.wait()
    assert HANGS_FOR < time.monotonic() - begun < 2 * SOON
    assert finished.exit_codes[0] == UNFORESEEN, finished.console
    written = status(tmp_path)
    rank = (
        1 if "does not answer" in where else None
    )  # If both ranks answer, the report cannot name the faulty rank.
    assert (written["exit_code"], written["rank"], written["step"]) == (UNFORESEEN, rank, step), (
        written
    )
    assert f"another process was lost on rank 0 in step {step}: " in written["reason"]
    assert re.search(where, written["reason"]), written["reason"]
    assert finished.console.count(written["reason"]) == 1 and "Traceback" not in finished.console


@pytest.mark.parametrize("layout", [TENSOR, EXPERTS], ids=["tensor-parallel", "expert-parallel"])
def test_a_rank_with_one_pack_fewer(
    layout: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """A rank with too few packs is reported before its first collective.

    Otherwise its next collective would pair with a different collective of the other rank.
    """
    finished = run({**options, **layout}, tmp_path, 2, partial(one_pack_fewer, 3, 1))
    packs = 4 if layout is TENSOR else 2
    reason = (
        f"data error on rank 1 in step 3: the data loader returned {packs - 1} packs, but every "
        f"rank needs {packs} per step."
    )
    assert_says(finished, tmp_path, DATA, 1, 3, reason)
    assert "Traceback" not in finished.console


def test_a_run_that_is_killed_leaves_no_status(options: dict[str, Any], tmp_path: Path) -> None:
    assert run({**options, "train_iters": 1}, tmp_path).exit_code == 0
    assert status(tmp_path) == {"exit_code": 0}
    assert run(options, tmp_path, 1, partial(kill_at, UPDATE, 1, 0)).exit_code == -9
    assert not (tmp_path / "checkpoints" / "STATUS.json").exists()


def test_under_torchrun(options: dict[str, Any], tmp_path: Path, quick_programs: Path) -> None:
    """torchrun shows the failed rank and the exit code, although it kills the other ranks.

    The tokens on disk are changed after the first run, so that both ranks find the damage in their
    first packs.
    """
    options |= {"data_cache_path": tmp_path / "cache"}
    assert run({**options, "train_iters": 1, "save": None, "load": None}, tmp_path).exit_code == 0
    [tokens] = (tmp_path / "cache").glob("*/tokens.bin")
    content = bytearray(tokens.read_bytes())
    content[100] ^= 1
    tokens.write_bytes(content)
    console = torchrun(options, tmp_path, 2, quick_programs)
    written = status(tmp_path)
    assert written["exit_code"] == DATA and written["step"] == 1 and written["rank"] in (0, 1), (
        console
    )
    assert console.count("data error on rank") == 1 and written["reason"] in console
    root_cause = console.partition("Root Cause")[2]
    assert re.search(rf"rank +: {written['rank']} ", root_cause) and re.search(
        r"exitcode +: 3 ", root_cause
    ), console


@pytest.mark.parametrize("rank", [0, 1])
def test_a_leak_is_refused_before_training(
    rank: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """The self-test reports a leak between documents before training, also if only one rank leaks.

    The report contains the measured difference and no traceback.
    """
    tested = {**options, "no_isolation_self_test": None}
    finished = run(tested, tmp_path, 2, partial(leaking_attention, rank))
    reason = f"isolation error on rank {rank}: the isolation self-test failed, because documents of a pack influence"
    assert_says(finished, tmp_path, LEAK, rank, None, reason)
    assert "Traceback" not in finished.console
    assert re.search(
        r"layers \(\*\), outputs: changing one document changed other documents by \d\.\de[-+]\d\d \(allowed 0",
        finished.console,
    ), finished.console
    assert "layers (M)" not in finished.console and "--no-isolation-self-test" in finished.console
    assert not (tmp_path / "log.jsonl").exists() or (tmp_path / "log.jsonl").read_bytes() == b""
    if rank == 0:
        trained = run({**options, "train_iters": 1}, tmp_path, 2, partial(leaking_attention, rank))
        assert trained.exit_code == 0, trained.console
