"""Looks at runs after each round, or session: what they settle, and at which level."""

import random
from collections.abc import Sequence

import pytest
from fake_summaries import compared, runs

from fastlaunch.analysis.compare import MeasuredRun
from fastlaunch.analysis.differences import RunTime
from fastlaunch.analysis.looks import Looked, look_levels, look_through, share_of_plan, share_of_session


def planned(*rows: Sequence[float], max_rounds: int | None = 8, session: str = "a") -> list[RunTime]:
    """A run of each row in each round, as far as the row was run; log times."""
    return [
        RunTime(
            row=row,
            log_time=time,
            host="host",
            block=(session, number),
            session=session,
            round=number if max_rounds else None,
            max_rounds=max_rounds,
        )
        for row, times in enumerate(rows)
        for number, time in enumerate(times, start=1)
    ]


def looked(times: list[RunTime], num_rows: int = 2) -> dict[int, Looked]:
    return look_through(times, range(1, num_rows), 0)


QUIET = (0.0, 0.001, -0.001)
FASTER = (-0.1, -0.101, -0.1)


def test_the_looks_of_a_plan_share_what_one_look_may_spend() -> None:
    for max_rounds, percent in ((3, 5), (4, 2.7), (8, 1.4), (12, 1.0)):
        (row,) = looked(planned((0, 0.02, 0.01), (0.01, 0, 0.02), max_rounds=max_rounds)).values()
        assert row.kind == "unresolved"
        assert row.level == pytest.approx(percent / 100)
    assert share_of_plan(2) == share_of_plan(3) == 1.0
    assert [share_of_session(number) for number in (0, 1, 2, 9)] == [1.0, 0.24, 0.12, 0.016]


def test_what_a_look_settled_stands_whatever_later_rounds_show() -> None:
    later = (0.0, 0.2, -0.1, 0.0)
    (row,) = looked(planned((*QUIET, *later), (*FASTER, *reversed(later)))).values()
    assert (row.kind, row.round, row.max_rounds) == ("better", 3, 8)
    low, high = row.difference.limits(row.level)
    assert 0 < low < 0.1 < high
    # Without a plan there is one look, at all of them.
    (at_once,) = looked(planned((*QUIET, *later), (*FASTER, *reversed(later)), max_rounds=None)).values()
    assert (at_once.kind, at_once.round) == ("unresolved", None)


@pytest.mark.parametrize(("before", "after"), [(-0.1, 0.1), (0.1, -0.1), (0.0, 0.3)])
def test_what_was_settled_is_open_again_where_all_runs_say_the_opposite(before: float, after: float) -> None:
    first = planned(QUIET, [before + time for time in QUIET], max_rounds=None)
    base = (0.0, 0.002, -0.001, 0.001, 0.0, -0.002) * 3
    later = planned(base, [after + time for time in reversed(base)], max_rounds=None, session="b")
    (settled,) = looked(first).values()
    (both,) = looked([*first, *later]).values()
    assert settled.kind != "unresolved" and settled.contradicted is None
    assert (both.kind, both.contradicted) == ("unresolved", settled.kind)
    low, high = both.difference.limits(both.level)
    assert low <= both.difference.value <= high


def test_a_row_that_stopped_takes_in_no_later_round_and_the_others_go_on() -> None:
    rng = random.Random(0)
    noisy = [0.05 * rng.gauss(0, 1) for _ in range(8)]
    other = [0.05 * rng.gauss(0, 1) for _ in range(8)]
    rows = looked(planned(noisy, [time - 0.5 for time in noisy[:3]], other), num_rows=3)
    assert (rows[1].kind, rows[1].round) == ("better", 3)
    assert (rows[2].kind, rows[2].round) == ("unresolved", 8)


def test_rows_that_differ_leave_holms_count_and_ties_do_not() -> None:
    third = (0.0, 0.02, -0.02, 0.01)
    for second, part in (((-0.1, -0.101, -0.1), 1), ((0.0005, 0.0005, -0.001), 2)):
        base = (*QUIET, 0.0)
        rows = looked(planned(base, second, third), num_rows=3)
        assert rows[1].round == 3 and rows[1].kind in ("better", "tie")
        assert rows[2].kind == "unresolved"
        assert rows[2].level == pytest.approx(0.014 / part)


def test_a_session_that_was_added_to_a_plan_is_one_more_look() -> None:
    added = [
        RunTime(row=row, log_time=time, host="host", block=("b", number), session="b")
        for row, times in enumerate(((0.0, 0.02), (0.01, 0.01)))
        for number, time in enumerate(times)
    ]
    first = planned((0, 0.02, 0.01), (0.01, 0, 0.02))
    (row,) = looked([*first, *added]).values()
    assert row.level == pytest.approx(0.05 * 0.24) and row.round is None
    assert looked(first)[1].next_level == pytest.approx(row.level)
    assert look_levels([0.24], [1.0]) == pytest.approx([0.012])


def test_compare_says_after_which_round_of_a_plan_it_was_settled() -> None:
    def rounds(recipe: str, *times_s: float) -> list[MeasuredRun]:
        return [
            run
            for number, time_s in enumerate(times_s, start=1)
            for run in runs(recipe, time_s, session="sub", round=number, max_rounds=6, seed=number)
        ]

    base = rounds("bf16", 0.1, 0.1001, 0.0999, 0.1)
    _, fast, same = compared(
        [*base, *rounds("compile", 0.09, 0.0901, 0.0899), *rounds("tf32", 0.1, 0.12, 0.09, 0.1)]
    ).rows
    assert fast.verdict.kind == "better"
    assert "settled after round 3 of at most 6" in fast.verdict.reasons
    assert same.verdict.kind == "unresolved"
    assert "not settled after round 4 of at most 6" in same.verdict.reasons
