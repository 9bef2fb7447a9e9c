"""Gated delta rule: the recurrence of gated delta nets, which restarts at each document."""
