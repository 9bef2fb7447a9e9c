"""Reading and writing of Megatron-LM's indexed data sets, pairs of a ``.bin`` and an ``.idx`` file."""
