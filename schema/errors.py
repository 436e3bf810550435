"""Every error that Perfledger raises on purpose.

PerfledgerError            1  something failed
├── UsageError             2  the caller asked for something that cannot be
├── PartialInputError      3  part of the input was lost or unreadable
├── NoDataError            4  nothing to answer from
├── NotComparableError     5  two runs differ beyond the declared variable
└── GateError              6  a gate or expectation was not met

The number is the exit code of the command line (see README, "Exit codes"). Errors are handled
at the boundary only: `cli.main`, an HTTP handler, or a process's main loop.
"""


class PerfledgerError(Exception):
    """What happened, where, and what to do about it."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        text = self.what if not self.where else f"{self.what} ({self.where})"
        return text if not self.fix else f"{text}\n  try: {self.fix}"


class UsageError(PerfledgerError):
    """Arguments, a file or a configuration that can never work as given."""

    exit_code = 2


class PartialInputError(PerfledgerError):
    """Some input was lost; the loss is reported and what could be read was used."""

    exit_code = 3


class NoDataError(PerfledgerError):
    """Nothing matches. Never answered with a table of zeros."""

    exit_code = 4


class NotComparableError(PerfledgerError):
    """Two runs differ in more than the declared variable; the message names the fields."""

    exit_code = 5


class GateError(PerfledgerError):
    """A pre-declared expectation was not met."""

    exit_code = 6
