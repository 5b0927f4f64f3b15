"""User data: what the script holds, for every kind of machine. What it does is tested in tests/node."""

import bisect
import itertools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastlaunch.backends.ec2.user_data import (
    MAX_USER_DATA_BYTES,
    NodeProgram,
    NodeRun,
    render_user_data,
    stop_lead_s,
)
from fastlaunch.core.errors import UserError
from fastlaunch_train.recipes.recipes import RECIPES

ARGUMENTS = ("--workload", "vit-huge", "--recipe", "bf16", "--batch-size", "64", "--steps", "400")
RUN = NodeRun(
    run_id="20261121-090312-k3f9",
    arguments=ARGUMENTS,
    environment={"FASTLAUNCH_RUN_ID": "20261121-090312-k3f9"},
)
PROGRAM = NodeProgram(
    token="20261121-090312-k3f9-a1",
    attempt=1,
    region="us-west-2",
    output="s3://acme-training/fastlaunch/runs/20261121-090312-k3f9/attempt-1",
    runs_uri="s3://acme-training/fastlaunch/runs",
    code_uri=f"s3://acme-training/fastlaunch/code/{'a' * 64}.tar.gz",
    code_sha256="a" * 64,
    image=f"763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch@sha256:{'b' * 64}",
    image_region="us-west-2",
    max_minutes=120,
    num_gpus=8,
    has_instance_store=True,
    has_nvswitch=True,
    is_spot=True,
    runs=(RUN,),
    environment={"FASTLAUNCH_INSTANCE": "p5.48xlarge", "FASTLAUNCH_ATTEMPT": "1"},
)
MACHINES = [
    replace(
        PROGRAM,
        attempt=attempt,
        num_gpus=num_gpus,
        has_nvswitch=num_gpus > 1,
        has_instance_store=has_instance_store,
        is_spot=is_spot,
        code_uri=code and PROGRAM.code_uri,
        code_sha256=code and PROGRAM.code_sha256,
        image=image,
    )
    for attempt, num_gpus, has_instance_store, is_spot, (code, image) in itertools.product(
        (1, 2),
        (0, 8),
        (False, True),
        (False, True),
        (("yes", PROGRAM.image), (None, f"127.0.0.1:5000/own@sha256:{'c' * 64}")),
    )
]


NODES = [
    replace(PROGRAM, num_nodes=2, needs_efa=True, block_ends_at="2026-11-22T11:30:00+00:00", is_spot=False),
    replace(PROGRAM, num_nodes=4, attempt=2, num_gpus=0, has_nvswitch=False),
]


def commands(script: str) -> list[str]:
    """The lines of `script` that are not comments."""
    return [line for line in script.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def asked_of_runs(script: str, show: str) -> str:
    """What the shell function `show` prints when the script calls it for every run."""
    # What the runs share stands before them.
    first = re.search(r"^(A=|Z=|job1\(\) )", script, re.MULTILINE)
    assert first is not None
    jobs = script[first.start() : script.index("work() {")]
    done = subprocess.run(
        ["bash", "-c", f"set -u\nMORE=()\n{show}\n{jobs}\neach show"], capture_output=True, check=True
    )
    assert done.stderr == b""
    return done.stdout.decode()


def test_watchdog_is_the_first_command() -> None:
    assert commands(render_user_data(PROGRAM))[0] == "shutdown -P +120"


@pytest.mark.parametrize(
    ("max_minutes", "lead_s"), [(1, 15), (8, 120), (23, 345), (24, 360), (120, 360), (10_000, 360)]
)
def test_training_is_stopped_six_minutes_before_the_end_or_a_quarter_of_the_time(
    max_minutes: int, lead_s: int
) -> None:
    assert stop_lead_s(max_minutes) == lead_s
    script = render_user_data(replace(PROGRAM, max_minutes=max_minutes))
    assert f"  sleep {max_minutes * 60 - lead_s}\n  ask watchdog\n" in script


@pytest.mark.parametrize(
    "programs",
    [
        (MACHINES[-1], NODES[0]),
        pytest.param((*MACHINES[:-1], *NODES[1:]), marks=pytest.mark.slow),
    ],
)
def test_shellcheck_has_nothing_against_the_script(programs: Sequence[NodeProgram], tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    names = []
    for number, program in enumerate(programs):
        path = tmp_path / f"{number}.sh"
        path.write_text(render_user_data(program))
        names.append(str(path))
    assert len({Path(name).read_text() for name in names}) == len(programs)
    done = subprocess.run(["shellcheck", *names], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_only_one_finding_of_shellcheck_is_switched_off_and_the_script_says_why() -> None:
    switched_off = [line for line in render_user_data(PROGRAM).splitlines() if "shellcheck" in line]
    assert switched_off == [
        "# shellcheck disable=SC2317,SC2329 # functions are called by name: by try, each and trap"
    ]


def test_script_is_the_same_twice_and_ascii() -> None:
    assert render_user_data(PROGRAM) == render_user_data(PROGRAM)
    assert render_user_data(PROGRAM).isascii()


def test_aws_is_called_in_one_place_with_its_region() -> None:
    called = [line for line in commands(render_user_data(PROGRAM)) if re.search(r"(^|[ (])aws ", line)]
    assert len(called) == 1
    assert 'aws --region "${region:-$REGION}"' in called[0]


def many_runs(number: int) -> tuple[NodeRun, ...]:
    """So many runs, of every recipe in turn."""
    more = ("--seed", "0", "--data", "synthetic", "--checkpoint-every", "1000")
    names = sorted(RECIPES)
    return tuple(
        NodeRun(
            run_id=f"20261121-0903{one % 60:02d}-{one:04d}",
            arguments=(*ARGUMENTS[:3], names[one % len(names)], *ARGUMENTS[4:], *more),
            environment={},
        )
        for one in range(number)
    )


def test_a_hundred_runs_of_every_recipe_fit_and_fifty_for_several_nodes() -> None:
    environment = {
        "FASTLAUNCH_ATTEMPT": "12",
        "FASTLAUNCH_INSTANCE": "p6-b200.48xlarge",
        "FASTLAUNCH_IMAGE_DIGEST": f"sha256:{'b' * 64}",
        "FASTLAUNCH_NPROC": "8",
        "FASTLAUNCH_STOP_GRACE_S": "90",
        "FASTLAUNCH_COMMIT": "0" * 40,
    }
    for program in (*MACHINES, *NODES):
        runs = many_runs(100 if program.num_nodes == 1 else 50)
        script = render_user_data(replace(program, runs=runs, environment=environment))
        assert len(script.encode()) < MAX_USER_DATA_BYTES
        assert asked_of_runs(script, 'show() { echo "$1"; }').split() == [run.run_id for run in runs]


def test_too_many_runs_are_refused_with_what_to_do() -> None:
    runs = tuple(replace(RUN, run_id=f"20261121-090312-{number:04d}") for number in range(1000))
    with pytest.raises(UserError, match=r"1000 runs has [0-9,]+ bytes, and EC2 takes 16,384") as raised:
        render_user_data(replace(PROGRAM, runs=runs))
    assert raised.value.hint == "submit fewer recipes or repeats at a time"


def test_runs_that_another_machine_could_not_go_on_with_are_refused_at_once() -> None:
    """Its program is larger: it fetches checkpoints. What fits once must fit again."""
    runs = tuple(replace(RUN, run_id=f"20261121-090312-{number:04d}") for number in range(1000))

    def is_refused(number: int) -> bool:
        try:
            render_user_data(replace(PROGRAM, runs=runs[:number]))
        except UserError as error:
            assert "EC2 takes 16,384" in error.message
            return True
        return False

    most = bisect.bisect_left(range(len(runs) + 1), True, lo=300, key=is_refused) - 1
    assert 300 <= most < len(runs)
    first = render_user_data(replace(PROGRAM, runs=runs[:most]))
    again = render_user_data(replace(PROGRAM, runs=runs[:most], attempt=2))
    assert len(first.encode()) < len(again.encode()) <= MAX_USER_DATA_BYTES


@pytest.mark.parametrize("ids", [("a",), ("<run-id>", "<run-id-2>"), ("b1", "b1"), ("x'y", "x'z")])
def test_ids_arrive_whole_whatever_they_share(ids: tuple[str, ...]) -> None:
    script = render_user_data(replace(PROGRAM, runs=tuple(replace(RUN, run_id=one) for one in ids)))
    assert asked_of_runs(script, 'show() { echo "$1"; }').split() == list(ids)


WORDS = st.text(st.characters(min_codepoint=1, exclude_categories=("Cs",)), max_size=20)


@settings(max_examples=25)
@given(
    arguments=st.lists(WORDS, max_size=4),
    environment=st.dictionaries(st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), WORDS, max_size=3),
)
def test_arguments_and_environment_reach_the_container_as_they_are(
    arguments: list[str], environment: dict[str, str]
) -> None:
    run = NodeRun(run_id="20261121-090312-k3f9", arguments=tuple(arguments), environment=environment)
    script = render_user_data(replace(PROGRAM, runs=(run, RUN, run)))
    # No word can hold the null byte.
    show = """show() { printf '%s\\0' "$((${#MORE[@]} + 1 + $#))" "${MORE[@]}" -- "$@"; }"""
    options = [word for item in environment.items() for word in ("-e", "=".join(item))]
    asked = [*options, "--", run.run_id, *arguments]
    calls = [asked, ["--", RUN.run_id, *ARGUMENTS], asked]
    words = [word for call in calls for word in (str(len(call)), *call)]
    assert asked_of_runs(script, show).split("\0") == [*words, ""]


@settings(max_examples=25)
@given(
    first=st.lists(WORDS, max_size=3),
    owns=st.lists(st.lists(WORDS, max_size=2), min_size=2, max_size=3, unique_by=tuple),
    last=st.lists(WORDS, max_size=3),
)
def test_what_runs_share_is_written_once_and_reaches_each(
    first: list[str], owns: list[list[str]], last: list[str]
) -> None:
    runs = tuple(replace(RUN, arguments=(*first, *own, *last), environment={}) for own in owns)
    script = render_user_data(replace(PROGRAM, runs=runs))
    show = """show() { printf '%s\\0' $# "${@:2}"; }"""
    words = [word for run in runs for word in (str(1 + len(run.arguments)), *run.arguments)]
    assert asked_of_runs(script, show).split("\0") == [*words, ""]


def test_arguments_of_several_recipes_differ_in_little() -> None:
    script = render_user_data(replace(PROGRAM, runs=many_runs(3)))
    assert script.count("--workload") == script.count("--checkpoint-every") == 1
    assert "\nA=(--workload vit-huge --recipe)\nZ=(--batch-size 64 " in script
    assert f'\njob2() {{ "$@" "${{A[@]}}" {sorted(RECIPES)[1]} "${{Z[@]}}"; }}\n' in script


def test_a_machine_that_reboots_turns_off() -> None:
    """Neither timer nor script comes back after a reboot, and /run is empty then."""
    script = render_user_data(PROGRAM)
    unit = script[script.index("cat >/etc/systemd/system/fastlaunch-off.service") :]
    lines = unit[: unit.index("\nEND\n")].splitlines()[1:]
    assert {"ConditionPathExists=!/run/fastlaunch", "ExecStart=/usr/bin/systemctl poweroff"} <= set(lines)
    assert "WantedBy=multi-user.target" in lines
    assert "systemctl enable fastlaunch-off.service" in commands(script)
    assert "S=/run/fastlaunch" in script


def test_many_segments_are_no_fewer_than_some(tmp_path: Path) -> None:
    """`find | grep -q` would call thousands none: grep ends at the first, find is killed by that."""
    script = render_user_data(PROGRAM)
    (staged,) = (line for line in commands(script) if line.startswith("staged() {"))
    stage = tmp_path / "stage" / "node-0" / "20261121-090312-k3f9"
    stage.mkdir(parents=True)
    ask = f"set -u -o pipefail\nS={shlex.quote(str(tmp_path))}\n{staged}\nstaged && echo some || echo none"

    def told() -> str:
        return subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout

    assert told() == "none\n"
    for number in range(3000):
        (stage / f"rank-00000-attempt-1.jsonl.{number:012d}").touch()
    assert told() == "some\n"


@pytest.mark.parametrize("grows", [False, True])
def test_the_last_sending_ends_though_a_container_that_cannot_be_stopped_goes_on(
    grows: bool, tmp_path: Path
) -> None:
    script = render_user_data(PROGRAM)
    start = script.index("segments() {")
    functions = script[start : script.index("upload() {", start)]
    record, bucket = tmp_path / "W/out/one/rank-00000-attempt-1.jsonl", tmp_path / "bucket"
    for folder in ("S/stage", "S/offset", "W/out/one", "bucket"):
        (tmp_path / folder).mkdir(parents=True)
    record.write_text("0\n" * 1000)
    (tmp_path / "S/log.txt").write_text("log\n")
    # `copy --recursive FROM TO`, meanwhile the next lines are written.
    again = f"echo more >>{shlex.quote(str(record))}" if grows else ":"
    copy = f'copy() {{ cp -r "$2/." "$3" && {again}; }}'
    places = f"cd {shlex.quote(str(tmp_path))} && S=$PWD/S W=$PWD/W OUTPUT=$PWD/bucket rank=0"
    program = f"set -u -o pipefail\n{places}\n{copy}\n{functions}\nsend_all"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    arrived = b"".join(path.read_bytes() for path in sorted(bucket.glob("node-0/one/*")))
    assert record.read_bytes().startswith(arrived) and len(arrived) >= 2000
    assert grows or arrived == record.read_bytes()


def test_a_console_that_is_gone_does_not_end_the_script(tmp_path: Path) -> None:
    script = render_user_data(PROGRAM)
    start = script.index("trap '' PIPE")
    lines = script[start : script.index("\ntrap 'finish' EXIT", start)]
    goes_on = f"S={shlex.quote(str(tmp_path))}\n{lines}\nfor n in 1 2 3; do echo $n; sleep 0.1; done\n"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        ["bash", "-c", f'{goes_on}touch "$S/end"'], stdout=writer, stderr=writer, check=False
    )
    os.close(writer)
    assert done.returncode == 0 and (tmp_path / "end").exists()
    assert (tmp_path / "log.txt").read_text().splitlines()[0] == "1"


def test_nothing_that_starts_a_daemon_or_stops_an_upgrade_is_waited_for_without_end() -> None:
    script = render_user_data(PROGRAM)
    assert "timeout --foreground 300 systemctl start containerd.service docker.service" in script
    assert "timeout --foreground 60 docker login" in script
    # Ubuntu gives an upgrade that is under way half an hour to end.
    (stopped,) = (line for line in commands(script) if "unattended-upgrades" in line)
    assert stopped.startswith("systemctl stop --no-block ")


def test_the_registry_is_logged_in_to_only_if_it_is_ecr() -> None:
    assert "get-login-password" in render_user_data(PROGRAM)
    own = replace(PROGRAM, image=f"127.0.0.1:5000/own@sha256:{'c' * 64}")
    assert "get-login-password" not in render_user_data(own)
    other = replace(PROGRAM, image_region="eu-west-1")
    assert "region=eu-west-1 cloud ecr get-login-password" in render_user_data(other)


def test_container_has_the_gpus_and_no_privileges() -> None:
    script = render_user_data(PROGRAM)
    (command,) = re.findall(r"docker run (?:.*\\\n)+.*", script)
    for option in ("--gpus all", "--ipc host", "--ulimit memlock=-1", "--ulimit stack=67108864"):
        assert option in command
    assert "--stop-timeout 100 -w /fastlaunch/user" in command
    assert ':/fastlaunch:ro"' in command
    assert "--privileged" not in script
    assert "--resume" not in command
    assert "--resume" in render_user_data(replace(PROGRAM, attempt=2))
    assert "nvidia-smi" not in render_user_data(replace(PROGRAM, num_gpus=0))
    assert "--gpus" not in render_user_data(replace(PROGRAM, num_gpus=0))


def test_what_a_machine_has_not_is_not_waited_for() -> None:
    script = render_user_data(replace(PROGRAM, has_nvswitch=False, is_spot=False, has_instance_store=False))
    for word in ("fabricmanager", "spot/instance-action", "/opt/dlami/nvme"):
        assert word in render_user_data(PROGRAM)
        assert word not in script
