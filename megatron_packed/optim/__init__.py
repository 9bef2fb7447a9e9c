"""Distributed optimizer, gradient clipping, schedules and detection of loss spikes."""
