"""What a run tells."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_packed.config.options import Section, option


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Section, title="logging"):
    """Console, files and reports."""

    log_interval: int = option(
        1, "Print a line every so many iterations.", unit="iterations", minimum=1,
        megatron=("100", "a line costs no wait for the device"),
    )
    log_jsonl: str | None = option(None, "File that receives one JSON object per iteration.", path="output_file")
    tensorboard_dir: str | None = option(None, "Directory for TensorBoard.", path="output_directory")
    report: str | None = option(None, "File for the report of the run, .html or .png.", path="output_file")
