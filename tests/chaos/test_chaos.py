"""The launcher killed at every step and at random moments, over a service that fails, throttles and lies.

Some commands see AWS as it was before the launch, or another account; others' machines, jobs and schedules
look like the launcher's; and jobs write what nodes do not.

After `fastlaunch reap`, hours later: no live instance, no running job, no schedule left, every row of the
ledger final and explained, every cost known, nothing started twice for a token or a job's name, no second
machine or job for a run while its first one lives, every tag in its place; and at no time anything called
lost that lives, or anything of others ended. What goes on with a run begins at its newest checkpoint.
"""

import random

import pytest
from drawn import Death, View, draw_death
from faulty_proxy import Fault
from network import Faults, Moment
from submissions import SUBMISSIONS, launch_of, num_nodes_of
from trial import BEGINS, Trial

#: Seeded trials of each kind of submission: 376, of which 44 are slow, and the others in the full tier.
NUM_TRIALS = {
    "machine": 72,
    "nodes": 32,
    "block": 8,
    "detached": 24,
    "detached-nodes": 16,
    "detached-block": 24,
    "job": 48,
    "queued-job": 32,
    "spot-job": 24,
    "spot": 40,
    "detached-spot": 56,
}
#: Commits of a launcher that is not disturbed: the ledger's tables and everything up to the last state.
NUM_STEPS = 14
#: Commits from the ledger's tables to what is noted when the last timer was made.
NUM_TIMER_STEPS = 8

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def block_trial(trial: Trial) -> Trial:
    """Of a detached submission in a block that is to come."""
    trial.kind = "detached-block"
    return trial


_SEEDS = [
    pytest.param(kind, seed, id=f"{kind}-seed-{seed}-")
    for kind, num_trials in NUM_TRIALS.items()
    for seed in range(num_trials)
]


@pytest.mark.parametrize(("kind", "seed"), _SEEDS)
def test_nothing_leaks_whatever_goes_wrong(trial: Trial, kind: str, seed: int) -> None:
    assert not trial.run(), trial.story()


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("step", range(1, NUM_STEPS + 1))
@pytest.mark.parametrize("kind", ["machine", "job", "queued-job"])
def test_nothing_leaks_from_any_step_of_the_ledger(trial: Trial, kind: str, step: int, before: bool) -> None:
    trial.faults = Faults()
    assert not trial.run(Death(commit=step, before_commit=before)), trial.story()


@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("hidden", [0, 30])
@pytest.mark.parametrize("kind", [kind for kind in SUBMISSIONS if kind != "detached-nodes"])
def test_nothing_leaks_from_the_launch_itself(trial: Trial, kind: str, hidden: int, after: bool) -> None:
    trial.faults, trial.fates = Faults(hidden=hidden), ("hangs",)
    # Typed at once, while AWS may not show what was started yet: the ledger must not call it ended.
    trial.next_typed = (("status",), ("reap", "--yes"), ("status",))
    launch = Moment(n=1, action=launch_of(kind), after=after)
    assert not trial.run(Death(moment=launch, after_s=20.0)), trial.story()
    assert trial.told[1] == "[-9]", trial.story()


@pytest.mark.parametrize("view", [View.STALE, View.STRANGE])
@pytest.mark.parametrize("kind", ["machine", "nodes", "job", "queued-job"])
def test_what_is_not_shown_is_neither_lost_nor_ended(trial: Trial, kind: str, view: View) -> None:
    trial.faults, trial.fates, trial.view = Faults(), ("hangs",), view
    trial.next_typed = (("status",), ("status",), ("reap", "--yes"), ("status",))
    look = {"job": "DescribeTrainingJob", "queued-job": "DescribeServiceJob"}.get(kind, "DescribeInstances")
    assert not trial.run(Death(moment=Moment(n=6, action=look, after=True), after_s=20.0)), trial.story()
    assert trial.num_launched == num_nodes_of(kind), trial.story()


@pytest.mark.parametrize("hidden", [0, 3])
@pytest.mark.parametrize("kind", ["machine", "nodes", "job", "queued-job"])
def test_what_was_started_without_an_answer_is_found_again(trial: Trial, kind: str, hidden: int) -> None:
    trial.faults = Faults(first_launch=Fault.LOSE_ANSWER, hidden=hidden)
    trial.fates, trial.next_typed = ("hangs",), ()
    assert not trial.run(Death(after_s=5.0)), trial.story()
    assert trial.num_launched == num_nodes_of(kind), trial.story()


@pytest.mark.parametrize(
    "fates",
    [("hangs",), ("hangs", "never-boots"), ("fails", "hangs"), ("is-taken", "completes")],
    ids="-then-".join,
)
@pytest.mark.parametrize("hidden", [0, 6])
@pytest.mark.parametrize("kind", ["nodes"])
def test_both_nodes_end_with_the_run(trial: Trial, kind: str, hidden: int, fates: tuple[str, ...]) -> None:
    trial.faults, trial.fates = Faults(hidden=hidden), fates
    trial.next_typed = (("status",), ("cancel", "RUN"), ("status",))
    # After a while both are there, and one may have gone.
    launch = Moment(n=6, action="DescribeInstances", after=True)
    assert not trial.run(Death(moment=launch, after_s=20.0)), trial.story()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_killed", [False, True], ids=["followed", "killed"])
@pytest.mark.parametrize("kind", ["nodes", "detached-nodes"])
def test_a_node_that_vanishes_is_replaced_with_its_peer_and_nothing_else(
    trial: Trial, kind: str, seed: int, is_killed: bool
) -> None:
    trial.faults, trial.fates = Faults(), ("vanishes", *3 * ("completes",))
    trial.next_typed = (("watch",), ("status",))
    # The launcher, and the command that looks next.
    rng = random.Random(seed)
    deaths = [draw_death(rng, kind) if is_killed else Death(after_s=20.0) for _ in range(2)]
    trial.next_death = deaths[1]
    assert not trial.run(deaths[0]), trial.story()
    assert trial.num_launched == 4 or is_killed, trial.story()


@pytest.mark.parametrize("expires_at", [None, 3])
@pytest.mark.parametrize("hidden", [0, 3, 30])
@pytest.mark.parametrize("kind", ["machine", "nodes", "job", "queued-job"])
def test_nothing_is_started_again_where_no_answer_comes(
    trial: Trial, kind: str, hidden: int, expires_at: int | None
) -> None:
    trial.faults = Faults(lost_launches=1.0, hidden=hidden, expires_at=expires_at)
    assert not trial.run(Death(after_s=5.0)), trial.story()


@pytest.mark.parametrize("first", ["is-taken", "is-taken-at-once", "is-taken-late"])
@pytest.mark.parametrize("kind", ["spot", "detached-spot"])
def test_spot_goes_on_from_its_checkpoint_until_it_is_done(trial: Trial, kind: str, first: str) -> None:
    trial.faults, trial.fates = Faults(), (first, "is-taken", "completes")
    trial.next_typed = (("watch",),) if "detached" in kind else ()
    trial.next_death = Death(after_s=20.0)
    assert not trial.run(Death(after_s=20.0)), trial.story()
    assert trial.states == ["completed", "completed"], trial.story()
    assert trial.num_launched == 3, trial.story()


@pytest.mark.parametrize(
    "death",
    [
        *(Death(commit=commit) for commit in range(1, NUM_STEPS + 1)),
        *(
            Death(moment=Moment(n=1, action=action, after=after))
            for action in ("RunInstances", "CreateSchedule")
            for after in (False, True)
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("command", [("status",), ("resume", "RUN", "--yes", "--detach")])
@pytest.mark.parametrize("kind", ["detached-spot"])
def test_a_resume_that_is_killed_starts_nothing_twice(
    trial: Trial, kind: str, command: tuple[str, ...], death: Death
) -> None:
    trial.faults, trial.fates = Faults(), ("is-taken", "completes")
    trial.next_typed, trial.next_death = (command, ("watch",)), death
    assert not trial.run(Death(after_s=20.0)), trial.story()
    assert trial.num_launched == 2, trial.story()
    assert "completed" in trial.states, trial.story()


@pytest.mark.parametrize("command", [("status",), ("resume", "RUN", "--yes", "--detach")])
@pytest.mark.parametrize("kind", ["detached-spot"])
def test_of_several_terminals_one_resumes(trial: Trial, kind: str, command: tuple[str, ...]) -> None:
    trial.faults, trial.fates = Faults(), ("is-taken", "completes")
    trial.next_typed, trial.num_at_once = (command, ("watch",)), 3
    assert not trial.run(Death(after_s=20.0)), trial.story()
    assert trial.num_launched == 2, trial.story()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("action", ["RunInstances", "CreateSchedule"])
@pytest.mark.parametrize("kind", ["spot"])
def test_a_launcher_that_is_killed_while_it_goes_on_loses_nothing(
    trial: Trial, kind: str, action: str, after: bool
) -> None:
    trial.faults, trial.fates = Faults(), ("is-taken", "hangs")
    trial.next_typed = (("status",), ("resume", "RUN", "--yes", "--detach"), ("status",))
    assert not trial.run(Death(moment=Moment(n=2, action=action, after=after), after_s=20.0)), trial.story()
    assert trial.num_launched == 2, trial.story()


@pytest.mark.parametrize(
    "death",
    [
        Death(moment=Moment(n=1, action="RunInstances"), after_s=30.0),
        Death(moment=Moment(n=1, action="RunInstances", after=True), after_s=30.0),
        Death(moment=Moment(n=8), after_s=30.0),
        # The first look at the machine, after the submission's own look at its running ones.
        Death(moment=Moment(n=2, action="DescribeInstances", after=True), after_s=30.0),
        Death(after_s=6.0),
    ],
    ids=["before-launch", "after-launch", "looking-up", "following", "later"],
)
def test_nothing_leaks_from_the_real_command(trial: Trial, death: Death) -> None:
    trial.faults, trial.is_real = Faults(), True
    assert not trial.run(death), trial.story()
    if death.moment is not None:
        # It came that far, and no further.
        assert trial.told[0].endswith(": -9"), trial.story()
        assert trial.num_launched == (death.moment.action is not None), trial.story()


# Around the timer in the account: what it was made for is ended by it though nobody comes, where there is
# none the ledger says so, and none is left once its machines are gone.

_DETACHED = pytest.mark.parametrize("kind", ["detached", "detached-nodes"])


@_DETACHED
@pytest.mark.parametrize("step", range(1, NUM_TIMER_STEPS + 1))
def test_nothing_leaks_from_any_step_of_a_detached_submission(trial: Trial, kind: str, step: int) -> None:
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


@_DETACHED
@pytest.mark.parametrize("fault", [Fault.LOSE_ANSWER, Fault.LOSE_REQUEST, Fault.THROTTLE])
def test_a_timer_of_which_no_answer_comes_is_not_forgotten(trial: Trial, kind: str, fault: Fault) -> None:
    trial.faults, trial.fates, trial.next_typed = Faults(timers=fault), ("hangs",), ()
    assert not trial.run(Death(after_s=10.0)), trial.story()


@_DETACHED
@pytest.mark.parametrize("action", ["CreateSchedule", "DeleteSchedule"])
def test_nothing_leaks_where_timers_are_refused(trial: Trial, kind: str, action: str) -> None:
    trial.faults = Faults(denied=(action,))
    trial.fates, trial.next_typed = ("hangs",), (("status",), ("cancel", "RUN"))
    assert not trial.run(Death(after_s=10.0)), trial.story()


# Before a capacity block begins: what the ledger knows of is started once, with no process of ours, and what
# was given up is not.


@pytest.mark.parametrize("step", range(1, NUM_TIMER_STEPS + 1))
def test_no_block_is_missed_from_any_step_of_the_ledger(block_trial: Trial, step: int) -> None:
    trial = block_trial
    trial.faults, trial.fates = Faults(), ("completes",)
    # A look before it begins makes what the launcher could not.
    trial.next_typed = (("status",), BEGINS, ("status",))
    assert not trial.run(Death(commit=step, after_s=20.0)), trial.story()
    assert trial.num_launched == bool(trial.num_attempts), trial.story()


@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("fault", [None, Fault.LOSE_ANSWER, Fault.LOSE_REQUEST, Fault.THROTTLE])
def test_no_block_is_missed_though_its_launcher_is_killed_at_a_schedule(
    block_trial: Trial, fault: Fault | None, n: int, after: bool
) -> None:
    trial = block_trial
    trial.faults, trial.fates = Faults(timers=fault), ("completes",)
    trial.next_typed = (("status",), BEGINS, ("status",))
    moment = Moment(n=n, action="CreateSchedule", after=after)
    assert not trial.run(Death(moment=moment, after_s=20.0)), trial.story()
    if fault is None:
        assert trial.num_launched == 1, trial.story()


@pytest.mark.parametrize("command", [("cancel", "RUN"), ("reap", "--yes")])
@pytest.mark.parametrize("begins_first", [True, False], ids=["after-its-start", "before"])
def test_what_waits_for_its_block_is_given_up_by_cancel_alone(
    block_trial: Trial, command: tuple[str, ...], begins_first: bool
) -> None:
    trial = block_trial
    trial.faults, trial.fates = Faults(), ("hangs",)
    commands = (BEGINS, command) if begins_first else (command, BEGINS)
    trial.next_typed = (*commands, ("status",))
    assert not trial.run(Death(after_s=20.0)), trial.story()
    assert trial.num_launched == (begins_first or command[0] == "reap"), trial.story()


@pytest.mark.parametrize("view", [View.STALE, View.STRANGE])
def test_what_waits_for_its_block_is_not_given_up_by_who_cannot_see(block_trial: Trial, view: View) -> None:
    trial = block_trial
    trial.faults, trial.fates, trial.view = Faults(), ("hangs",), view
    trial.next_typed = (("status",), ("cancel", "RUN"), BEGINS, ("status",), ("reap", "--yes"))
    assert not trial.run(Death(after_s=20.0)), trial.story()


@pytest.mark.parametrize("action", ["CreateSchedule", "DeleteSchedule"])
def test_nothing_leaks_where_schedules_of_a_start_are_refused(block_trial: Trial, action: str) -> None:
    trial = block_trial
    trial.faults, trial.fates = Faults(denied=(action,)), ("hangs",)
    trial.next_typed = (("status",), ("cancel", "RUN"), BEGINS, ("status",))
    assert not trial.run(Death(after_s=20.0)), trial.story()
