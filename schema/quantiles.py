"""The one definition of a quantile that Perfledger uses: linear interpolation of raw values."""

from collections.abc import Sequence

import numpy as np


def quantile(values: Sequence[float] | np.ndarray, q: float) -> float:
    """Return the q-quantile, 0 <= q <= 1, by linear interpolation at (n - 1)q.

    Hyndman and Fan (1996) type 7, numpy's default. Raises ValueError on no values: a quantile of
    nothing is undefined, not 0.
    """
    return quantiles(values, (q,))[0]


def quantiles(values: Sequence[float] | np.ndarray, points: Sequence[float]) -> list[float]:
    """Return several quantiles, as `quantile`, in one pass."""
    if len(values) == 0:
        raise ValueError("quantile of no values")
    found: list[float] = np.quantile(np.asarray(values, dtype=np.float64), points).tolist()
    return found
