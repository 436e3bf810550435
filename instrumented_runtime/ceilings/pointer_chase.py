"""Load after load, each depending on the last: compiled, because Python would take longer."""

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(cache=False, nogil=True)
def follow(successors: NDArray[np.int64], start: int, steps: int) -> int:
    """Return where `steps` hops from `start` lead."""
    at = start
    for _ in range(steps):
        at = successors[at]
    return at
