"""Rows become findings: `open` a store, select, and call an analyzer; none prints or draws."""

from perfledger.analyzers.ledger import Selection, open

__all__ = ["Selection", "open"]
