"""Detached submissions whose launcher dies, or is refused, around the timer that it makes in the account.

What the timer was made for is ended by it though nobody comes; where there is none the ledger says so; and
none is left once its machines are gone, not even one of which no answer came.
"""

import pytest
from drawn import Death
from faulty_proxy import Fault
from network import Faults, Moment
from trial import Trial

pytestmark = pytest.mark.timeout(120)

#: Commits from the ledger's tables to what is noted when the last timer was made.
NUM_STEPS = 8
_KINDS = pytest.mark.parametrize("kind", ["detached", "detached-nodes"])


@_KINDS
@pytest.mark.parametrize("step", range(1, NUM_STEPS + 1))
def test_nothing_leaks_from_any_step_of_the_ledger(trial: Trial, kind: str, step: int) -> None:
    trial.faults, trial.is_left, trial.next_typed = Faults(), step % 2 == 0, ()
    assert not trial.run(Death(commit=step, after_s=20.0)), trial.story()
    assert trial.told[1] == "[-9]", trial.story()


@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("is_left", [True, False], ids=["left", "reaped"])
@pytest.mark.parametrize(("kind", "n"), [("detached", 1), ("detached-nodes", 1), ("detached-nodes", 2)])
def test_a_timer_is_not_forgotten_though_its_launcher_is_killed(
    trial: Trial, kind: str, n: int, is_left: bool, after: bool
) -> None:
    trial.faults, trial.fates, trial.is_left = Faults(), ("hangs",), is_left
    trial.next_typed = (("status",),)
    moment = Moment(n=n, action="CreateSchedule", after=after)
    assert not trial.run(Death(moment=moment, after_s=20.0)), trial.story()
    assert trial.told[1] == "[-9]", trial.story()


@_KINDS
@pytest.mark.parametrize("fault", [Fault.LOSE_ANSWER, Fault.LOSE_REQUEST, Fault.THROTTLE])
def test_a_timer_of_which_no_answer_comes_is_not_forgotten(trial: Trial, kind: str, fault: Fault) -> None:
    trial.faults, trial.fates, trial.next_typed = Faults(timers=fault), ("hangs",), ()
    assert not trial.run(Death(after_s=10.0)), trial.story()


@_KINDS
@pytest.mark.parametrize("action", ["CreateSchedule", "DeleteSchedule"])
def test_nothing_leaks_where_timers_are_refused(trial: Trial, kind: str, action: str) -> None:
    trial.faults = Faults(denied=(action,))
    trial.fates, trial.next_typed = ("hangs",), (("status",), ("cancel", "RUN"))
    assert not trial.run(Death(after_s=10.0)), trial.story()
