"""Options of `DataConfig`, one module for each subject."""
