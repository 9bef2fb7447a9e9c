"""MLPs of several experts, computed by grouped matrix products."""
