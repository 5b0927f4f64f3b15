"""User data: what the bootstrap holds. What it does is tested in tests/node."""

import hashlib
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from fastlaunch.backends.ec2.plan import Bootstrap, render_user_data

RUN_ID = "20261121-090312-k3f9"
OUTPUT = f"s3://acme-training/fastlaunch/runs/{RUN_ID}/attempt-12"
BOOTSTRAP = Bootstrap(
    token=f"{RUN_ID}-a12",
    region="us-gov-west-1",
    max_minutes=100,
    output=OUTPUT,
    agent=f"s3://acme-training/fastlaunch/code/agent-{'a' * 64}.pyz",
    agent_sha256="a" * 64,
    run_list=f"{OUTPUT}/runs-{'b' * 64}.json",
    run_list_sha256="b" * 64,
)
SCRIPT = render_user_data(BOOTSTRAP)


def commands() -> list[str]:
    """The lines of the script that are not comments."""
    return [line for line in SCRIPT.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def test_the_machines_timer_is_the_first_command() -> None:
    assert commands()[0] == "shutdown -P +100"


def test_it_is_small_and_ascii() -> None:
    assert len(SCRIPT.encode()) < 6000 and SCRIPT.isascii()
    assert SCRIPT.count("\n") <= 100


def test_shellcheck_has_nothing_against_it(tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    (tmp_path / "user-data.sh").write_text(SCRIPT)
    done = subprocess.run(
        ["shellcheck", "user-data.sh"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_a_machine_that_reboots_turns_off() -> None:
    """Neither timer nor script comes back after a reboot, and /run is empty then."""
    unit = SCRIPT[SCRIPT.index("cat >/etc/systemd/system/fastlaunch-off.service") :]
    lines = unit[: unit.index("\nEND\n")].splitlines()[1:]
    assert {"ConditionPathExists=!/run/fastlaunch", "ExecStart=/usr/bin/systemctl poweroff"} <= set(lines)
    assert "WantedBy=multi-user.target" in lines
    assert "systemctl enable fastlaunch-off.service" in commands()
    assert any(line.startswith("S=/run/fastlaunch ") for line in commands())


def test_a_console_that_is_gone_does_not_end_it(tmp_path: Path) -> None:
    start = SCRIPT.index("trap '' PIPE")
    lines = SCRIPT[start : SCRIPT.index("\ntrap off EXIT", start)]
    goes_on = f"S={shlex.quote(str(tmp_path))}\n{lines}\nfor n in 1 2 3; do echo $n; sleep 0.1; done\n"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        ["bash", "-c", f'{goes_on}touch "$S/end"'], stdout=writer, stderr=writer, check=False
    )
    os.close(writer)
    assert done.returncode == 0 and (tmp_path / "end").exists()
    assert (tmp_path / "log.txt").read_text().splitlines()[0] == "1"


def part(start: str, end: str) -> str:
    """The script from one line that begins so to the end of another."""
    begin = SCRIPT.index(f"\n{start}") + 1
    return SCRIPT[begin : SCRIPT.index(f"\n{end}", begin) + len(end) + 1]


@pytest.mark.parametrize(
    ("given", "ended_after"), [("", 60), ("booted", 1_212), ("booted, and the agent gone", 0)]
)
def test_the_watchdog_ends_what_does_not_boot_is_gone_or_takes_too_long(
    given: str, ended_after: int, tmp_path: Path
) -> None:
    if given:
        (tmp_path / "booted").touch()
    # The first process, which the watchdog looks after, has ended before it looks.
    gone = 'sleep() { :; }; while [ -e "/proc/$$/exe" ]; do :; done' if "gone" in given else "sleep() { :; }"
    watchdog = part("( # the watchdog", ") &").replace("( # the watchdog", f"(\n{gone}")
    wait = "" if "gone" in given else "wait"
    program = f'S={shlex.quote(str(tmp_path))}\noff() {{ echo "$n"; exit; }}\n{watchdog}\n{wait}'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert (done.stdout, done.stderr) == (f"{ended_after}\n", "")


@pytest.mark.parametrize(("sha256", "expected"), [(hashlib.sha256(b"agent").hexdigest(), 0), ("a" * 64, 1)])
def test_what_is_not_what_was_asked_for_is_not_taken(sha256: str, expected: int, tmp_path: Path) -> None:
    copy = 'copy() { printf agent >"$2"; }'
    program = (
        f"set -o pipefail\nS={shlex.quote(str(tmp_path))}\n{copy}\n{part('fetch() {', '}')}\nfetch s3://b/k "
    )
    done = subprocess.run(["bash", "-c", f"{program}{sha256} agent.pyz"], capture_output=True, check=False)
    assert done.returncode == expected
