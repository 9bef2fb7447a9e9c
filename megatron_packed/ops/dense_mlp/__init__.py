"""Dense MLP whose activation and its gradient may be parts of products."""
