"""Sends what was taken on to another OTLP endpoint, from a queue of its own."""
