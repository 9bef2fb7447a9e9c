"""Options of logging: console, log files, reports and tracking services."""

from __future__ import annotations

from megatron_packed.config.conditions import TRAINS, Condition, option_given
from megatron_packed.config.errors import Problem, Problems
from megatron_packed.config.options import Related, option
from megatron_packed.config.section import Section, Sound

ANSWERED_PROMPTS = Condition(
    "neither --sample-prompts nor --valid-metric is given",
    lambda run, _: (run.training.valid_metric or run.logging.sample_prompts) is not None,
)
WANDB = option_given("logging.wandb_project")
MLFLOW = option_given("logging.mlflow_experiment")


class LogOptions(Section):
    """Options of the console, log files and reports."""

    log_interval: int = option(
        1,
        "Interval between console lines, in iterations.",
        unit="iterations",
        minimum=1,
        megatron=("100", "printing a line does not wait for the device"),
        only_if=TRAINS,
    )
    brief_start: bool = option(
        False,
        "Print only the data, the model and warnings before the first step. Details of packs, "
        "processes, kernels and checks stay in the report and in the log. If tokens are cut or "
        "dropped, their counts are printed.",
    )
    log_params_norm: bool = option(
        False,
        "Log the L2 norm of all parameters after each step. With --bf16 it is the norm of the "
        "fp32 masters.",
        only_if=TRAINS,
    )
    log_num_zeros_in_grad: bool = option(
        False,
        "Log the number of gradient elements that are exactly zero after the reduction "
        "over all ranks.",
        only_if=TRAINS,
    )
    log_progress: bool = option(
        False,
        "Write progress.txt in the --save directory. It lists the start of each job and, for "
        "each checkpoint, the iteration, throughput, operations and tokens.",
    )
    log_jsonl: str | None = option(None, "File for one JSON object per iteration.", path="log_file")
    tensorboard_dir: str | None = option(
        None, "Directory for TensorBoard event files.", path="output_directory"
    )
    report: str | None = option(
        None,
        "HTML report of the run, written at its end from the numbers of --log-jsonl, which is "
        "required.",
        path="output_file",
        needs=Related("log_jsonl", "the report is made from its numbers"),
    )

    sample_prompts: str | None = option(
        None,
        "File of prompts that the model answers at each validation and at the end: one text per "
        "line, or JSONL with prompt or messages.",
        group="answers during training",
        path="input_file",
    )
    sample_max_new_tokens: int = option(
        64,
        "Maximum number of tokens of an answer to --sample-prompts and of --valid-metric.",
        unit="tokens",
        group="answers during training",
        minimum=1,
        only_if=ANSWERED_PROMPTS,
    )


class LoggingConfig(LogOptions, title="logging", group="tracking services"):
    """Options of the console, log files, reports and tracking services."""

    wandb_project: str | None = option(None, "Weights & Biases (W&B) project; rank 0 logs to it.")
    wandb_exp_name: str | None = option(
        None,
        "Name of the run in W&B; W&B chooses a name when not given.",
        only_if=WANDB,
    )
    wandb_save_dir: str | None = option(
        None,
        "Directory for the local files of W&B; the --save directory when not given.",
        path="output_directory",
        only_if=WANDB,
    )
    wandb_entity: str | None = option(
        None, "W&B user or team that owns the project.", only_if=WANDB
    )
    mlflow_experiment: str | None = option(None, "MLflow experiment; rank 0 logs to it.")
    mlflow_run_name: str | None = option(
        None,
        "Name of the run in MLflow; MLflow chooses a name when not given.",
        only_if=MLFLOW,
    )
    mlflow_tracking_uri: str | None = option(
        None,
        "Tracking server or store of MLflow; the environment variable MLFLOW_TRACKING_URI "
        "when not given.",
        only_if=MLFLOW,
    )

    def rules(self, sound: Sound) -> Problems:
        yield from super().rules(sound)
        uri = self.mlflow_tracking_uri if sound("mlflow_tracking_uri") else None
        if uri is not None and "@" in uri.partition("://")[2].partition("/")[0]:
            yield Problem(
                "--mlflow-tracking-uri",
                "",
                "contains a user name or a password, and options are printed and saved in files",
                "set the environment variables MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD",
            )
        if (
            self.report is not None
            and sound("report")
            and not self.report.endswith((".html", ".htm"))
        ):
            yield self.problem("report", "must name an HTML page", "give a name that ends in .html")
