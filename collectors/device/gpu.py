"""One GPU as its sources see it: what is asked, how numbers become readings, what is not there."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from perfledger.collectors.device.nvml_calls import NOT_FOUND, NOT_SUPPORTED, Calls, NvmlFailure
from perfledger.collectors.device.rising_counter import RisingCounter
from perfledger.collectors.host.readings import Attributes, Reading
from perfledger.schema.metrics import Metric


class Field(NamedTuple):
    """A field value of NVML: NVML_FI_DEV_*, and the link that it is of."""

    number: int
    scope: int = 0


class Wrap(NamedTuple):
    """A counter's width, and what it gains in a second at most (see RisingCounter)."""

    modulus: int
    most_per_s: float


class Gpu:
    """A GPU, known by its UUID. `absent` says of each source that cannot be read why not.

    `lost` is why nothing of it can be read any more, or "".
    """

    def __init__(self, calls: Calls, index: int, uuid: str, name: str) -> None:
        self.uuid, self.name = uuid, name
        self.lost = ""
        self.absent: dict[str, str] = {}
        self.present: set[str] = set()
        self.at_ns = 0
        self.retry_ns = 0  # when what is absent is tried again
        self.misunderstood = 0
        # What sources keep from one sample to the next, by a name of theirs.
        self.kept: dict[str, float] = {}
        self._calls, self._index = calls, index
        self._fields: dict[Field, list[Any]] = {}
        self._asked: dict[str, Any] = {}
        self._counters: dict[tuple[str, Attributes], RisingCounter] = {}
        self._series: dict[Attributes, Attributes] = {}

    @property
    def restarts(self) -> int:
        """Return how often a counter fell, or was not seen for too long."""
        return sum(counter.restarts for counter in self._counters.values())

    def found_again(self, index: int) -> None:
        """Note that the device is there, at an index that may be another one."""
        self._index, self.lost = index, ""

    def start_sample(self, at_ns: int) -> None:
        """Forget what was asked in the sample before."""
        self.at_ns = at_ns
        self._fields, self._asked = {}, {}

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return the answer of a function about this device. Raises NvmlFailure."""
        return self._calls.call(function, self._index, *arguments)

    def ask_number(self, function: str, *arguments: Any) -> int:
        """Return an answer that must be a count. Raises NvmlFailure, ValueError."""
        value = self.ask(function, *arguments)
        if type(value) is not int or value < 0:
            raise ValueError(f"{function} is {value!r}")
        return value

    def ask_once(self, function: str, *arguments: Any) -> Any:
        """Return the answer that the function gave first in this sample. Raises NvmlFailure."""
        if function not in self._asked:
            self._asked[function] = self.ask(function, *arguments)
        return self._asked[function]

    def fetch(self, fields: Sequence[Field]) -> None:
        """Read those fields that are not read yet, in one call. Raises NvmlFailure."""
        missing = [field for field in fields if field not in self._fields]
        if missing:
            found = self.ask("nvmlDeviceGetFieldValues", [list(field) for field in missing])
            self._fields |= zip(missing, found, strict=True)

    def fetch_all(self, fields: Sequence[Field]) -> bool:
        """Return whether fields could be read in one call. Raises NvmlFailure of a lost device."""
        try:
            self.fetch(fields)
        except NvmlFailure as failure:
            if failure.means_lost:
                raise
            return False
        return True

    def field(self, field: Field) -> tuple[int, int]:
        """Return the type and value of a field that was fetched. Raises NvmlFailure."""
        error, kind, value = self._fields.get(field, (NOT_FOUND, 0, None))
        if error:
            raise NvmlFailure(error)
        if type(value) is not int:
            raise ValueError(f"field {field.number} is {value!r}")
        return kind, value

    def fields(self, fields: Iterable[Field]) -> dict[Field, int]:
        """Return the values of those that can be read. Raises NvmlFailure where none can."""
        found, failure = {}, NvmlFailure(NOT_SUPPORTED)
        for field in fields:
            try:
                found[field] = self.field(field)[1]
            except NvmlFailure as error:
                failure = error
        if not found:
            raise failure
        return found

    def reading(self, metric: Metric, value: int | float, *more: tuple[str, str | int]) -> Reading:
        """Return a reading of this device."""
        return Reading(metric, value, self._attributes(more))

    def counted(
        self,
        metric: Metric,
        raw: int,
        *more: tuple[str, str | int],
        per_unit: int = 1,
        wrap: Wrap | None = None,
    ) -> Iterator[Reading]:
        """Yield a counter's total, `per_unit` of it to one; nothing where it starts anew."""
        if type(raw) is not int or raw < 0:
            raise ValueError(f"a counter is {raw!r}")
        key = metric.name, more
        if key not in self._counters:
            self._counters[key] = RisingCounter(*(wrap or ()))
        total = self._counters[key].total(raw, self.at_ns)
        if total is not None:
            yield self.reading(metric, total if per_unit == 1 else total / per_unit, *more)

    def _attributes(self, more: Attributes) -> Attributes:
        if more not in self._series:
            self._series[more] = (("hw.id", self.uuid), *more)
        return self._series[more]


def share(percent: float, what: str) -> float:
    """Return a percentage as a share. Raises ValueError where it is none."""
    if not 0 <= percent <= 100:  # NaN too
        raise ValueError(f"{what} is {percent:g} %")
    return percent / 100
