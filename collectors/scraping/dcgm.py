"""A page of NVIDIA's dcgm-exporter -> the same page with true types and units, and in our names.

What the page calls a counter or a number of bytes may be a rate: its configuration file says the
type, and anyone may edit it (dcgm_fields.py has what the fields really are). A field that DCGM
could not read is told as a huge number; such samples are dropped and counted. Beside its own name
each known field gets the name that the NVML sampler uses, with `hw.id`, so that a reader need not
ask where a number came from. Both on one GPU tell it twice: readers take one of the two.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from perfledger.collectors.scraping.dcgm_fields import DCGM_FIELDS, DcgmField
from perfledger.collectors.scraping.exposition import (
    Exposition,
    Family,
    Header,
    Labels,
    Sample,
    Series,
)

PREFIX = "DCGM_"
NO_VALUE = "DCGM has no value"
# dcgm_structs.h: blank, not found, not supported, not permitted, for integers and for doubles.
# As a double each of the integers is 2^63, so that which of the four it was is lost.
_BLANK_INTEGER = float(0x7FFFFFFFFFFFFFF0)
_BLANK_DOUBLES = frozenset(float(2**47 + why) for why in range(4))
_ID_LABELS = ("UUID", "uuid")  # the second with the exporter's old names
_INSTANCE_LABEL = "GPU_I_ID"
_LINK_LABEL = "nvlink"


def typed(page: Exposition) -> Exposition:
    """Return the page with what DCGM tells typed, cleaned and named; other families as they are."""
    if not any(family.header.name.startswith(PREFIX) for family in page.families):
        return page
    rejected: Counter[str] = Counter()
    families = [_cleaned(family, rejected) for family in page.families]
    ours: dict[str, _Ours] = {}
    for family in families:
        field = DCGM_FIELDS.get(family.header.name)
        if field is not None and field.metric is not None:
            name = field.metric.name
            ours.setdefault(name, _Ours(field)).take(field, family.samples.get("", ()))
    named = [one.family for one in ours.values() if one.family.samples[""]]
    return replace(page, families=families + named, rejected=page.rejected + rejected)


def is_blank(value: float) -> bool:
    """Return whether a number stands for "no value" in DCGM."""
    return value >= _BLANK_INTEGER or value in _BLANK_DOUBLES


class _Ours:
    """One of our metrics, from however many fields: the first sample of a series counts.

    The exporter tells a GPU again for each container and each MIG instance on it.
    """

    def __init__(self, field: DcgmField) -> None:
        assert field.metric is not None
        metric = field.metric
        header = Header(metric.name, metric.kind, metric.meaning, metric.unit)
        self.family = Family(header, {"": []})
        self._told: set[Labels] = set()

    def take(self, field: DcgmField, samples: Iterable[Sample]) -> None:
        """Add the samples of a field, one for each GPU."""
        for sample in samples:
            labels = _labels(field, dict(sample.series.labels))
            if labels is None or labels in self._told:
                continue
            self._told.add(labels)
            series = Series(self.family.header.name, labels, None, labels)
            value = sample.value * field.times / field.over
            self.family.samples[""].append(Sample(series, value, sample.time_ns, None))


def _cleaned(family: Family, rejected: Counter[str]) -> Family:
    """Return a family of DCGM's without blank samples, of its true type; others unchanged."""
    header = family.header
    if not header.name.startswith(PREFIX):
        return family
    told = {suffix: list(_with_values(samples)) for suffix, samples in family.samples.items()}
    rejected[NO_VALUE] += sum(map(len, family.samples.values())) - sum(map(len, told.values()))
    field = DCGM_FIELDS.get(header.name)
    if field is not None and told.keys() == {""}:
        header = header._replace(type=field.kind, unit=field.unit)
    return Family(header, told)


def _with_values(samples: list[Sample]) -> Iterator[Sample]:
    return (sample for sample in samples if not is_blank(sample.value))


def _labels(field: DcgmField, told: dict[str, str]) -> Labels | None:
    """Return our labels; None for what is not one GPU's: a link's, a switch's, a CPU's."""
    uuid = next((told[name] for name in _ID_LABELS if told.get(name)), None)
    if field.metric is None or uuid is None or _LINK_LABEL in told:
        return None
    labels = {"hw.id": uuid, **dict(field.attributes)}
    if "hw.type" in field.metric.attribute:
        labels["hw.type"] = "gpu"
    if field.of_instance and told.get(_INSTANCE_LABEL):
        labels["perfledger.gpu.instance"] = told[_INSTANCE_LABEL]
    return tuple(sorted(labels.items()))
