"""User data of several nodes and of capacity blocks: what its functions do. Whole nodes are in tests/node."""

import re
import shlex
import subprocess
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from test_user_data import ARGUMENTS, NODES, PROGRAM, RUN, asked_of_runs, commands

from fastlaunch.backends.ec2.user_data import NodeRun, render_user_data

SCRIPT = render_user_data(NODES[0])


def part(start: str, end: str) -> str:
    """The script from one line that begins so to another."""
    begin = SCRIPT.index(f"\n{start}") + 1
    return SCRIPT[begin : SCRIPT.index(f"\n{end}", begin) + 1]


def bash(program: str, folder: Path) -> str:
    """What the program prints, with its state in `folder`."""
    given = (
        f"set -u -o pipefail\nS={shlex.quote(str(folder))} path=bucket/runs/one OUTPUT=s3://bucket/runs/one\n"
    )
    done = subprocess.run(["bash", "-c", given + program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_what_is_left_out_for_several_nodes_is_comments_and_indentation_alone() -> None:
    alone = replace(NODES[0], num_nodes=1, needs_efa=False)
    kept = [re.sub(r" +# .*", "", line.strip()) for line in commands(render_user_data(alone))]
    lines = SCRIPT.splitlines()
    # What one node does another way: asking to stop, its container's network.
    others = [line for line in kept if line not in lines]
    assert len(others) < 12, others


def test_arguments_arrive_though_they_look_like_comments_or_indentation() -> None:
    odd = NodeRun(
        run_id=RUN.run_id, arguments=("--x", "a\n   # b # c\n  d", *ARGUMENTS), environment={"A": " # "}
    )
    script = render_user_data(replace(NODES[0], runs=(odd,)))
    show = """show() { printf '%s\\0' "${MORE[@]}" "$@"; }"""
    words = ["-e", "A= # ", RUN.run_id, *odd.arguments]
    assert asked_of_runs(script, show).split("\0") == [*words, ""]


def test_the_machines_timer_is_still_the_first_command() -> None:
    assert commands(SCRIPT)[0] == "shutdown -P +120"


def test_the_container_is_on_the_hosts_network_without_privileges() -> None:
    (command,) = re.findall(r"docker run (?:.*\\\n)+.*", SCRIPT)
    assert '"${LINK[@]}" -e FASTLAUNCH_MASTER_PORT=$((29500 + num))' in command
    assert "--ulimit memlock=-1" in command and "--privileged" not in SCRIPT
    assert "LINK=(--network host " in SCRIPT and 'LINK+=(--device "$f")' in SCRIPT
    assert "--network" not in render_user_data(PROGRAM)


@pytest.mark.parametrize(
    ("text", "stop", "is_quick"),
    [
        ("stop", "stop", False),
        ("cancelled by hand", "stop", False),
        ("spot (ip-10-0-0-6)", "peer", False),
        ("watchdog (ip-10-0-0-6)", "peer", False),
        ("block (ip-10-0-0-6)", "peer", False),
        ("failed configuration image pull (ip-10-0-0-6)", "peer", True),
        ("failed 10.0.0.6 does not answer (ip-10-0-0-5)", "peer", True),
    ],
)
def test_what_an_abort_says_tells_how_to_stop(text: str, stop: str, is_quick: bool, tmp_path: Path) -> None:
    """A peer that can no longer train leaves nothing to save together; one that stops in order does."""
    asked = part("list() {", "watch_abort() {") + part("first() {", "addr=")
    given = 'say() { :; }; cloud() { echo "runs/one/abort runs/one/abort-3"; }\n'
    given += f"copy() {{ echo {shlex.quote(text)}; }}\n"
    bash(f"{asked}{given}look", tmp_path)
    assert (tmp_path / "stop").read_text() == f"{stop}\n"
    assert (tmp_path / "quick").exists() == is_quick
    assert (tmp_path / "abort-3").exists()


def test_a_node_does_not_hear_itself(tmp_path: Path) -> None:
    """Its own abort may be in the bucket before its own stop is noted: it looked meanwhile."""
    asked = part("list() {", "watch_abort() {") + part("first() {", "addr=")
    given = 'say() { :; }; cloud() { echo "runs/one/abort"; }\ncopy() { first abort spot; echo spot; }\n'
    bash(f"{asked}{given}look", tmp_path)
    assert not (tmp_path / "stop").exists()


def test_nothing_asked_is_nothing_done(tmp_path: Path) -> None:
    asked = part("list() {", "watch_abort() {") + part("first() {", "addr=")
    bash(f"{asked}cloud() {{ echo None; }}\nlook", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_node_tells_its_peers_before_it_stops_and_only_once(tmp_path: Path) -> None:
    asked = part("first() {", "cloud() {")
    order = (
        'put() { echo "put $2: $(cat "$S/$1"), $(ls "$S" | tr "\\n" " ")"; }\nsay() { :; }\nHOSTNAME=ip-1\n'
    )
    told = bash(f"{asked}{order}ask spot; ask block; fail configuration disk full", tmp_path)
    assert told == "put abort: spot (ip-1), abort \n"
    assert (tmp_path / "stop").read_text() == "spot\n"


def test_a_node_that_was_told_tells_nobody(tmp_path: Path) -> None:
    asked = part("first() {", "cloud() {")
    program = f"{asked}put() {{ echo put; }}\nsay() {{ :; }}\nfirst stop peer; fail configuration disk full"
    assert bash(program, tmp_path) == ""
    assert not (tmp_path / "abort").exists()


@pytest.mark.parametrize("num", [2, 5])
def test_every_node_listens_to_another_one_and_all_are_listened_to(num: int, tmp_path: Path) -> None:
    addresses = [f"10.0.{number // 4}.{5 + 7 * number}" for number in range(num)]
    keys = "\t".join(f"runs/one/ready/0/{one}" for one in addresses)
    several = part("ring() {", "link() {").replace('" = 2 ]', f'" = {num} ]')
    asked = several + f"list() {{ printf '%s\\n' {shlex.quote(keys)}; }}\n"
    after = {}
    for one in addresses:
        bash(f"{asked}addr={one}\nring", tmp_path)
        after[one] = (tmp_path / "peer").read_text().strip()
    # One ring through all of them.
    seen, at = [], addresses[0]
    while at not in seen:
        seen.append(at)
        at = after[at]
    assert sorted(seen) == sorted(addresses)


@pytest.mark.parametrize("keys", ["None", "runs/one/ready/0/10.0.0.5", ""])
def test_a_node_listens_to_none_before_all_have_booted(keys: str, tmp_path: Path) -> None:
    asked = part("ring() {", "link() {") + f"list() {{ echo {shlex.quote(keys)}; }}\n"
    assert bash(f"{asked}addr=10.0.0.5\nring || echo not yet", tmp_path) == "not yet\n"
    assert not (tmp_path / "peer").exists()


def test_a_node_that_waits_for_one_in_vain_is_not_kept_at_the_barrier(tmp_path: Path) -> None:
    given = (
        'put() { echo "put $2"; }\nsay() { :; }\ntry() { echo "try $*"; [ "$3" != ring ]; }\n'
        "list() { echo a; }\naddr=10.0.0.5\nHOSTNAME=ip-1\n"
    )
    asked = part("first() {", "cloud() {") + part("watch_peer() {", "met() {") + part("met() {", "meet() {")
    told = bash(f"{asked}{given}watch_peer && met 1 && echo on", tmp_path).splitlines()
    assert told[0] == "put ready/0/10.0.0.5" and told[1].endswith(" ring") and told[-1] == "on"
    assert (tmp_path / "fail").read_text() == "configuration peers\n"
    assert "put abort" in told


def test_a_machine_answers_with_an_open_port_or_a_closed_one(tmp_path: Path) -> None:
    heard = part("heard() {", "watch_peer() {")
    assert bash(f"{heard}heard 127.0.0.1 && echo yes", tmp_path) == "yes\n"
    silent = "timeout() { return 124; }\n"
    assert bash(f"{heard}{silent}heard 127.0.0.1 || echo no", tmp_path) == "no\n"
    unreachable = 'timeout() { echo "connect: No route to host"; return 1; }\n'
    assert bash(f"{heard}{unreachable}heard 127.0.0.1 || echo no", tmp_path) == "no\n"


def test_the_barrier_counts_all_nodes(tmp_path: Path) -> None:
    met = part("met() {", "meet() {")
    there = 'cloud() { :; }\nlist() { echo "$there"; }\n'
    program = f"{met}{there}for there in None a 'a b' 'a b c'; do met 1 && echo \"$there\"; done; :"
    assert bash(program, tmp_path) == "a b\n"
    (tmp_path / "stop").touch()
    assert bash(program, tmp_path).splitlines() == ["None", "a", "a b", "a b c"]


@pytest.mark.parametrize(
    ("left", "asked_after_s", "timer"),
    [
        # 3 h to go: stopped after 2 h 15 min, which is later than the machine's own limit of 2 h.
        (timedelta(hours=3), 8100, None),
        (timedelta(hours=1, seconds=30), 930, "+30"),
        (timedelta(minutes=45, seconds=2), 2, "+15"),
        (timedelta(minutes=44), None, None),
        (timedelta(hours=-3), None, None),
    ],
)
def test_a_block_stops_training_45_minutes_before_its_end(
    left: timedelta, asked_after_s: int | None, timer: str | None, tmp_path: Path
) -> None:
    script = render_user_data(replace(PROGRAM, block_ends_at="<end>"))
    begin = script.index("left_s=")
    lines = script[begin : script.index("\nfi\n", begin) + 4]
    ends_at = (datetime(2026, 11, 22, 8, tzinfo=UTC) + left).isoformat(timespec="seconds")
    given = (
        'date() { [ "$1" = -ud ] || set -- -ud 2026-11-22T08:00:00Z +%s; command date "$@"; }\n'
        'sleep() { echo "sleep $1"; }; ask() { echo "ask $1"; }; shutdown() { echo "shutdown $2"; }\n'
    )
    told = bash(given + lines.replace("'<end>'", ends_at) + "wait; echo left $left_s", tmp_path).splitlines()
    assert (f"sleep {asked_after_s}" in told) == (asked_after_s is not None)
    if asked_after_s is not None:
        assert told.index("ask block") > told.index(f"sleep {asked_after_s}")
    seconds_left = int(told[-1].split()[1])
    assert seconds_left == left.total_seconds() - 2700
    if seconds_left > 0:
        assert [line for line in told if line.startswith("shutdown")] == (
            [f"shutdown {timer}"] if timer else []
        )
    assert ("ask block" in told) == (seconds_left > 0)
    assert '[ "$left_s" -gt 0 ] || { fail configuration block; return; }' in script


def test_what_has_no_block_knows_no_end() -> None:
    assert "left_s" not in render_user_data(PROGRAM) and "left_s" in SCRIPT
