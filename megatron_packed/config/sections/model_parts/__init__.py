"""Options of `ModelConfig`, one module for each subject."""
