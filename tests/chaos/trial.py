"""One trial: a launcher is killed while the service fails and lies; time passes; then nothing may be left.

Everything in it is drawn from the seed, but not how threads and processes take turns: what a seed finds, it
may not find again at once.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import yaml
from drawn import Death, View, draw_death, draw_faults, draw_view
from ec2_builders import IMAGE
from fake_machines import jobs, nodes
from foreign import Foreign
from forked_launcher import Command, Order, Zygote
from lives import Output
from moto_schedules import Scheduler
from moto_server import MotoServer
from network import STRANGER_KEY, Faults, Network
from submissions import REGIONS, SUBMISSIONS, begins_s, furnish, num_nodes_of, saves
from verdict import Started, Verdict

#: After that, every machine is over its time, and EC2 has forgotten what was terminated.
LATER_S = 5 * 3600.0
#: Between two looks that both count, where AWS shows nothing.
_APART_S = 360.0
#: Commands that only look at AWS, or end what they see.
_LOOKS = ("status", "watch", "reap", "cancel")
#: Stands among commands for the time at which a block begins: the scheduler does what is due, machines live.
BEGINS = ("(the block begins)",)
_LIFE_S = 3.0
#: So often, hours apart, somebody comes back to runs that go on when they are looked at.
_NUM_RETURNS = 6


@dataclass(kw_only=True)
class Trial:
    """The world of one seed, over a server, a network and a zygote that others use after it.

    kind: of SUBMISSIONS. faults, next_typed: instead of those that are drawn; the second are commands that
    follow the launcher, `RUN` for the first run's id. next_death: of the first of them, which num_at_once
    terminals type at the same time.
    fates: of what is started, see `Lives`; its jobs then write nothing but what nodes do.
    is_left: before anyone types `reap`, the scheduler carries out what is due.
    view: of `next_typed`, each twenty minutes after the one before.
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
    next_death: Death | None = None
    num_at_once: int = 1
    is_real: bool = False
    is_left: bool | None = None
    fates: tuple[str, ...] = ()
    view: View | None = None
    problems: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    _troubled: Faults = field(default_factory=Faults)
    _ahead_s: float = 0.0
    #: How long after the submission its block has begun; 0 before.
    _begun_s: float = 0.0
    _started: list[Started] = field(default_factory=list)
    _foreign: Foreign = field(init=False)

    def __post_init__(self) -> None:
        assert self.kind in SUBMISSIONS, self.kind

    def run(self, death: Death | None = None) -> list[str]:
        """What was left or done twice, in words, after the launcher died as drawn, or as `death` says."""
        rng = random.Random(self.seed)
        self._set_up()
        machines = nodes(
            self.server,
            random.Random(rng.random()),
            self.fates,
            saves=saves(self.kind),
            report=self.problems.append,
        )
        training_jobs = jobs(self.server, random.Random(rng.random()), self.fates)
        forgeries = self._foreign.forgeries(
            random.Random(rng.random()), self._tags_of, is_honest=bool(self.fates)
        )
        self.server.when_launched = [
            *(self._note_launch, self._foreign.copy, machines.start, forgeries.start)
        ]
        self.server.training_jobs.when_created = [self._note_job, training_jobs.start, forgeries.start]
        self._troubled = self.faults or draw_faults(rng, self.kind)
        self.server.training_jobs.hidden_describes = self._troubled.hidden
        self.server.queues.hidden_looks = self._troubled.hidden
        self.network.trouble(self._troubled, random.Random(rng.random()))
        (self._launch_real if self.is_real else self._launch)(death or draw_death(rng, self.kind))
        if "detached" in self.kind:
            self.problems += self._verdict.unexplained(self._started)
        self._meddle(rng)
        self.network.calm()
        for job in (*self.server.training_jobs.jobs.values(), *self.server.queues.service_jobs.values()):
            job.hidden = 0
        machines.freeze()
        training_jobs.freeze()
        forgeries.freeze()
        is_left = rng.random() < 0.5 if self.is_left is None else self.is_left
        if is_left:
            self._leave_alone()
        self._forget_some(rng)
        self._clean_up(rng)
        self.problems += self._verdict.in_the_end(self._started)
        self.problems += self._foreign.problems(self.folder / "home")
        return self.problems

    @property
    def num_launched(self) -> int:
        """Machines and jobs that the service made."""
        return len(self._started)

    @property
    def num_attempts(self) -> int:
        """What the ledger knows of."""
        return len(self._verdict.rows("SELECT id FROM attempts"))

    @property
    def states(self) -> list[str]:
        """What the ledger says of the runs, oldest first."""
        return [row["state"] for row in self._verdict.rows("SELECT state FROM runs ORDER BY rowid")]

    @property
    def _scheduler(self) -> Scheduler:
        return Scheduler(server=self.server, regions=REGIONS)

    @property
    def _verdict(self) -> Verdict:
        return Verdict(
            server=self.server,
            scheduler=self._scheduler,
            ledger=self.folder / "home" / "ledger.sqlite",
            num_nodes=num_nodes_of(self.kind),
            is_spot=saves(self.kind),
            foreign=self._foreign,
            # All commands may come so late that EC2 would show long since what is hidden.
            was_stale=self.network.num_stale > 0 or (saves(self.kind) and self._troubled.hidden > 0),
        )

    # What happens

    def _set_up(self) -> None:
        config = furnish(self.server)
        self._foreign = Foreign(server=self.server)
        self._foreign.settle()
        # A job that was told to stop is stopped when it is looked at next.
        self.server.training_jobs.stopping_describes = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.yaml").write_text(yaml.safe_dump({"aws": config}))

    def _note_launch(self, region: str, instance_id: str) -> None:
        """Called by the server for every instance that it makes, before anything else happens."""
        # By the clock of the command that launched it.
        launched_at = datetime.now(UTC) + timedelta(seconds=self._ahead_s)
        self.server.set_instance(instance_id, launch_time=launched_at)
        self._note(Started(id=instance_id, region=region, tags=self._tags_of(instance_id)))

    def _note_job(self, region: str, name: str) -> None:
        """Called by the server for every training job that it makes, before anything else happens."""
        self._note(Started(id=name, region=region, tags=self._tags_of(name)))

    def _tags_of(self, name: str) -> dict[str, str]:
        if not name.startswith("i-"):
            return self.server.training_jobs.job(name).tags
        return {tag["key"]: tag["value"] for tag in self.server.instance(name).get_tags()}

    def _note(self, started: Started) -> None:
        runs = self._runs_of(started)
        for before in self._started:
            follows = before.token != started.token and runs & self._runs_of(before)
            if follows and self._verdict.lives(before) and not self._verdict.seems_gone(before):
                self.problems.append(
                    f"{started.id} in {started.region} was started while {before.id} in {before.region} "
                    "lives, for the same run"
                )
        self._started.append(started)

    def _runs_of(self, started: Started) -> set[str]:
        return set(Output(tags=started.tags).run_ids())

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

    def _command(
        self, *argv: str, ahead_s: float = 0.0, death: Death | None = None, view: View = View.TRUE
    ) -> int:
        self.told.append(f"$ fastlaunch {' '.join(argv)} ({view} view, {ahead_s:.0f} s later, {death})")
        self._ahead_s, self.network.is_stale = ahead_s, view is View.STALE
        commit, before = (death.commit, death.before_commit) if death else (None, False)
        order = self._order(*argv, commit=commit, before_commit=before, ahead_s=ahead_s, view=view)
        others = [self.zygote.start(order) for _ in range(self.num_at_once - 1)]
        command, self.num_at_once = self.zygote.start(order), 1
        if death and death.moment is not None:
            self.network.at(death.moment, command.kill)
        status = self._wait(command, death.after_s if death else None)
        for other in others:
            self._wait(other, None)
        self.network.is_stale = False
        return status

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
        if status == 70:
            self.problems.append("a command broke")
        self.problems += self._verdict.at_any_time(self._started)
        return status

    def _order(
        self,
        *argv: str,
        commit: int | None = None,
        before_commit: bool = False,
        ahead_s: float = 0.0,
        view: View = View.TRUE,
    ) -> Order:
        environment = {
            "PATH": os.environ["PATH"],
            "FASTLAUNCH_HOME": str(self.folder / "home"),
            "FASTLAUNCH_CONFIG": str(self.folder / "config.yaml"),
            "AWS_ENDPOINT_URL": self.network.url,
            "AWS_ACCESS_KEY_ID": STRANGER_KEY if view is View.STRANGE else "AKIAEXAMPLE",
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

    def _meddle(self, rng: random.Random) -> None:
        ahead_s = 0.0
        for argv in self._meddling(rng) if self.next_typed is None else self.next_typed:
            if argv == BEGINS:
                # Requests that were sent twice are sent by then.
                ahead_s = self._begun_s = max(ahead_s, 2 * begins_s(self.kind))
                self._carry_out(ahead_s)
                time.sleep(_LIFE_S)
                continue
            death, self.next_death = self.next_death, None
            if self.next_typed is None and rng.random() < (0.5 if saves(self.kind) else 0.3):
                death = (
                    draw_death(rng, self.kind) if saves(self.kind) else Death(after_s=rng.uniform(0.05, 1.0))
                )
            if death is None and argv[0] in ("start", "resume", "watch"):
                # A machine that hangs is followed for an hour, which even a fast clock makes long, and a job
                # until SageMaker ends it.
                death = Death(after_s=10.0 if self.next_typed else 1.5)
            runs = self._verdict.rows("SELECT id FROM runs ORDER BY id") if "RUN" in argv else []
            words = [runs[0]["id"] if runs and word == "RUN" else word for word in argv]
            view = self.view or View.TRUE
            if argv[0] in _LOOKS and (self.view or self.next_typed is None):
                view = self.view or draw_view(rng)
                # At last over the time of what was started, but not an hour: AWS shows again what lives.
                pause_s = 1200.0 if self.view else rng.choice((0.0, 0.0, 400.0, 1200.0, 3600.0))
                # A watch may see it an hour later than that.
                ahead_s = min(ahead_s + pause_s, 2400.0 if saves(self.kind) else 5400.0)
            later_s = ahead_s if argv[0] in _LOOKS or saves(self.kind) else self._begun_s
            self._command(*words, death=death, view=view, ahead_s=later_s)

    def _meddling(self, rng: random.Random) -> list[tuple[str, ...]]:
        """Commands that somebody types next, while the service still fails."""
        found: list[tuple[str, ...]] = []
        runs = self._verdict.rows("SELECT id FROM runs")
        while rng.random() < (0.7 if saves(self.kind) else 0.45):
            run_id = rng.choice(runs)["id"] if runs else "none"
            commands = [
                ("status",),
                ("reap", "--yes"),
                ("cancel", run_id),
                ("resume", run_id, "--yes"),
                ("status", run_id),
                ("start", *SUBMISSIONS[self.kind]),
            ]
            if begins_s(self.kind):
                commands += [BEGINS, BEGINS]
            if saves(self.kind):
                commands += [("status",), ("watch",), ("resume", run_id, "--yes", "--detach")]
                commands += [("resume", run_id, "--yes")]
            found.append(rng.choice(commands))
        return found

    def _leave_alone(self) -> None:
        """Nobody comes for hours, in which the scheduler does what it was asked to."""
        self._carry_out(LATER_S)
        self.problems += self._verdict.unprotected(self._started)

    def _carry_out(self, ahead_s: float) -> None:
        ended = self._scheduler.carry_out(datetime.now(UTC) + timedelta(seconds=ahead_s))
        self.told.append(f"the scheduler ended {', '.join(ended) or 'nothing'}")

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
            # What AWS shows no more is gone at the third look: until then `status` raises an alarm.
            if code not in ((0, 1) if argv == ("status",) else (0,)):
                self.problems.append(f"fastlaunch {' '.join(argv)} ended with {code}")
        for num_looks in range(1, 4):
            if code == 0:
                break
            code = self._command("status", ahead_s=LATER_S + num_looks * _APART_S)
        if code != 0:
            self.problems.append(f"fastlaunch status ended with {code}")
        for num_returns in range(2, 2 + _NUM_RETURNS):
            # What EC2 took goes on when it is looked at, until its minutes are up.
            if not self._verdict.rows("SELECT id FROM attempts WHERE ended_at IS NULL"):
                break
            for argv in (("reap", "--yes"), ("status",)):
                self._command(*argv, ahead_s=num_returns * LATER_S)

    def story(self) -> str:
        """All that happened, for a trial that failed."""
        lines = [
            f"{self.kind}, seed {self.seed}; alone: pytest tests/chaos -m slow -k 'seed-{self.seed}-'",
            *self.problems,
            "",
            f"faults: {self._troubled}",
            *self.told,
            "",
            *(f"started {one.id} in {one.region}: {json.dumps(one.tags)}" for one in self._started),
            "",
        ]
        output = self.folder / "output.txt"
        return "\n".join([*lines, output.read_text(errors="replace") if output.exists() else ""])
