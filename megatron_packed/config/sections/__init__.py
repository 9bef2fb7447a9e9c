"""Sections: one frozen dataclass for each subject, with its options, derived values and rules."""
