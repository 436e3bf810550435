"""Collectives and copies as telemetry: of our runtime's ranks and of any torch.distributed program."""
