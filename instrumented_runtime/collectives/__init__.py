"""Collectives and copies as telemetry: of our ranks and of any torch.distributed program."""
