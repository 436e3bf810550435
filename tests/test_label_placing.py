"""Labels never cover each other, whatever they are to be near to."""

from hypothesis import given
from hypothesis import strategies as st

from perfledger.dashboards.label_placing import Box, Label, place

PLOT = Box(46, 24, 280, 236)
coordinates = st.floats(0, 340, allow_nan=False)
labels = st.lists(
    st.builds(Label, coordinates, coordinates, st.floats(8, 120), st.floats(10, 20)), max_size=24
)
boxes = st.lists(
    st.builds(Box, coordinates, coordinates, st.floats(1, 40), st.floats(1, 40)), max_size=12
)


@given(labels, boxes)
def test_no_label_covers_another_or_what_was_there_or_leaves_the_plot(
    wanted: list[Label], taken: list[Box]
) -> None:
    placed = place(wanted, PLOT, taken)
    assert len(placed) == len(wanted)
    full = list(taken)
    for label, box in zip(wanted, placed, strict=True):
        if box is not None:
            assert (box.width, box.height) == (label.width, label.height)
            assert PLOT.holds(box)
            assert not [other for other in full if box.overlaps(other)]
            full.append(box)


@given(labels)
def test_a_label_is_left_out_only_where_the_plot_is_crowded(wanted: list[Label]) -> None:
    first = place(wanted[:1], PLOT, [])
    assert None not in first


def test_a_label_goes_beside_its_point_and_the_next_one_to_the_other_side() -> None:
    label = Label(100, 100, 40, 16)
    assert place([label, label], PLOT, []) == [Box(107, 92, 40, 16), Box(53, 92, 40, 16)]


def test_a_full_plot_places_nothing() -> None:
    assert place([Label(100, 100, 40, 16)], PLOT, [PLOT]) == [None]
