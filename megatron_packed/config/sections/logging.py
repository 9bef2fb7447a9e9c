"""What a run tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_packed.config.errors import Problem
from megatron_packed.config.options import option
from megatron_packed.config.section import Section, Sound

TRACKING = "tracking services"


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Section, title="logging"):
    """Console, files and reports."""

    log_interval: int = option(
        1,
        "Print a line every so many iterations.",
        unit="iterations",
        minimum=1,
        megatron=("100", "a line costs no wait for the device"),
    )
    log_params_norm: bool = option(
        False,
        "Tell the L2 norm of all parameters after each step: of the fp32 masters where weights are bf16.",
    )
    log_num_zeros_in_grad: bool = option(
        False, "Tell how many elements of the gradients, summed over all ranks, are exactly zero."
    )
    log_progress: bool = option(
        False,
        "Write to progress.txt in the directory of --save when jobs began, and what each checkpoint had "
        "reached: iteration, throughput, operations, tokens.",
    )
    log_jsonl: str | None = option(
        None, "File that receives one JSON object per iteration.", path="log_file"
    )
    tensorboard_dir: str | None = option(
        None, "Directory for TensorBoard.", path="output_directory"
    )
    report: str | None = option(
        None,
        "HTML page about the run, made of the numbers of --log-jsonl when it is done.",
        path="output_file",
    )

    wandb_project: str | None = option(
        None, "Project of Weights & Biases; rank 0 sends to it.", group=TRACKING
    )
    wandb_exp_name: str | None = option(
        None, "Name of the run there; by default W&B finds one.", group=TRACKING
    )
    wandb_save_dir: str | None = option(
        None,
        "Directory for W&B's own files; by default that of --save.",
        group=TRACKING,
        path="output_directory",
    )
    wandb_entity: str | None = option(None, "User or team whose project it is.", group=TRACKING)
    mlflow_experiment: str | None = option(
        None, "Experiment of MLflow; rank 0 sends to it.", group=TRACKING
    )
    mlflow_run_name: str | None = option(
        None, "Name of the run there; by default MLflow finds one.", group=TRACKING
    )
    mlflow_tracking_uri: str | None = option(
        None, "MLflow's server or store; by default what MLFLOW_TRACKING_URI says.", group=TRACKING
    )

    def rules(self, sound: Sound) -> Iterator[Problem]:
        uri = self.mlflow_tracking_uri if sound("mlflow_tracking_uri") else None
        if uri is not None and "@" in uri.partition("://")[2].partition("/")[0]:
            yield Problem(
                "--mlflow-tracking-uri",
                "",
                "holds a name or a password, and options are shown and saved",
                "give them as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment",
            )
        if self.report is None or not sound("report"):
            return
        if not self.report.endswith((".html", ".htm")):
            yield Problem(
                "--report", self.report, "is an HTML page", "give a name that ends in .html"
            )
        if sound("log_jsonl") and self.log_jsonl is None:
            yield Problem(
                "--report",
                self.report,
                "is made of the numbers of --log-jsonl",
                "give --log-jsonl FILE",
            )
