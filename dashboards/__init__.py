"""Findings as things to look at: a report page, a Perfetto trace."""
