"""Report of ``--explain``: the verdict, facts about the run, and its capabilities on this machine.

The ops themselves choose their kernels (``Op.explain`` with the sizes of the run), so the report
shows the choices that training would make. No data is tokenised and no weights are allocated.
"""

from __future__ import annotations

import os
import sys

from megatron_packed.config.errors import escaped
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.launch_checks import environment_number
from megatron_packed.config.run import RunConfig
from megatron_packed.data.known_files import KnownData
from megatron_packed.explain.capabilities import capabilities
from megatron_packed.explain.capability import beside
from megatron_packed.explain.planned_run import PlannedRun
from megatron_packed.models.run_model import device_of


def explanation(config: RunConfig, data_facts: KnownData, other_model: str = "") -> str:
    """Return the verdict, facts about the run, and all capabilities as a table, for a terminal.

    Args:
        config: configuration of the run.
        data_facts: facts about its training data.
        other_model: reason why the model of the checkpoint is not this model; empty if it is.
    Raises:
        SystemExit: the machine lacks the configured device; the reason is printed first.
    """
    try:
        device = device_of(config)
    except ValueError as error:
        print(escaped(f"This run would be refused: {error}"), file=sys.stderr)
        raise SystemExit(ExitCode.USAGE) from None
    world_size = environment_number(os.environ, "WORLD_SIZE", 1, [])
    run = PlannedRun.from_config(config, device, world_size, data_facts, other_model)
    (_, verdict), *facts = run.lines()
    lines = [*beside("", verdict), ""]
    for title, text in facts:
        lines += beside(title.ljust(8), text)
    lines.append("")
    rows = list(capabilities(config, device, world_size))
    width = max(len(row.name) for row in rows)
    for row in rows:
        text = row.reason + (f" -> {row.advice}" if row.advice else "")
        lines += beside(f"{row.name.ljust(width)}  {row.state.ljust(7)}  ", text)
    return "\n".join(lines) + "\n"
