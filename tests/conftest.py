"""Settings of all tests: one thread per process, the order of tests, and skips of GPU tests."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from support import fork_server, kept_kernels, quick_python
from support.shown import Recorder

if TYPE_CHECKING:
    from support.process_pools import WorkerPools

torch.set_num_threads(1)
gc.set_threshold(20_000, 20, 20)  # as in the servers of processes: cycles are few


ROOMS = ("unit/training", "unit/resume", "unit/inputs", "unit/explain", "unit/launch")
FIRST = ("end_to_end", "distributed", "unit/ops", "unit/benchmarks", "unit/tools", *ROOMS)
"""Folders whose tests run first.

A file of these folders may take a minute. If such a file ran last, the other processors would be
idle.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-shown",
        metavar="FILE",
        action="append",
        default=[],
        help="file for the cells of the support matrix that tests fill (shown.py)",
    )
    parser.addoption(
        "--record-commit",
        metavar="COMMIT",
        help="commit of the tested files, if they are a copy without a git repository",
    )
    parser.addoption(
        "--one-gpu-each",
        action="store_true",
        help="workers of -n N see one GPU each, in turns; tests of several GPUs are skipped",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "shows(column, *rows, of): cells of docs/support_matrix.md that a test fills"
    )
    if config.getoption("--one-gpu-each") and worker_input(config):
        see_one_gpu(worker_number(config))
    share_servers(config)
    collect_elsewhere(config)
    for path in config.getoption("--record-shown"):
        config.pluginmanager.register(Recorder(config, Path(path)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers for ``-n auto``: one more than processors, at most eight.

    Tests of several processes often wait, for example for a launcher or a timeout. Then the
    additional worker uses the processor. On a machine with a GPU no workers are started, so that
    the tests share no GPU.
    """
    return 0 if torch.cuda.is_available() else min((os.cpu_count() or 1) + 1, 8)


def see_one_gpu(worker: int) -> None:
    """Hide all GPUs but one from a worker. Without CUDA_VISIBLE_DEVICES all GPUs are used in turns.

    CUDA reads the variable at its first use, so this must come before it.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
    os.environ["CUDA_VISIBLE_DEVICES"] = devices[worker % len(devices)] if devices else ""


SERVERS = pytest.StashKey[tuple[str, str]]()
"""Addresses of the two servers that all workers use."""


def share_servers(config: pytest.Config) -> None:
    """Start the two servers of processes once for all workers.

    A server needs 3 s to start. In a run of some tests a worker starts a server at its first use.
    From Python 3.14 on, a fork server has a key that other processes cannot know.
    """
    if addresses := worker_input(config).get("servers"):
        fork_server.use(addresses[0])
        quick_python.use(Path(addresses[1]))
    elif (
        sys.version_info < (3, 14)
        and config.getoption("dist", "no") != "no"
        and has_all_tests(config)
    ):
        servers = contextlib.ExitStack()
        config.add_cleanup(servers.close)
        folder = servers.enter_context(tempfile.TemporaryDirectory(prefix="servers_"))
        programs = servers.enter_context(quick_python.server(Path(folder)))
        config.stash[SERVERS] = fork_server.address(), str(programs)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send the addresses of the servers to a new worker."""
    node.workerinput["servers"] = node.config.stash.get(SERVERS, ())


def worker_input(config: pytest.Config) -> dict[str, Any]:
    return getattr(config, "workerinput", {})


def worker_number(config: pytest.Config) -> int:
    return int(worker_input(config).get("workerid", "gw0").removeprefix("gw"))


def has_all_tests(config: pytest.Config) -> bool:
    return [Path(x).resolve() for x in config.args] == [Path(__file__).parent]


def collect_elsewhere(config: pytest.Config) -> None:
    """Let the second worker collect all tests in the opposite order, and the third from the middle.

    The first import of a test module compiles it, which is most of the time of a collection. So
    each worker compiles a part of the modules and finds the other parts compiled.
    """
    place = worker_number(config) % 3
    if place and has_all_tests(config):
        root = Path(__file__).parent
        parts = [path for path in root.glob("*/*") if path.is_dir() or path.match("test_*.py")]
        parts = sorted(filter(has_tests, parts), reverse=place == 1)
        middle = len(parts) // 2 if place == 2 else 0
        config.args = [str(path) for path in parts[middle:] + parts[:middle]]


def has_tests(path: Path) -> bool:
    return path.is_file() or any(path.rglob("test_*.py"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    first = [f"{root / name}{os.sep}" for name in FIRST]
    place = {}
    for path in {item.path for item in items}:
        name = str(path)
        folder = next((i for i, part in enumerate(first) if name.startswith(part)), len(first))
        place[path] = folder, name
    items.sort(key=lambda item: place[item.path])  # all workers need the same order
    count = torch.cuda.device_count()
    for item in items:
        needed = max(
            ((marker.args or (2,))[0] for marker in item.iter_markers("multi_gpu")), default=0
        )
        if count < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPUs, found {count}"))
        elif item.get_closest_marker("gpu") and count < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, found none"))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    freeze_living_objects()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Bound the folders of compiled kernels, after all workers have ended."""
    cache = getattr(session.config, "cache", None)  # none with -p no:cacheprovider
    if cache is not None and not worker_input(session.config):
        for name in kept_kernels.FOLDERS:
            kept_kernels.remove_unused(kept_kernels.folder_of(cache, name))


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries report their objects as leaked when the process ends


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        freeze_living_objects()
    return result


def freeze_living_objects() -> None:
    """Exclude all living objects from garbage collection.

    These are the imported modules and the collected tests. Without it a full collection takes
    0.2 s, and each capture of a graph makes one: this was half of the time of the unit tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def pools() -> Iterator[WorkerPools]:
    """Yield pools of processes that the tests of one file share.

    Use: ``pools.run(fn, world_size, *args, layout={"tp_size": 2})``.
    The pools end with the file, because waiting process groups use a processor (`WorkerPools`).
    """
    from support.process_pools import WorkerPools

    fork_server.fork_server()
    with WorkerPools() as made:
        yield made


@pytest.fixture(scope="session")
def quick_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder with `python` and `torchrun` that have already imported the package."""
    folder = tmp_path_factory.mktemp("quick")
    with quick_python.quick_python(folder):
        yield folder
