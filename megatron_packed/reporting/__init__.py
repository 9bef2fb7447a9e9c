"""Report pages, curves and plots from the logs of runs."""
