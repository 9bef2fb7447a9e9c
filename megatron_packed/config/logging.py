"""What a run tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_packed.config.errors import Problem
from megatron_packed.config.options import Section, Sound, option


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Section, title="logging"):
    """Console, files and reports."""

    log_interval: int = option(
        1, "Print a line every so many iterations.", unit="iterations", minimum=1,
        megatron=("100", "a line costs no wait for the device"),
    )
    log_jsonl: str | None = option(None, "File that receives one JSON object per iteration.", path="output_file")
    tensorboard_dir: str | None = option(None, "Directory for TensorBoard.", path="output_directory")
    report: str | None = option(
        None, "HTML page about the run, made of the numbers of --log-jsonl when it is done.", path="output_file"
    )

    def rules(self, sound: Sound) -> Iterator[Problem]:
        if self.report is None or not sound("report"):
            return
        if not self.report.endswith((".html", ".htm")):
            yield Problem("--report", self.report, "is an HTML page", "give a name that ends in .html")
        if sound("log_jsonl") and self.log_jsonl is None:
            yield Problem("--report", self.report, "is made of the numbers of --log-jsonl", "give --log-jsonl FILE")
