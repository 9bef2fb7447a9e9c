"""Description of a run on this machine: its kernels and why they were chosen, and its capabilities.

``capability.py`` has the record of a capability and the table of such records, which ``doctor`` prints,
too. ``report.py`` is ``--explain``, with the rows of ``capabilities.py``. ``kernel_reasons.py`` finds the
kernels that ops choose, why, and what would give others. ``run_description.py`` prints the lines at the
start of a run, and ``op_requests.py`` finds what the layers ask of their ops.
"""
