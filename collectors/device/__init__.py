"""Counters of devices: GPUs through NVML, energy of CPU packages, the kernel's software events."""
