"""Perfledger: where the time of every LLM request went, and why.

Two calls for people's own code: `record` opens a run, `measure` times a generation in it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfledger.measuring import Measurement as Measurement
    from perfledger.measuring import Recording as Recording
    from perfledger.measuring import measure as measure
    from perfledger.measuring import record as record

__version__ = "0.1.0"
__all__ = ["Measurement", "Recording", "measure", "record"]


def __getattr__(name: str) -> object:
    """Load the two calls when first asked for: `perfledger --help` needs none of it."""
    if name in __all__:
        from perfledger import measuring

        return getattr(measuring, name)
    raise AttributeError(f"module 'perfledger' has no attribute {name!r}")
