"""Prometheus and OpenMetrics endpoints, scraped into the same log as what is sent to us.

`config` reads the [[scrape]] tables, `discovery` and `kubernetes` find `targets`, `fetching` asks
one, `exposition` parses the answer, `conversion` makes OTLP of it with the help of `series_memory`,
and `scraper` runs all of it.
"""
