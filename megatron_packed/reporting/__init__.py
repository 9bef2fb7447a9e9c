"""Report pages, curves and plots from the logs of runs."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.reporting.curves import read_jsonl as read_jsonl
    from megatron_packed.reporting.curves import read_run as read_run
    from megatron_packed.reporting.run_charts import write_runs_png as write_runs_png
    from megatron_packed.reporting.run_report import write_report as write_report
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "curves": ["read_jsonl", "read_run"],
            "run_charts": ["write_runs_png"],
            "run_report": ["write_report"],
        },
    )
