"""Launcher of a run: its processes on one or several machines, one exit code, and restarts."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.launch.launcher import LaunchOptions as LaunchOptions
    from megatron_packed.launch.launcher import launch as launch
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "launcher": ["LaunchOptions", "launch"],
        },
    )
