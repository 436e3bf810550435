"""Faults brought about by natural means, declared in one file, for drills and for scoring."""
