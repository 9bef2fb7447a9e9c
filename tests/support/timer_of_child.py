"""Child process of a `LimitedProcess` that answers with the CPU time that is left to the request."""

import signal

from megatron_packed.data.tokenizers.limited_process import serve_requests


def serve() -> None:
    """Answer each request with the seconds of the CPU timer."""
    serve_requests(
        lambda setup: (b"", lambda request: b"%f" % signal.getitimer(signal.ITIMER_PROF)[0])
    )
