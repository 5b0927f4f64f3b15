"""Find the best row, and the command for what a verdict still lacks.

The best row follows from multiple comparisons with the best, in Bonferroni's form (Hsu 1996). Every view of
the answer (sentence, JSON, Markdown, page) shows the decision made here.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastlaunch.analysis.compare import Row
from fastlaunch.analysis.differences import Differences, RunTime
from fastlaunch.analysis.looks import share_of_both
from fastlaunch.analysis.notes import uneven_note
from fastlaunch.analysis.pooling import newest_version, run_times
from fastlaunch.analysis.pricing import reciprocal
from fastlaunch.analysis.statistics import BETTER, LEVEL, TIE, UNRESOLVED, WORSE
from fastlaunch.analysis.suggest import next_seed, place_of, submit_command
from fastlaunch.analysis.verdicts import BASELINE, NO_INTERVAL, TRAINING, exp, ratio_between
from fastlaunch.measure.summary import Interval, Setup

#: Rounds of a new session, and how many times as long its runs are.
_NEW_ROUNDS, _TIMES_LONGER = 6, 4


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best row of a workload: by dollars if all rows have a price, else by speed.

    kind: `better` if the first row beats the baseline; `worse` if the first row is the baseline and the next
    is worse; `tie` or `unresolved`, the first row's verdict; `no interval` if only figures order the two;
    `baseline` if the first row stands alone.
    """

    kind: str
    is_priced: bool
    first: Row  # named first in the answer
    second: Row | None  # compared with the first
    row: Row | None  # the best; None if only figures without an interval would decide
    runner_up: Row | None
    ratio: Interval | None  # best over runner-up, at 95%, or wider after several looks
    # The rows that may be best, the best first; they include the true best in 95% of tables. A row without an
    # interval is included if its figure is no lower, or if no row has an interval.
    may_be_best: tuple[Row, ...]

    @property
    def is_settled(self) -> bool:
        return self.runner_up is not None and len(self.may_be_best) == 1


def ratio_of(row: Row, *, is_priced: bool) -> Interval | None:
    """Return the row's ratio to its baseline, by dollars or by speed."""
    return row.verdict.ratio if is_priced else row.verdict.speed_ratio


def all_priced(rows: Sequence[Row]) -> bool:
    """Return whether dollars compare all rows that speed compares."""
    return all(row.verdict.ratio is not None for row in rows if row.verdict.speed_ratio is not None)


def at_home(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the baseline's owner; all rows if none is a baseline."""
    home = next((row.side for row in rows if row.is_baseline), None)
    return [row for row in rows if row.side == home] or [*rows]


def best_of(rows: Sequence[Row]) -> Best | None:
    """Return the best of a workload's rows; None if none is ranked, or the baseline has no speed.

    Only rows of the baseline's owner count (see `at_home`), and only rows that train as the baseline does.
    Derived rows do not count if enough rows were measured or published as they are.
    """
    alike = [row for row in at_home(rows) if not row.is_barred and row.verdict.comparable_as == TRAINING]
    published = [row for row in alike if not row.derived]
    if len(published) > 1 and any(row.is_baseline for row in published):
        alike = published
    alike = [row for row in alike if row.verdict.speed_ratio is not None]
    base = next((row for row in alike if row.is_baseline), None)
    if base is None:
        return None
    is_priced = all(row.verdict.ratio is not None for row in alike)

    def figure(row: Row) -> float:
        ratio = ratio_of(row, is_priced=is_priced)
        assert ratio is not None
        return ratio.value

    ranked = [row for row in alike if row.verdict.is_ranked]
    order = _order_of(ranked, is_priced=is_priced)
    in_order = [ranked[number] for number in order.rows]
    better = [row for row in in_order if row.verdict.kind == BETTER]
    others = sorted((row for row in alike if row is not base), key=figure, reverse=True)
    if better:
        kind, first, second = BETTER, better[0], base
    elif not others:
        kind, first, second = BASELINE, base, None
    else:
        kind, first, second = others[0].verdict.kind, others[0], base
        if kind == WORSE or (kind == NO_INTERVAL and figure(first) < 1):
            first, second = base, first
    best = runner_up = ratio = None
    if kind == NO_INTERVAL:
        # A row worse than the baseline cannot be best; the other rows are unknown.
        known = [row for row in (base, *others) if row.verdict.kind != WORSE]
        may_be_best = sorted(known, key=figure, reverse=True)
    else:
        best = base if kind in (TIE, UNRESOLVED) and figure(first) < 1 else first
        number = next(number for number, row in enumerate(ranked) if row is best)
        second_number = next((other for other in order.rows if other != number), None)
        if second_number is not None:
            runner_up, ratio = ranked[second_number], order.ratio(number, second_number)
        least = figure(best)
        unjudged = [row for row in others if row.verdict.kind == NO_INTERVAL and figure(row) >= least]
        may_be_best = [best, *(ranked[rival] for rival in order.rivals(number)), *unjudged]
    return Best(
        kind=kind,
        is_priced=is_priced,
        first=first,
        second=second,
        row=best,
        runner_up=runner_up,
        ratio=ratio,
        may_be_best=tuple(may_be_best),
    )


def _order_of(rows: Sequence[Row], *, is_priced: bool) -> "Order":
    usd = {
        number: row.price.usd_per_hour * row.setup.num_nodes
        for number, row in enumerate(rows)
        if is_priced and row.price
    }
    return Order(
        [run for number, row in enumerate(rows) for run in run_times(row.group, number)],
        [row.verdict.kind for row in rows],
        [ratio_of(row, is_priced=is_priced) for row in rows],
        usd,
    )


class Order:
    """Rows with an interval, by number, ordered by how many of the others they beat.

    kinds and ratios: of each row's verdict, beside the baseline that all share.
    """

    def __init__(
        self,
        runs: Sequence[RunTime],
        kinds: Sequence[str],
        ratios: Sequence[Interval | None],
        usd_per_hour: Mapping[int, float] | None = None,
    ) -> None:
        self._runs, self._kinds, self._ratios = runs, kinds, ratios
        self._differences = Differences(runs, usd_per_hour or {})
        numbers = range(len(kinds))
        self.rows = sorted(numbers, key=lambda row: -sum(self._ahead(row, other) > 0 for other in numbers))

    def rivals(self, best: int) -> list[int]:
        """Return the other rows that may be best, by the verdict if one of the two is the baseline.

        Two rows are also told apart by their intervals beside the baseline: the two may share too few rounds
        for a narrow interval of their own.
        """
        others = [row for row in self.rows if row != best]
        level = LEVEL / max(1, len(others))

        def may_win(other: int) -> bool:
            pair = {self._kinds[best], self._kinds[other]}
            if BASELINE in pair:
                return not pair & {BETTER, WORSE}
            if _is_above(self._ratios[best], self._ratios[other]):
                return False
            difference = self._differences.between(best, other)
            share = share_of_both(self._runs, best, other)
            return difference is None or difference.p_above(0.0) > level * share

        return list(filter(may_win, others))

    def ratio(self, best: int, other: int) -> Interval:
        """Return the ratio of `best` to `other`, as in the verdict if one of the two is the baseline."""
        of_best, of_other = self._ratios[best], self._ratios[other]
        if self._kinds[other] == BASELINE and of_best is not None:
            return of_best
        if self._kinds[best] == BASELINE and of_other is not None:
            return reciprocal(of_other)
        ratio = ratio_between(self._differences, self._runs, best, other)
        return ratio or Interval(value=exp(self._ahead(best, other)))

    def _ahead(self, row: int, other: int) -> float:
        return self._differences.log_ratio(row, other)


def _is_above(ratio: Interval | None, other: Interval | None) -> bool:
    """Return whether the first interval lies above the second."""
    if ratio is None or other is None or ratio.low is None or other.high is None:
        return False
    return ratio.low > other.high


def more_runs_command(rows: Sequence[Row], *, own_region: str, submission: str | None = None) -> str | None:
    """Return the command for a best row that is not settled, else for the first row whose verdict needs more
    runs, or None.

    It also runs the row that it is beside, a rival or the baseline, if the two differ only in the recipe.
    submission: the session to which the runs are added. Where no number of rounds like these is enough, it
    proposes a session of longer runs, or on one thread if steps on a CPU vary.
    """
    local = [row for row in rows if row.setup.instance is None and row.setup.num_nodes == 1]
    for workload in dict.fromkeys(row.setup.workload for row in local):
        best = best_of([row for row in local if row.setup.workload == workload])
        if best is None or best.kind != BETTER or len(best.may_be_best) == 1:
            continue
        first, rival, *_ = best.may_be_best
        if rival.verdict.kind == BETTER and (
            command := _runs_like(
                rival, rows, _NEW_ROUNDS, own_region=own_region, add_to=submission, beside=first
            )
        ):
            return command
    for row in local:
        number = row.verdict.more_rounds
        if number is None:
            continue
        if command := _runs_like(row, rows, number, own_region=own_region, add_to=submission):
            return command
    for row in local:
        if row.verdict.kind != UNRESOLVED or row.verdict.more_rounds is not None:
            continue
        one_thread = uneven_note((row.group, _baseline_of(row, rows).group)) is not None
        if row.setup.is_script and not one_thread:
            continue  # its words do not tell how long it is
        longer = 1 if one_thread else _TIMES_LONGER
        if command := _runs_like(row, rows, _NEW_ROUNDS, own_region=own_region, times_longer=longer):
            return f"{'OMP_NUM_THREADS=1 ' if one_thread else ''}{command}"
    return None


def _baseline_of(row: Row, rows: Sequence[Row]) -> Row:
    return next(other for other in rows if other.setup.workload == row.setup.workload and other.is_baseline)


def _runs_like(
    row: Row,
    rows: Sequence[Row],
    repeats: int,
    *,
    own_region: str,
    times_longer: int = 1,
    add_to: str | None = None,
    beside: Row | None = None,
) -> str | None:
    """Return the command for more runs of the row and its baseline; None for a script that was edited.

    beside: the row to run in place of the baseline; None if no one command runs the two.
    """
    base = beside or _baseline_of(row, rows)
    if row.setup.is_script:
        runs = [run for other in rows if other.setup.workload == row.setup.workload for run in other.runs]
        if not row.runs[0].script or row.setup.version != newest_version(runs):
            return None
        is_same = (base.runs[0].script, base.setup.version) == (row.runs[0].script, row.setup.version)
        if beside is not None and not is_same:
            return None
        both = [base, row] if is_same and base is not row else [row]
        adding = () if add_to is None else ("--add-to", add_to)
        return script_command(both, repeats, place=(*adding, "--local"))
    is_pair = _terms(base.setup) == _terms(row.setup) and base.setup.recipe != row.setup.recipe
    if beside is not None and not is_pair:
        return None
    return submit_command(
        [run.summary for run in row.runs],
        [other.setup.known_recipe or other.setup.recipe for other in ((base, row) if is_pair else (row,))],
        place=place_of(row.runs[0], own_region=own_region),
        # Choose unused seeds; a used seed would not form a new pair.
        first_seed=next_seed([run.summary for run in (*base.runs, *row.runs)]),
        repeats=repeats,
        times_longer=times_longer,
        add_to=add_to,
    )


def script_command(rows: Sequence[Row], repeats: int, *, place: Sequence[str] = ("--local",)) -> str:
    """Return the command that runs the rows' common script again. place: options that say where.

    If the rows differ in several texts, it makes every combination of them.
    """
    words = [*place]
    for name in rows[-1].setup.variant:
        texts = dict.fromkeys(row.setup.variant[name] for row in rows)
        words += ["-L", f"{name}={','.join(texts)}"]
    if repeats > 1:
        words += ["--repeats", str(repeats)]
    return shlex.join(["fastlaunch", "submit", *words, *rows[-1].runs[0].script])


def _terms(setup: Setup) -> tuple[object, ...]:
    """Return the settings that one command gives to all its recipes."""
    recipe = setup.known_recipe
    overrides = recipe.overrides if recipe else ()
    return overrides, setup.batch_size_per_gpu, setup.num_gpus, setup.data, setup.sequence_length
