"""Writers of metrics to Weights & Biases and MLflow, in a background thread.

[Note: trackers never matter]
A service may be slow, unreachable or broken, and this must not affect the run. The training thread
only puts records into a queue. A background thread imports the library, starts the tracked run and
sends the records. An error there prints one warning, and the run continues without the service.
Steps that a resumed run repeats appear twice in the service.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_packed.checkpoint.errors import printable_message
from megatron_packed.config.sections.logging import LoggingConfig
from megatron_packed.reporting.metric_names import answers_text, samples_of, tracked

_Record = Mapping[str, object]

QUEUED_RECORDS = 10_000
"""Largest number of records that wait to be sent; further records are dropped."""
CLOSE_SECONDS, CLOSE_SECONDS_AFTER_FAILURE = 30.0, 3.0
"""Longest time, in seconds, that the end of a run waits for queued records to be sent."""
_MOST_SHOWN = 1000
"""Limit of the characters of a service's answer that are printed."""
_PARAM_LENGTH, _TAG_LENGTH = 500, 5000
"""Most characters of a parameter and of a tag that every version of MLflow accepts."""


class Service(Protocol):
    """Tracking service. One thread makes all calls; a call may take long or raise an error."""

    name: str

    def start(self) -> str:
        """Open the tracked run, or reopen it after a resume, and return its address."""

    def log(self, records: Sequence[_Record]) -> None: ...

    def finish(self, *, failed: bool) -> None: ...


class TrackerWriter:
    """Writer that passes records to a service without waiting for it.

    See [Note: trackers never matter].

    Args:
        service: the service.
        say, warn: print a line of text; another thread calls them, too.
    """

    def __init__(
        self, service: Service, *, say: Callable[[str], None], warn: Callable[[str], None]
    ) -> None:
        self._service = service
        self._say = say
        self._warn = warn
        self._queue: queue.Queue[_Record | None] = queue.Queue(QUEUED_RECORDS)
        self._failed = self._gave_up = False
        self._left_out = 0
        self._thread = threading.Thread(
            # A daemon thread: a service that never answers must not keep the process alive.
            target=self._work,
            name=f"{service.name} tracker",
            daemon=True,
        )
        self._thread.start()

    def write(self, record: _Record) -> None:
        """Queue a record. The method never waits and never raises an error."""
        if self._gave_up:
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._left_out += 1

    def close(self, *, failed: bool = False) -> None:
        """Send the queued records within a time limit, and mark the tracked run finished or failed."""
        if self._gave_up:
            return
        self._failed = failed
        deadline = time.monotonic() + (CLOSE_SECONDS_AFTER_FAILURE if failed else CLOSE_SECONDS)
        try:
            # None ends the thread after the records queued before it. If the queue stays full, the
            # thread is not ended.
            self._queue.put(None, timeout=deadline - time.monotonic())
            self._thread.join(max(deadline - time.monotonic(), 0))
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._gave_up = True
            self._warn(f"{self._service.name} does not answer, so it may lack the last numbers.")
        elif self._left_out:
            self._warn(
                f"{self._service.name} was too slow, so it lacks {self._left_out:,} log lines."
            )

    def _work(self) -> None:
        try:
            self._say(
                f"{self._service.name}: {printable_message(self._service.start(), _MOST_SHOWN)}"
            )
            for records in self._batches():
                self._service.log(records)
            self._service.finish(failed=self._failed)
        except Exception as error:
            if not self._gave_up:
                self._gave_up = True
                # A service may answer with a page of any length.
                what = printable_message(str(error).strip() or type(error).__name__, _MOST_SHOWN)
                self._warn(f"{self._service.name}: {what.rstrip('.')}; the run goes on without it.")

    def _batches(self) -> Iterator[list[_Record]]:
        """Yield the queued records in order until the run ends.

        Each list has all records that are in the queue at that moment.
        """
        while True:
            batch = [self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get())
            records = [record for record in batch if record is not None]
            if records:
                yield records
            if len(records) < len(batch):
                return


@dataclass
class WandbService:
    """Weights & Biases, through the package ``wandb``.

    Args:
        options: options ``--wandb-...``.
        folder: folder of the package's files; None for its default.
        run_id: id of the tracked run; a resumed run keeps the id.
        config: resolved options, shown with the run.
        flags: flags that the user gave, shown with the run.
    """

    options: LoggingConfig
    folder: str | None
    run_id: str
    config: dict[str, Any]
    flags: Sequence[str] = ()
    name: str = "W&B"
    _run: Any = None
    _library: Any = None

    def start(self) -> str:
        # Imported in the background thread: the import may take seconds, and may fail.
        import wandb

        self._library = wandb
        if self.folder is not None:
            os.makedirs(self.folder, exist_ok=True)
        self._run = wandb.init(
            project=self.options.wandb_project,
            entity=self.options.wandb_entity,
            name=self.options.wandb_exp_name,
            dir=self.folder,
            id=self.run_id,
            resume="allow",
            config={**self.config, "flags": "\n".join(self.flags)},
            # silent: do not prompt for a key on the terminal. console: do not capture the output.
            settings=wandb.Settings(silent=True, console="off"),
        )
        # Plot over iterations instead of wandb's count of calls, since a resumed run repeats steps.
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")
        if self._run.offline:
            return f"offline, stored in {self._run.dir}; upload this folder with: wandb sync"
        return str(self._run.url)

    def log(self, records: Sequence[_Record]) -> None:
        for record in records:
            shown: dict[str, Any] = {"iteration": record["iteration"], **_numbers(record)}
            if samples := samples_of(record):
                columns = list(samples[0])
                rows = [[sample.get(name, "") for name in columns] for sample in samples]
                shown["answers"] = self._library.Table(columns=columns, data=rows)
            self._run.log(shown)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


@dataclass
class MlflowService:
    """MLflow, through the package ``mlflow``; arguments are those of `WandbService`."""

    options: LoggingConfig
    run_id: str
    config: dict[str, Any]
    flags: Sequence[str] = ()
    name: str = "MLflow"
    _client: Any = None
    _run: Any = None

    def start(self) -> str:
        import mlflow

        self._client = client = mlflow.MlflowClient(self.options.mlflow_tracking_uri)
        title = self.options.mlflow_experiment
        experiment = client.get_experiment_by_name(title)
        place = client.create_experiment(title) if experiment is None else experiment.experiment_id
        # A resumed run continues the tracked run that has its id as a tag.
        runs = client.search_runs(
            [place], f"tags.megatron_packed_run = '{self.run_id}'", max_results=1
        )
        if runs:
            self._run = runs[0].info.run_id
            client.update_run(self._run, status="RUNNING")
        else:
            flags = " ".join(self.flags)[:_TAG_LENGTH]
            tags = {"megatron_packed_run": self.run_id, **({"flags": flags} if flags else {})}
            self._run = client.create_run(
                place, tags=tags, run_name=self.options.mlflow_run_name
            ).info.run_id
            for name, value in _flat(self.config):
                client.log_param(self._run, name, str(value)[:_PARAM_LENGTH])
        return f"run {self._run} of experiment {title}"

    def log(self, records: Sequence[_Record]) -> None:
        from mlflow.entities import Metric

        milliseconds = int(time.time() * 1000)
        metrics = [
            Metric(name, value, milliseconds, int(str(record["iteration"])))
            for record in records
            for name, value in _numbers(record).items()
        ]
        for first in range(0, len(metrics), 1000):  # most metrics that one call accepts
            self._client.log_batch(self._run, metrics=metrics[first : first + 1000])
        # A tag and no file: a tracking server that takes metrics may lack a store for files.
        for text in [text for record in records if (text := answers_text(record))][-1:]:
            self._client.set_tag(self._run, "answers", text[:_TAG_LENGTH])

    def finish(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run, status="FAILED" if failed else "FINISHED")


def _numbers(record: _Record) -> dict[str, float]:
    """Return the finite numbers of a record, which a service can plot, under their names there."""
    return {name: value for name, value in tracked(record).items() if math.isfinite(value)}


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def services(
    options: LoggingConfig,
    *,
    save: str | None,
    run_id: str,
    config: dict[str, Any],
    flags: Sequence[str] = (),
) -> list[Service]:
    """Return the services that the options request.

    Args:
        options: options of logging.
        save: the run's folder, which W&B uses for its files without ``--wandb-save-dir``.
        run_id: id of the run.
        config: resolved options.
        flags: flags that the user gave.
    """
    requested: list[Service] = []
    if options.wandb_project is not None:
        requested.append(
            WandbService(options, options.wandb_save_dir or save, run_id, config, flags)
        )
    if options.mlflow_experiment is not None:
        requested.append(MlflowService(options, run_id, config, flags))
    return requested
