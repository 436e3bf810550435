"""How a defect of ours is told: by where it was met, never by what the error said."""

import logging
import traceback

log = logging.getLogger("perfledger.collect")


def tell_defect(what: str, error: BaseException) -> None:
    """Log that `what` failed, and where; the message of an error may quote a sender's value."""
    lines = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s failed: %s\n%s", what, type(error).__name__, lines)
