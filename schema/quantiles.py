"""The one definition of a quantile that Perfledger uses: linear interpolation of raw values."""

from collections.abc import Sequence

import numpy as np


def quantile(values: Sequence[float] | np.ndarray, q: float) -> float:
    """Return the q-quantile, 0 <= q <= 1, by linear interpolation at (n - 1)q.

    Hyndman and Fan (1996) type 7, numpy's default. Raises ValueError on no values: a quantile of
    nothing is undefined, not 0.
    """
    if len(values) == 0:
        raise ValueError("quantile of no values")
    return float(np.quantile(np.asarray(values, dtype=np.float64), q))
