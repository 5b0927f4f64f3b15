"""Find the cells of a sweep that may still be the best per dollar, by successive elimination.

`sweep --until-best` uses it. A cell competes with cells of the same global batch. Before its first run, a
cell is left out if the best end of its prediction does not beat the best measured cell. After that, it is
left out once it is surely at most 1% better than the leader: by the rules of `differences` if the two shared
rounds, else by its own runs and an assumed scatter. Each look spends its share of the 5% (see `looks`),
divided among the cells. Machines of one type differ by more than a few runs do, so a cell compared with one
on another machine stops once its own error is small beside that difference.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from fastlaunch.analysis.anchors import Anchor, Config
from fastlaunch.analysis.differences import MACHINE, SCATTER, SCATTER_DOF, Differences, RunTime
from fastlaunch.analysis.looks import share_of_plan
from fastlaunch.analysis.statistics import LEVEL, Contrast, Difference, t_quantile
from fastlaunch.analysis.verdicts import exp
from fastlaunch.core.ownership import FIRST_LOOK

#: A cell that is better by less than this may be missed.
_WITHIN = math.log(1.01)
#: Degrees of freedom of prediction errors, which follow Student's t: a few are far larger than most.
_PREDICTION_DOF = 5


@dataclass(frozen=True, kw_only=True)
class SweptCell:
    """A cell of the matrix. Sizes are logarithms."""

    place: Hashable  # cells of one place share a machine: the instance type
    batch: Hashable  # samples and tokens of a step; cells compete within it
    log_usd_per_hour: float  # of all its machines; 0 where nothing is billed
    runs: tuple[RunTime, ...] = ()  # those that count; their `row` is not read
    config: Config | None = None  # each recipe as its own model; None if it cannot be predicted
    # Seconds per sample, as predicted and at the lower end of the range; None without a prediction.
    predicted: tuple[float, float] | None = None
    barred: str | None = None  # why it is not ranked


@dataclass(frozen=True, kw_only=True)
class Standings:
    """The result of a look at the cells, by cell number."""

    leaders: Mapping[Hashable, int]  # by batch, the best measured cell
    may_be_best: frozenset[int]  # measured cells, leaders included
    unneeded: Mapping[int, str]  # reason, by cell that need not run again


def eliminate(cells: Sequence[SweptCell], max_rounds: int) -> Standings:
    """Return which cells may be best, and which need no more runs. max_rounds: the plan's, for each cell."""
    batches: dict[Hashable, list[int]] = defaultdict(list)
    for at, cell in enumerate(cells):
        batches[cell.batch].append(at)
    leaders, may_be_best = {}, set()
    unneeded = {at: f"not ranked: {cell.barred}" for at, cell in enumerate(cells) if cell.barred}
    for batch, numbers in batches.items():
        ranked = [at for at in numbers if not cells[at].barred]
        race = _Race([cells[at] for at in ranked], max_rounds)
        if race.leader is None:
            continue
        leaders[batch] = ranked[race.leader]
        may_be_best |= {ranked[at] for at in race.may_be_best}
        unneeded |= {ranked[at]: why for at, why in race.unneeded.items()}
    return Standings(leaders=leaders, may_be_best=frozenset(may_be_best), unneeded=unneeded)


def predict_cells(cells: Sequence[SweptCell]) -> list[SweptCell]:
    """Return the cells, with predictions from the measured cells for those that have not run."""
    from fastlaunch.analysis.predict import Prediction, Predictor

    measured = [
        Anchor(config=cell.config, per_s=exp(-fmean(run.log_time for run in cell.runs)))
        for cell in cells
        if cell.runs and cell.config
    ]
    configs = {at: cell.config for at, cell in enumerate(cells) if cell.config and not cell.runs}
    after = list(cells)
    if not configs or not measured:
        return after
    answers = Predictor(measured).predict([*configs.values()])
    for at, answer in zip(configs, answers, strict=True):
        if isinstance(answer, Prediction):
            predicted = (-math.log(answer.predicted), -math.log(answer.high))
            after[at] = replace(after[at], predicted=predicted)
    return after


def next_places(cells: Sequence[SweptCell]) -> list[Hashable]:
    """Return the places ordered by the predicted dollars per sample of their cheapest cell.

    Without predictions, order by dollars per hour: the cheapest place shows as much about the recipes.
    """

    def usd(cell: SweptCell) -> tuple[bool, float]:
        seconds = cell.predicted[0] if cell.predicted else 0.0
        return cell.predicted is None, cell.log_usd_per_hour + seconds

    places: dict[Hashable, list[tuple[bool, float]]] = defaultdict(list)
    for cell in cells:
        places[cell.place].append(usd(cell))
    return sorted(places, key=lambda place: min(places[place]))


class _Race:
    """The cells of one batch."""

    def __init__(self, cells: Sequence[SweptCell], max_rounds: int) -> None:
        self._cells = cells
        runs = [
            # More runs do not reduce the deviation between machines of one type.
            replace(run, row=at, host=None)
            for at, cell in enumerate(cells)
            for run in cell.runs
        ]
        usd = {at: exp(cell.log_usd_per_hour) for at, cell in enumerate(cells)}
        self._differences = Differences(runs, usd)
        # Looks from the first round on.
        num_rivals = max(1, len(cells) - 1)
        self._level = LEVEL * share_of_plan(max_rounds + FIRST_LOOK - 1) / num_rivals
        # One run in twenty lies above its range. Keep that rate for all rivals together.
        wider, usual = (t_quantile(1 - p, _PREDICTION_DOF) for p in (LEVEL / 5 / num_rivals, LEVEL))
        self._reach = wider / usual
        measured = [at for at, cell in enumerate(cells) if cell.runs]

        def num_beaten(at: int) -> int:
            return sum(self._differences.log_ratio(at, other) > 0 for other in measured if other != at)

        self.leader = max(measured, key=num_beaten, default=None)
        self.unneeded: dict[int, str] = {}
        self.may_be_best: set[int] = set()
        if self.leader is not None:
            self._judge(self.leader)

    def _judge(self, leader: int) -> None:
        rivals, place = set(), self._cells[leader].place
        for at, cell in enumerate(self._cells):
            if at == leader:
                continue
            if cell.runs:
                if self._between(at, leader).p_below(_WITHIN) <= self._level:
                    self.unneeded[at] = "not the best"
                    continue
                self.may_be_best.add(at)
                if cell.place != place and self._own_error(at) < MACHINE / 2:
                    self.unneeded[at] = "more runs on these machines would not tell which is better"
                else:
                    rivals.add(at)
            elif cell.predicted is not None and self._cannot_win(cell, leader):
                self.unneeded[at] = "predicted not to be the best"
            elif cell.place == place:
                rivals.add(at)
        self.may_be_best.add(leader)
        is_apart = all(self._cells[at].place != place for at in rivals)
        if not rivals or (is_apart and self._own_error(leader) < MACHINE / 2):
            self.unneeded[leader] = "the best"

    def _cannot_win(self, cell: SweptCell, leader: int) -> bool:
        assert cell.predicted is not None
        best = self._cells[leader]
        predicted, at_best = cell.predicted
        hoped = predicted - self._reach * (predicted - at_best) + cell.log_usd_per_hour
        return hoped > fmean(run.log_time for run in best.runs) + best.log_usd_per_hour - _WITHIN

    def _between(self, at: int, other: int) -> Difference:
        """Return the difference in samples per dollar between two cells."""
        if self._differences.is_linked(at, other) and (seen := self._differences.between(at, other)):
            return seen
        estimate = Contrast(
            value=self._differences.log_ratio(at, other),
            error=math.hypot(self._own_error(at), self._own_error(other)),
            dof=SCATTER_DOF + min(len(self._cells[number].runs) for number in (at, other)) - 1,
        )
        return Difference(estimates=(estimate,))

    def _own_error(self, at: int) -> float:
        """Return the standard error of the cell's mean, by its own runs and the assumed scatter."""
        times = [run.log_time for run in self._cells[at].runs]
        squares = sum((time - fmean(times)) ** 2 for time in times)
        variance = (SCATTER_DOF * SCATTER**2 + squares) / (SCATTER_DOF + len(times) - 1)
        return math.sqrt(variance / len(times))
