"""One trial: a launcher is killed while the service fails and lies; time passes; then nothing may be left.

Everything in it is drawn from the seed, but not how threads and processes take turns: what a seed finds, it
may not find again at once.
"""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from drawn import Death, draw_death, draw_faults
from ec2_builders import IMAGE
from fake_container import Containers
from fake_node import Nodes
from forked_launcher import Command, Order, Zygote
from moto_server import MotoServer, backend
from network import Faults, Network
from sagemaker_builders import training_site

from fastlaunch.backends import RunState

_MACHINES = (
    "p5.48xlarge/us-east-1/us-east-1a",
    "p5.48xlarge/us-east-1/us-east-1b",
    "p4d.24xlarge/us-west-2/us-west-2a",
)
#: What is submitted, by kind. A detached one is left to itself, with a timer in the account.
SUBMISSIONS = {
    "machine": _MACHINES,
    "nodes": ("--nodes=2", *_MACHINES),
    "detached": ("--detach", *_MACHINES),
    "job": ("ml.p5.48xlarge/us-east-1", "ml.p4d.24xlarge/us-west-2"),
}
REGIONS = ("us-east-1", "us-west-2")
#: After that, every machine is over its time, and EC2 has forgotten what was terminated.
LATER_S = 5 * 3600.0
LIVE = ("pending", "running", "stopping", "stopped")
_TAGS = ("fastlaunch:run", "fastlaunch:attempt", "fastlaunch:max-minutes", "fastlaunch:output", "Name")


@dataclass(kw_only=True)
class Trial:
    """The world of one seed, over a server, a network and a zygote that others use after it.

    kind: of SUBMISSIONS. faults, next_typed: instead of those that are drawn; the second are commands that
    follow the launcher.
    is_real: the launcher is `fastlaunch submit` in a process that is started for it, at the pace of the real
    clock, and not a fork.
    """

    seed: int
    kind: str = "machine"
    folder: Path
    server: MotoServer
    network: Network
    zygote: Zygote
    faults: Faults | None = None
    next_typed: tuple[tuple[str, ...], ...] | None = None
    is_real: bool = False
    problems: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    _troubled: Faults = field(default_factory=Faults)
    _launched: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def run(self, death: Death | None = None) -> list[str]:
        """What was left or done twice, in words, after the launcher died as drawn, or as `death` says."""
        rng = random.Random(self.seed)
        self._set_up()
        nodes = Nodes(server=self.server, rng=random.Random(rng.random()))
        containers = Containers(server=self.server, rng=random.Random(rng.random()))
        self.server.when_launched = [self._note_launch, nodes.launch]
        self.server.training_jobs.when_created = [self._note_job, containers.start]
        self._troubled = self.faults or draw_faults(rng)
        self.server.training_jobs.hidden_describes = self._troubled.hidden
        self.network.trouble(self._troubled, random.Random(rng.random()))
        (self._launch_real if self.is_real else self._launch)(death or draw_death(rng, self.kind))
        for argv in self._meddling(rng) if self.next_typed is None else self.next_typed:
            killed_after_s = (
                rng.uniform(0.05, 1.0) if self.next_typed is None and rng.random() < 0.3 else None
            )
            if killed_after_s is None and argv[0] == "start":
                # A machine that hangs is followed for an hour, which even a fast clock makes long.
                killed_after_s = 3.0
            self._command(*argv, killed_after_s=killed_after_s)
        self.network.calm()
        for job in self.server.training_jobs.jobs.values():
            job.hidden = 0
        nodes.freeze()
        containers.freeze()
        self._forget_some(rng)
        self._clean_up(rng)
        self._judge()
        return self.problems

    @property
    def num_launched(self) -> int:
        """Machines and jobs that the service made."""
        return len(self._launched)

    # What happens

    def _set_up(self) -> None:
        self.server.reset()
        settings = {region: self.server.set_up_region(region) for region in REGIONS}
        config = {
            region: {
                "bucket": own.bucket,
                "instance_profile": own.instance_profile,
                "security_groups": list(own.security_groups),
                "subnets": dict(own.subnets),
                "role": self.server.training_jobs.role(),
                "scheduler_role": "arn:aws:iam::123456789012:role/fastlaunch-scheduler",
            }
            for region, own in settings.items()
        }
        # A job that was told to stop is stopped when it is looked at next.
        self.server.training_jobs.stopping_describes = 0
        code = training_site().code
        for own in settings.values() if code else ():
            backend("s3", "aws").put_object(own.bucket, code.key, b"code")
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.yaml").write_text(yaml.safe_dump({"aws": config}))

    def _note_launch(self, region: str, instance_id: str) -> None:
        """Called by the server for every instance that it makes, before anything else happens."""
        self._note(region, instance_id, self._tags(instance_id))

    def _note_job(self, region: str, name: str) -> None:
        """Called by the server for every training job that it makes, before anything else happens."""
        self._note(region, name, self.server.training_jobs.job(name).tags)

    def _note(self, region: str, started: str, tags: dict[str, str]) -> None:
        for before_region, before_id, before in self._launched:
            same_run = before.get("fastlaunch:run") == tags.get("fastlaunch:run")
            if same_run and _token(before) != _token(tags) and self._lives(before_id):
                self.problems.append(
                    f"{started} in {region} was started while {before_id} in {before_region} lives, "
                    "for the same run"
                )
        self._launched.append((region, started, tags))

    def _lives(self, started: str) -> bool:
        """Whether the machine, or job, costs or may come to."""
        if started.startswith("i-"):
            return started in {instance.id for instance in self.server.instances(*LIVE)}
        return self.server.training_jobs.job(started).status == "InProgress"

    def _launch_real(self, death: Death) -> None:
        """`fastlaunch submit` as it is typed, which looks everything up first."""
        self.server.quotas[("us-east-1", "L-417A185B")] = 1000.0
        argv = ["submit", "--instance", "p5.48xlarge", "--recipe", "bf16", "--image", IMAGE, "--yes"]
        order = self._order(*argv, "--max-hours", "1")
        path = os.pathsep.join(part for part in sys.path if part)
        with Path(order.output).open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "fastlaunch", *order.argv],
                env={**order.environment, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        if death.moment is not None:
            self.network.at(death.moment, process.kill)
        try:
            self.told.append(f"{death}: {process.wait(timeout=death.after_s)}")
        except subprocess.TimeoutExpired:
            process.kill()
            self.told.append(f"{death}: {process.wait()}, after its time")
        self.network.at(None)

    def _launch(self, death: Death) -> None:
        order = self._order(
            "start", *SUBMISSIONS[self.kind], commit=death.commit, before_commit=death.before_commit
        )
        self.told.append(f"{death}")
        command = self.zygote.start(order)
        if death.moment is not None:
            self.network.at(death.moment, command.kill)
        self._wait(command, death.after_s)

    def _command(self, *argv: str, ahead_s: float = 0.0, killed_after_s: float | None = None) -> int:
        self.told.append(f"$ fastlaunch {' '.join(argv)}")
        command = self.zygote.start(self._order(*argv, ahead_s=ahead_s))
        return self._wait(command, killed_after_s)

    def _wait(self, command: Command, killed_after_s: float | None) -> int:
        timer = threading.Timer(killed_after_s, command.kill) if killed_after_s is not None else None
        if timer:
            timer.start()
        status = command.wait()
        self.network.at(None)
        if timer:
            timer.cancel()
            timer.join()
        self.told.append(f"[{status}]")
        if status == -signal.SIGALRM:
            self.problems.append("a command hung")
        self._judge_ends()
        return status

    def _order(
        self, *argv: str, commit: int | None = None, before_commit: bool = False, ahead_s: float = 0.0
    ) -> Order:
        environment = {
            "PATH": os.environ["PATH"],
            "FASTLAUNCH_HOME": str(self.folder / "home"),
            "FASTLAUNCH_CONFIG": str(self.folder / "config.yaml"),
            "AWS_ENDPOINT_URL": self.network.url,
            "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }
        return Order(
            argv=argv,
            environment=environment,
            output=str(self.folder / "output.txt"),
            kill_at_commit=commit,
            before_commit=before_commit,
            ahead_s=ahead_s,
        )

    def _meddling(self, rng: random.Random) -> list[tuple[str, ...]]:
        """Commands that somebody types next, while the service still fails."""
        found: list[tuple[str, ...]] = []
        runs = self._rows("SELECT id FROM runs")
        while rng.random() < 0.45:
            run_id = rng.choice(runs)["id"] if runs else "none"
            found.append(
                rng.choice(
                    [
                        ("status",),
                        ("reap", "--yes"),
                        ("cancel", run_id),
                        ("resume", run_id, "--yes"),
                        ("collect",),
                        ("start", *SUBMISSIONS[self.kind]),
                    ]
                )
            )
        return [(*argv,) for argv in found]

    def _forget_some(self, rng: random.Random) -> None:
        for instance in self.server.instances("terminated"):
            if rng.random() < 0.5:
                self.server.forget(instance.id)

    def _clean_up(self, rng: random.Random) -> None:
        """What is typed in the end, hours later, with a service that works."""
        for argv in rng.choice(
            [
                (("status",), ("reap", "--yes"), ("status",)),
                (("reap", "--yes"), ("status",)),
                (("reap", "--yes", "--region", "us-west-2", "--region", "us-east-1"), ("status",)),
            ]
        ):
            code = self._command(*argv, ahead_s=LATER_S)
            if code != 0:
                self.problems.append(f"fastlaunch {' '.join(argv)} ended with {code}")

    # What must hold

    def _judge(self) -> None:
        self._judge_instances()
        self._judge_ledger()

    def _judge_instances(self) -> None:
        for instance in self.server.instances(*LIVE):
            self.problems.append(f"{instance.id} lives: {instance.state}")
        for job in self.server.training_jobs.live():
            self.problems.append(f"{job.name} runs: {job.status}")
        for region in REGIONS:
            for group in backend("scheduler", region).schedule_groups.values():
                self.problems += [f"the schedule {name} is left in {region}" for name in group.schedules]
        for region, started, tags in self._launched:
            # A job's name is its own.
            wanted = [name for name in _TAGS if name != "Name" or started.startswith("i-")]
            if missing := [name for name in wanted if not tags.get(name)]:
                self.problems.append(f"{started} in {region} was started without {', '.join(missing)}")
        tokens, most = Counter(_token(tags) for _, _, tags in self._launched), 1 + (self.kind == "nodes")
        self.problems += [f"{token} was started {n} times" for token, n in tokens.items() if n > most]

    def _judge_ends(self) -> None:
        """At any time: what the ledger calls ended costs nothing more."""
        live = {started for _, started, _ in self._launched if self._lives(started)}
        rows = self._rows("SELECT token, reason FROM attempts WHERE ended_at IS NOT NULL")
        ended = {row["token"]: row["reason"] for row in rows}
        for region, instance_id, tags in self._launched:
            if instance_id in live and _token(tags) in ended:
                why = ended[_token(tags)]
                self.problems.append(f"{_token(tags)} has ended ({why}), and {instance_id} in {region} lives")

    def _judge_ledger(self) -> None:
        attempts = self._rows("SELECT token, state, ended_at, reason FROM attempts")
        known = {row["token"] for row in attempts}
        for region, instance_id, tags in self._launched:
            if _token(tags) not in known:
                self.problems.append(f"{instance_id} in {region} is of no attempt in the ledger")
        for row in attempts:
            if row["ended_at"] is None and not row["reason"]:
                self.problems.append(f"attempt {row['token']} is {row['state']}, nobody knows why")
        for row in self._rows("SELECT id, state, reason FROM runs"):
            is_final = RunState(row["state"]).is_final
            if row["state"] != "completed" and not row["reason"]:
                self.problems.append(f"run {row['id']} is {row['state']}, nobody knows why")
            elif not is_final:
                self.problems.append(f"run {row['id']} is still {row['state']}: {row['reason']}")

    def _rows(self, query: str) -> list[Any]:
        path = self.folder / "home" / "ledger.sqlite"
        if not path.exists():
            return []
        database = sqlite3.connect(path)
        try:
            database.row_factory = sqlite3.Row
            return database.execute(query).fetchall()
        except sqlite3.OperationalError as error:
            # It died before the tables were made.
            if "no such table" in str(error):
                return []
            raise
        finally:
            database.close()

    def _tags(self, instance_id: str) -> dict[str, str]:
        return {tag["key"]: tag["value"] for tag in self.server.instance(instance_id).get_tags()}

    def story(self) -> str:
        """All that happened, for a trial that failed."""
        lines = [
            f"{self.kind}, seed {self.seed}; alone: pytest tests/chaos -m slow -k 'seed-{self.seed}-'",
            *self.problems,
            "",
            f"faults: {self._troubled}",
            *self.told,
            "",
            *(
                f"launched {instance_id} in {region}: {json.dumps(tags)}"
                for region, instance_id, tags in self._launched
            ),
            "",
        ]
        output = self.folder / "output.txt"
        return "\n".join([*lines, output.read_text(errors="replace") if output.exists() else ""])


def _token(tags: dict[str, str]) -> str:
    return f"{tags.get('fastlaunch:run')}-a{tags.get('fastlaunch:attempt')}"
