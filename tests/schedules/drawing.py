"""Any schedule that `make_schedule` can make, for hypothesis."""

from hypothesis import strategies as st

from shardwright.schedules import KINDS, Schedule, make_schedule


@st.composite
def schedules(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS) -> Schedule:
    kind = draw(st.sampled_from(kinds))
    chunks = draw(st.integers(1, 4)) if kind == "interleaved" else None
    return make_schedule(
        kind,
        ranks=draw(st.integers(1, 8)),
        microbatches=draw(st.integers(1, 20)),
        chunks=chunks,
    )
