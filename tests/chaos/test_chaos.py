"""The launcher killed at every step and at random moments, over a service that fails, throttles and lies.

After `fastlaunch reap`, hours later: no live instance, no running job, no schedule left, every row of the
ledger final and explained, nothing started twice for a token, no second machine or job for a run while its
first one lives, every tag in its place.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from drawn import Death, launch_of
from forked_launcher import Zygote
from moto_server import MotoServer
from network import Faults, Moment, Network
from trial import SUBMISSIONS, Trial

NUM_TRIALS = 200
#: Commits of a launcher that is not disturbed: the ledger's tables and everything up to the last state.
NUM_STEPS = 14

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as started:
        yield started


@pytest.fixture(scope="module")
def network(shared_aws_server: MotoServer) -> Iterator[Network]:
    started = Network(shared_aws_server.url)
    yield started
    started.close()


@pytest.fixture
def trial(
    tmp_path: Path,
    shared_aws_server: MotoServer,
    network: Network,
    zygote: Zygote,
    request: pytest.FixtureRequest,
) -> Trial:
    given = request.node.callspec.params
    seed = given.get("seed", 0)
    return Trial(
        seed=seed,
        kind=given.get("kind", list(SUBMISSIONS)[seed % len(SUBMISSIONS)]),
        folder=tmp_path,
        server=shared_aws_server,
        network=network,
        zygote=zygote,
    )


@pytest.mark.parametrize("seed", range(NUM_TRIALS), ids=lambda seed: f"seed-{seed}-")
def test_nothing_leaks_whatever_goes_wrong(trial: Trial, seed: int) -> None:
    assert not trial.run(), trial.story()


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("step", range(1, NUM_STEPS + 1))
def test_nothing_leaks_from_any_step_of_the_ledger(trial: Trial, step: int, before: bool) -> None:
    trial.faults = Faults()
    assert not trial.run(Death(commit=step, before_commit=before)), trial.story()


@pytest.mark.parametrize("kind", ["nodes", "detached", "job"])
@pytest.mark.parametrize("step", range(1, NUM_STEPS + 1))
def test_nothing_leaks_from_any_step_of_the_other_kinds(trial: Trial, step: int, kind: str) -> None:
    trial.faults = Faults()
    assert not trial.run(Death(commit=step)), trial.story()


@pytest.mark.parametrize("kind", SUBMISSIONS)
@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("hidden", [0, 30])
def test_nothing_leaks_from_the_launch_itself(trial: Trial, hidden: int, after: bool, kind: str) -> None:
    trial.faults = Faults(hidden=hidden)
    # Typed at once, while EC2 may not show the machine yet: the ledger must not call it ended.
    trial.next_typed = (("status",), ("reap", "--yes"), ("collect",), ("status",))
    launch = Moment(n=1, action=launch_of(kind), after=after)
    assert not trial.run(Death(moment=launch)), trial.story()


@pytest.mark.parametrize("kind", ["machine", "nodes", "job"])
@pytest.mark.parametrize("expires_at", [None, 3])
@pytest.mark.parametrize("hidden", [0, 3, 30])
def test_no_second_machine_is_started_where_no_answer_comes(
    trial: Trial, hidden: int, expires_at: int | None, kind: str
) -> None:
    trial.faults = Faults(lost_launches=1.0, hidden=hidden, expires_at=expires_at)
    assert not trial.run(Death(after_s=5.0)), trial.story()


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
