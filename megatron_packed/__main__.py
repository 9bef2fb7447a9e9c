"""``python -m megatron_packed COMMAND``: the same as the console command ``megatron-packed``."""

import sys

from megatron_packed.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
