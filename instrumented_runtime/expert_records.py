"""What the experts' layers of a step routed: from counts to records, and from these to attributes.

A record holds the tokens of some experts; a model with more of them writes several a step. Nothing
here imports torch: the exporter process uses it too.
"""

from typing import TYPE_CHECKING

from perfledger.instrumented_runtime.records import NOT_READ, Routed
from perfledger.instrumented_runtime.telemetry import AttributeValue

if TYPE_CHECKING:
    from perfledger.instrumented_runtime.moe import StepRouting

EXPERTS_A_RECORD = 8


def routed_fields(routing: "StepRouting", seq: int) -> list[tuple[int, ...]]:
    """Return the words of the ROUTED records of step `seq`, see records.Routed."""
    of_layers = (routing.busiest_assignments, routing.touched_experts)
    totals = (routing.layers, routing.assignments, *of_layers)
    records = []
    for first in range(0, len(routing.by_expert), EXPERTS_A_RECORD):
        tokens = routing.by_expert[first : first + EXPERTS_A_RECORD]
        absent = (NOT_READ,) * (EXPERTS_A_RECORD - len(tokens))
        records.append((seq, *totals, first, *tokens, *absent))
    return records


class RoutedSteps:
    """Gathers the ROUTED records of the coming step."""

    def __init__(self) -> None:
        self._records: list[Routed] = []

    def take(self, record: Routed) -> None:
        """Take the next record."""
        self._records.append(record)

    def attributes(self, seq: int) -> dict[str, AttributeValue]:
        """Return the attributes of step `seq`, which has ended: none if it routed nothing."""
        records = [record for record in self._records if record.seq == seq]
        self._records = []
        if not records:
            return {}
        one = records[0]
        told: dict[str, AttributeValue] = {
            "perfledger.moe.layers": one.layers,
            "perfledger.moe.assignments": one.assignments,
            "perfledger.moe.busiest_share": one.busiest_assignments / one.assignments,
            "perfledger.moe.touched_experts": one.touched_experts,
        }
        tokens = [count for record in records for count in record[6:] if count != NOT_READ]
        if [record.first for record in records] == list(
            range(0, len(records) * EXPERTS_A_RECORD, EXPERTS_A_RECORD)
        ):
            told["perfledger.moe.expert_tokens"] = ",".join(map(str, tokens))
        return told
