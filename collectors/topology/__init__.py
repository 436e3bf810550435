"""Reads a machine's topology: what /proc and /sys show, and what NVML tells of GPUs."""
