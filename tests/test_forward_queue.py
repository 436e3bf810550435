"""The queue of forwarding: whatever is done with it, it knows what it holds."""

from hypothesis import given, settings
from hypothesis import strategies as st
from otlp_messages import METRICS, TRACES

from perfledger.collectors.forward.forward_queue import (
    REQUEST_COST_BYTES,
    Batch,
    ForwardQueue,
    Request,
)


@settings(deadline=None, max_examples=200)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "put", "take", "done", "split", "age"]),
            st.integers(0, 9),
        ),
        max_size=60,
    ),
    limit=st.integers(1, 10_000),
    batch=st.integers(1, 3000),
)
def test_the_queue_loses_nothing_and_knows_its_size(
    steps: list[tuple[str, int]], limit: int, batch: int
) -> None:
    queue, under_way, inside = ForwardQueue(limit, batch), list[Batch](), dict[int, int]()
    for time_ns, (step, number) in enumerate(steps):
        if step == "put":
            cost = number + REQUEST_COST_BYTES
            signal, hops = (TRACES, METRICS)[number % 2], ("x",) * (number % 3 == 0)
            fits = sum(inside.values()) + cost <= limit
            assert queue.put(Request(signal, b"x" * number, hops, time_ns)) == (
                "" if fits else "full"
            )
            inside |= {time_ns: cost} if fits else {}
        elif step == "take":
            taken = queue.take()
            assert (taken is None) == (queue.waiting() == sum(len(b.requests) for b in under_way))
            if taken:
                assert len({(r.signal.name, r.hops) for r in taken.requests}) == 1
                assert len(taken.requests) == 1 or taken.size_bytes <= batch
                under_way.append(taken)
        elif under_way and step == "split":
            queue.split(under_way.pop(number % len(under_way)))
        elif under_way and step == "done":
            old = under_way.pop(number % len(under_way))
            queue.done(old)
            inside = {
                k: v for k, v in inside.items() if k not in {r.offered_ns for r in old.requests}
            }
        elif under_way and step == "age":
            old = under_way.pop()
            young = queue.without_older(old, old.requests[-1].offered_ns)
            under_way.append(young)
            gone = {r.offered_ns for r in old.requests} - {r.offered_ns for r in young.requests}
            inside = {k: v for k, v in inside.items() if k not in gone}
        assert queue.size_bytes == sum(inside.values())
        assert queue.waiting() == len(inside)
        assert queue.oldest_ns() == min(inside, default=None)
    assert queue.close() == len(inside)
    assert (queue.waiting(), queue.size_bytes, queue.take()) == (0, 0, None)
