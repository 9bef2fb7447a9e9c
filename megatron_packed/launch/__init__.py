"""Launcher of a run: its processes on one or several machines, one exit code, and restarts."""
