"""One last word out of several nodes': known answers, and what holds whatever they say."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.backends.node_report import is_sound, merged, time_of, uptime_of

RUN, OTHER = "20261121-090312-k3f9", "20261121-090313-ab2c"


def status(
    outcome: str,
    reason: str | None = None,
    *,
    state: str = "completed",
    code: int | None = 0,
    uptime_s: float = 900.0,
) -> dict[str, Any]:
    """What a node says of one run."""
    entry = {"run_id": RUN, "state": state, "exit_code": code, "started_s": 100.0, "ended_s": uptime_s - 10}
    return {"token": f"{RUN}-a1", "outcome": outcome, "reason": reason, "uptime_s": uptime_s, "runs": [entry]}


COMPLETED = status("completed")
FAILED = status("failed", "run: exit code 1", state="failed", code=1)
SPOT = status("interrupted", "spot", state="interrupted", code=130)
STOPPED = status("interrupted", "stop", state="interrupted", code=130)
WATCHDOG = status("interrupted", "watchdog", state="interrupted", code=130)
#: The run was ended here because it had failed on another node; there is nothing else to tell.
ENDED = status("failed", "the node's program ended unexpectedly", state="interrupted", code=137)
FOLLOWED = status("interrupted", "peer", state="interrupted", code=130)
WAKE = status("failed", "run: exit code 130", state="failed", code=130)
DRIVER = status("configuration", "driver", state="not-started", code=None)
#: A GPU broke the run; the others lost their peer, and those that never met it could not begin.
HARDWARE = status("hardware", "GPU 3: x", state="interrupted", code=1)
PEERS = status("configuration", "peers", state="not-started", code=None)
FABRIC = status("configuration", "fabric", state="failed", code=78)


def told(*statuses: Mapping[str, Any] | None, partial: bool = False) -> tuple[Any, ...]:
    """(outcome, reason, node, the run's state, its exit code) of the nodes together; empty if nothing."""
    known = {node: one for node, one in enumerate(statuses) if one is not None}
    found = merged(known, len(statuses), partial=partial)
    if found is None:
        return ()
    (run,) = found["runs"]
    return found["outcome"], found["reason"], found["node"], run["state"], run["exit_code"]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ((COMPLETED, COMPLETED), ("completed", None, 0, "completed", 0)),
        # Whoever had a reason of its own tells, whatever its rank.
        ((COMPLETED, FAILED), ("failed", "run: exit code 1", 1, "failed", 1)),
        ((FOLLOWED, FOLLOWED, SPOT), ("interrupted", "spot", 2, "interrupted", 130)),
        # A training that loses its peer fails in the wake of that.
        ((FAILED, WATCHDOG), ("interrupted", "watchdog", 1, "interrupted", 130)),
        # One that stops in good order because a peer was asked to is no failure.
        ((WAKE, STOPPED), ("interrupted", "stop", 1, "interrupted", 130)),
        ((ENDED, FAILED), ("failed", "run: exit code 1", 1, "failed", 1)),
        # Asked to stop because a node failed: the failure tells.
        ((STOPPED, FAILED), ("failed", "run: exit code 1", 1, "failed", 1)),
        ((SPOT, DRIVER), ("configuration", "driver", 1, "interrupted", 130)),
        ((FABRIC, FABRIC), ("configuration", "fabric", 0, "failed", 78)),
        ((DRIVER, DRIVER), ("configuration", "driver", 0, "not-started", None)),
        ((COMPLETED, DRIVER), ("configuration", "driver", 1, "lost", 0)),
        ((FAILED, HARDWARE), ("hardware", "GPU 3: x", 1, "interrupted", 1)),
        ((PEERS, HARDWARE), ("hardware", "GPU 3: x", 1, "interrupted", 1)),
        ((None, COMPLETED), ()),
    ],
)
def test_what_the_nodes_say_together(
    nodes: tuple[dict[str, Any] | None, ...], expected: tuple[Any, ...]
) -> None:
    assert told(*nodes) == expected


def test_of_machines_that_are_gone_what_is_known_counts() -> None:
    silent = "node 1 ended without a last word"
    assert told(COMPLETED, None, partial=True) == ("failed", silent, 1, "lost", 0)
    assert told(FOLLOWED, None, partial=True) == ("failed", silent, 1, "interrupted", 130)
    assert told(None, SPOT, partial=True) == ("interrupted", "spot", 1, "interrupted", 130)
    assert told(FAILED, None, partial=True)[:3] == ("failed", "run: exit code 1", 0)
    assert told(None, None, partial=True) == ()
    found = merged({1: SPOT}, 3, partial=True)
    assert found is not None and found["missing"] == [0, 2]


def test_times_are_node_0s() -> None:
    late = status("failed", "why", state="failed", code=1, uptime_s=2000.0)
    found = merged({0: FOLLOWED, 1: late}, 2)
    assert found is not None and found["uptime_s"] == 900.0
    assert found["runs"][0]["ended_s"] == 890.0


def test_every_run_of_every_node_is_there() -> None:
    second = {"run_id": OTHER, "state": "not-started", "exit_code": None}
    more = {**FAILED, "runs": [*FAILED["runs"], second]}
    found = merged({0: FAILED, 1: more}, 2)
    assert found is not None
    assert [(run["run_id"], run["state"]) for run in found["runs"]] == [
        (RUN, "failed"),
        (OTHER, "not-started"),
    ]


def test_a_run_that_failed_before_the_attempt_was_interrupted_has_failed() -> None:
    second = {"run_id": OTHER, "state": "interrupted", "exit_code": 130}
    first = {**SPOT, "runs": [{**SPOT["runs"][0], "exit_code": 137}, second]}
    failed = {**FAILED, "runs": [*FAILED["runs"], {**second, "state": "failed", "exit_code": 1}]}
    found = merged({0: first, 1: failed}, 2)
    assert found is not None and found["reason"] == "spot"
    assert [(run["state"], run["exit_code"]) for run in found["runs"]] == [
        ("failed", 1),
        ("interrupted", 130),
    ]


def test_one_node_is_told_as_it_spoke() -> None:
    assert merged({0: WAKE}, 1) == WAKE
    assert merged({1: WAKE}, 1) is None


@pytest.mark.parametrize("amount", [10**19, -(2**63), True, float("inf"), "1"])
@pytest.mark.parametrize("name", ["uptime_s", "started_s"])
def test_an_amount_that_no_machine_has_is_no_report(name: str, amount: object) -> None:
    assert is_sound(SPOT)
    assert not is_sound({**SPOT, name: amount, "runs": [{**SPOT["runs"][0], name: amount}]})


def test_what_lies_outside_of_time_is_not_known() -> None:
    for text in ("9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+14:00"):
        assert time_of({"billed_until": text}, "billed_until") is None
    assert uptime_of({"uptime_s": -1}) is None and uptime_of({"uptime_s": 2}) == 2


ANY = st.sampled_from(
    [COMPLETED, FAILED, SPOT, STOPPED, WATCHDOG, FOLLOWED, WAKE, ENDED, DRIVER, FABRIC, {"outcome": "failed"}]
)


@given(st.lists(ANY, min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_nothing_is_completed_unless_all_say_so(nodes: list[dict[str, Any]], order: Any) -> None:
    known = dict(enumerate(nodes))
    found = merged(known, len(nodes))
    assert found is not None
    assert (found["outcome"] == "completed") == all(node == COMPLETED for node in nodes)
    for run in found["runs"]:
        assert (run["state"] == "completed") == all(node == COMPLETED for node in nodes)
    # It repeats what the node that it names said.
    assert found["outcome"] == nodes[found["node"]].get("outcome")
    assert found["reason"] == nodes[found["node"]].get("reason")
    # The outcome does not depend on which node has which rank.
    shuffled = list(nodes)
    order.shuffle(shuffled)
    again = merged(dict(enumerate(shuffled)), len(nodes))
    assert again is not None and again["outcome"] == found["outcome"]


@given(st.dictionaries(st.integers(0, 3), ANY, max_size=4))
def test_a_silent_node_is_never_taken_for_a_completed_one(known: dict[int, dict[str, Any]]) -> None:
    found = merged(known, 4, partial=True)
    if len(known) < 4:
        assert merged(known, 4) is None
        assert found is None or found["outcome"] != "completed"
    if found is not None:
        assert found["missing"] == [node for node in range(4) if node not in known]
