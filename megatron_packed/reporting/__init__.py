"""Reports of a run: console, logs, writers of metrics, and report pages with curves and plots.

``run_writers.py`` opens what the options request. ``step_record.py`` is one line of the log.
"""
