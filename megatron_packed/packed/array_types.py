"""Types of NumPy arrays in annotations."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]
UInt8Array = NDArray[np.uint8]
IntegerArray = NDArray[np.integer]
"""Array of integers of any size."""
Float64Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
AnyArray = NDArray[Any]
