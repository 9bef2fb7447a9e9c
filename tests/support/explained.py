"""Report of ``--explain`` as the process of a run makes it, without the environment of the run."""

from megatron_packed.config.run import RunConfig
from megatron_packed.explain import report
from megatron_packed.inputs.known_data import known_data
from megatron_packed.resume.allowed_changes import refusal_of_stored_model


def explain(config: RunConfig) -> str:
    return report.explanation(config, known_data(config), refusal_of_stored_model(config))
