"""OTLP spans from protobuf's wire format into columns, by kernels compiled at first use."""
