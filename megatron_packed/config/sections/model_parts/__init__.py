"""Options of `ModelConfig`, one module for each subject; those of kinds of layers are in ``config.kinds``."""
