"""Things that run: the reference runtime, the load client, and servers under test."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfledger.instrumented_runtime.collectives.user_programs import (
        observe_collectives as observe_collectives,
    )

__all__ = ["observe_collectives"]


def __getattr__(name: str) -> Any:
    """Import what is exported when it is first asked for: torch takes seconds."""
    if name == "observe_collectives":
        from perfledger.instrumented_runtime.collectives.user_programs import observe_collectives

        return observe_collectives
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
