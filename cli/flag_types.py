"""What a flag's text may be, for the commands that take numbers."""

import argparse
from collections.abc import Callable


def integer(low: int, high: int) -> Callable[[str], int]:
    """Return an argparse type: an integer in a range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
        return value

    return parse
