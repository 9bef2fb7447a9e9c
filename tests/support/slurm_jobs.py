"""Job numbers for stand-ins of SLURM."""

import random
import socket


def job_number() -> int:
    """Return a job number for which port 20000 + number is free."""
    while True:
        number = random.randrange(20000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", 20000 + number))
            except OSError:
                continue
            return number
