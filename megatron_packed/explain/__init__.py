"""Description of a run on this machine: its kernels and why they were chosen, and its capabilities.

``report.py`` is ``--explain``, with the rows of ``capabilities.py``. ``run_description.py`` prints
the lines at the start of a run, and ``op_requests.py`` finds what the layers ask of their ops.
"""
