"""Files of adapters: PEFT's folders, those of servers, and merges with the base."""
