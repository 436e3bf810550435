"""Tail sampling: which traces are kept, once the rest of them has been seen."""
