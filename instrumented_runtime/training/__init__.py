"""The training workload: a few steps of the same model under each parallelism."""
