"""Samplers of the host and of chosen processes; they hand OTLP metrics to the collector's sink."""
