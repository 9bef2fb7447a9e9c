"""Process of a chat template without jinja2's sandbox, to test the system-call filter alone."""

from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_packed.data.tokenizers import template_process


def serve() -> None:
    """Permit every attribute and call, then serve as usual."""
    for name in ("is_safe_attribute", "is_safe_callable"):
        setattr(ImmutableSandboxedEnvironment, name, lambda *_: True)
    template_process.serve()
