"""Values between measured points, where both axes are read as logarithms: sizes, shapes, rates."""

import math
from bisect import bisect_left
from collections.abc import Mapping


def between(points: Mapping[int, float], at: float) -> float:
    """Return the value at `at` of a curve through points, straight between logarithms.

    Beyond the outermost points it is level: nothing is extrapolated. Raises ValueError without
    points; points and values must be positive.
    """
    known = sorted(points)
    if not known:
        raise ValueError("no points")
    right = bisect_left(known, at)
    if right == 0 or right == len(known):
        return points[known[min(right, len(known) - 1)]]
    low, high = known[right - 1], known[right]
    share = math.log(at / low) / math.log(high / low)
    return math.exp(math.log(points[low]) * (1 - share) + math.log(points[high]) * share)


def surface(points: Mapping[tuple[int, ...], float], at: tuple[float, ...]) -> float:
    """Return `between` over several axes, the last one first. Raises ValueError without points."""
    if not points:
        raise ValueError("no points")
    if len(at) == 1:
        return between({key[0]: value for key, value in points.items()}, at[0])
    heads = sorted({key[0] for key in points})
    curve = {
        head: surface({key[1:]: v for key, v in points.items() if key[0] == head}, at[1:])
        for head in heads
    }
    return between(curve, at[0])
