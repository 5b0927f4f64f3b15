"""Launcher and nodes together: what `submit` does with machines that run what they were sent."""

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cloud_commands import configure
from ec2_builders import job, site
from examples import BY_NAME, assert_measured, furnish
from fake_train.launcher import app_context
from fake_train.processes import runs
from instance_network import Switch
from moto_server import MotoServer, backend
from node_scene import BUCKET, IMAGE, REGION, RUNS, Account, Scene, code_bundle
from published_model import ROWS, loaded_adapters, publish
from simulated_instance import WEB, SimulatedInstance
from simulated_training_job import SimulatedTrainingJob
from tiny_hub import MODEL, TinyHub
from training_scene import TrainingScene
from wheel_builder import make_wheel

from fastlaunch.aws.client import Aws
from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.backends.site import Site
from fastlaunch.catalog.container_images import registry, training_base
from fastlaunch.cli.main import run as cli
from fastlaunch.core.plan import CodeBundle, Ending, RunState
from fastlaunch.core.settings import RegionSettings, Settings, load_settings
from fastlaunch.jobs.code_bundle import script_bundle, upload_bundle
from fastlaunch.jobs.job import Job, Script, Terms
from fastlaunch.jobs.options import Options
from fastlaunch.jobs.requirements import requirements_bundle
from fastlaunch.jobs.scripts import script_spec
from fastlaunch.jobs.working_directory import working_directory
from fastlaunch.ledger.attempt_cost import attempt_cost
from fastlaunch.ledger.ledger import Ledger, Run
from fastlaunch.lifecycle.describe import attempt_to_dict
from fastlaunch.lifecycle.display import PlainLines
from fastlaunch.lifecycle.launcher import Launcher, Submission
from fastlaunch.lifecycle.rounds import Verdicts
from fastlaunch.lifecycle.world import StopRequest, default_context
from fastlaunch.measure.record_files import read_record
from fastlaunch_train.node.protocol import newest_checkpoint
from fastlaunch_train.recipes.recipes import resolve_recipe

#: Seconds of the launcher and of the instances in one of ours.
SCALE = 20.0
JOB = job(
    workload="vit-tiny",
    batch_size=4,
    steps=20,
    num_gpus=1,
    instance="g5.xlarge",
    image=IMAGE,
    checkpoint_every=10,
)


@dataclass
class World:
    """A launcher whose machines boot as simulated instances, and then meet what `events` does to them.

    machines: how they are, as arguments of SimulatedInstance.
    """

    scene: Scene
    home: Path
    ledger: Ledger
    stop: StopRequest
    site: Site
    region: RegionSettings
    messages: list[str]
    events: Callable[[int, SimulatedInstance], None] = lambda number, instance: None
    started_at: float = 0.0
    machines: dict[str, Any] = field(default_factory=dict)
    max_minutes: int = 120

    def __post_init__(self) -> None:
        self.started_at = time.time()
        self.scene.moto.when_launched.append(self._launched)

    def now(self) -> datetime:
        elapsed_s = (time.time() - self.started_at) * SCALE
        return datetime.fromtimestamp(self.started_at, tz=UTC) + timedelta(seconds=elapsed_s)

    def run_id(self) -> str:
        """Of the first run, read by a thread of its own."""
        with Ledger(self.ledger.path) as ledger:
            return ledger.select()[0].id

    def submit(self, *jobs: Job, verdicts: Verdicts | None = None) -> list[Run]:
        def sleep(seconds: float) -> None:
            time.sleep(seconds / SCALE)

        aws = Aws()
        launcher = Launcher(
            backends={"ec2": Ec2Backend(aws=aws, home=self.home, sleep=sleep, now=self.now)},
            ledger=self.ledger,
            settings=Settings(home=self.home, aws={REGION: self.region}),
            display=PlainLines(stream=io.StringIO(), clock=time.monotonic),
            stop=self.stop,
            report=self.messages.append,
        )
        submission = Submission(
            placements=(self.site,),
            jobs_at=lambda at: jobs,
            options=Options(max_minutes=self.max_minutes),
            verdicts=verdicts,
        )
        return launcher.submit(submission, command="fastlaunch submit")

    def _launched(self, region: str, instance_id: str) -> None:
        # In a thread of its own: booting asks the server, which is still about to answer.
        threading.Thread(target=self._boot, args=(instance_id,), daemon=True).start()

    def _boot(self, instance_id: str) -> None:
        instance = self.scene.boot(instance_id, scale=SCALE, **self.machines)
        self.events(len(self.scene.started), instance)


@pytest.fixture
def world(tmp_path: Path, aws_server: MotoServer) -> Iterator[World]:
    settings = aws_server.set_up_region(REGION)
    assert settings.bucket == BUCKET
    scene = Scene(moto=aws_server, folder=tmp_path)
    _, sha256 = code_bundle()
    zone, subnet = next(iter(settings.subnets.items()))
    place = site(
        "g5.xlarge",
        zone=zone,
        subnets=(subnet,),
        bucket=BUCKET,
        role=settings.instance_profile or "",
        security_groups=settings.security_groups,
        ami=Aws().parameter(REGION, settings.ami_parameter),
        image=IMAGE,
        code=CodeBundle(key=f"fastlaunch/code/{sha256}.tar.gz", sha256=sha256),
    )
    home = tmp_path / "home"
    home.mkdir()
    with Ledger(home / "ledger.sqlite") as ledger:
        yield World(
            scene=scene,
            home=home,
            ledger=ledger,
            stop=StopRequest(),
            site=place,
            region=settings,
            messages=[],
        )
        scene.close()


#: Records its steps, writes where it runs, and leaves something.
SCRIPT = """
import os, pathlib, sys, time
import fastlaunch_train as fl

if folder := os.environ.get("FASTLAUNCH_INPUT_VAL_SET"):
    import needed

    assert pathlib.Path(folder, "a", "b.txt").read_text() == "data" and needed.__version__ == "1.2"
fl.step()
for _ in range(25):
    time.sleep(0.01)
    fl.step(num_samples=4, loss=1.0)
pathlib.Path("here.txt").write_text(sys.argv[1])
left = pathlib.Path(os.environ["FASTLAUNCH_OUTPUT"], "a model")
left.mkdir()
(left / "weights.bin").write_bytes(sys.argv[1].encode() * 1000)
"""


#: Saves when it is due to, goes on from that, and leaves what it trained to.
RESUMABLE = """
import os, pathlib, time
import fastlaunch_train as fl

kept = pathlib.Path(os.environ["FASTLAUNCH_OUTPUT"], "state")
first, total = map(int, kept.read_text().split()) if kept.exists() else (1, 0)
for step in fl.steps(range(first, 1001), num_samples=4):
    time.sleep(0.01)
    total += step
    if fl.checkpoint_due():
        kept.write_text(f"{step + 1} {total}")
    if fl.stop_requested():
        break
else:
    (kept.parent / "result").write_text(str(total))
"""


def assert_script_went_on(run: Run) -> None:
    """As one that was not interrupted: with its result, and each step once."""
    assert run.summary is not None and run.directory is not None
    assert (run.directory / "output-attempt-2" / "result").read_text() == str(sum(range(1, 1001)))
    records = [read_record(path) for path in sorted(run.directory.glob("rank-00000-attempt-*.jsonl"))]
    assert [step.step for record in records for step in record.steps] == list(range(1, 1001))
    assert len(records) == 2 and records[0].steps
    assert (run.summary.num_steps, run.summary.status, run.summary.problems) == (1000, "completed", ())


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A folder with a script."""
    folder = tmp_path / "script"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    return folder


def assert_script_came_home(run: Run, lr: str) -> None:
    assert run.summary is not None and run.directory is not None
    assert run.summary.num_steps == 25 and run.summary.timing.step_time_s is not None
    assert (run.summary.setup.workload, run.summary.setup.variant) == ("train.py", {"lr": lr})
    assert (run.summary.setup.instance, run.summary.problems) == ("g5.xlarge", ())
    assert (run.directory / "output" / "a model" / "weights.bin").read_bytes() == lr.encode() * 1000


def submit_script(
    world: World, folder: Path, *scripts: Script, purchase: str = "on-demand", **where: Any
) -> list[Run]:
    """Submit the scripts in the folder, with real training: their runs have twenty hours of the machine's."""
    bundle = script_bundle(working_directory(folder, home=world.home))
    world.site = replace(world.site, code=upload_bundle(Aws(), REGION, BUCKET, "fastlaunch", bundle))
    world.machines.update(training="real")
    world.max_minutes = 1200
    terms = Terms(purchase=purchase, max_minutes=world.max_minutes)
    usual: dict[str, Any] = {"backend": "ec2", "instance": "g5.xlarge", "image": IMAGE, "terms": terms}
    return world.submit(*(script_spec(script, **usual, **where) for script in scripts))


def consoles(world: World) -> str:
    return "\n".join([*world.messages, *(instance.console for instance in world.scene.started)])


def test_two_recipes_come_home(world: World) -> None:
    first, second = world.submit(JOB, replace(JOB, recipe=resolve_recipe("fp32")))
    assert [first.state, second.state] == [RunState.COMPLETED] * 2, consoles(world)
    for run in (first, second):
        assert run.summary is not None and run.summary.num_steps == 20
        assert run.summary.setup.instance == "g5.xlarge"
        assert run.directory is not None and (run.directory / "log.txt").read_text()
    (attempt,) = world.ledger.attempts_of(second.id)
    assert attempt.state is RunState.COMPLETED and attempt.run_ids == (first.id, second.id)
    assert attempt_cost(attempt, world.now()).is_final
    node_log = world.home / "runs" / first.id / "node-a1.log"
    assert second.id in node_log.read_text()
    assert not world.scene.moto.instances("pending", "running")


INPUT = f"s3://{BUCKET}/data/val/"
BASE = training_base(None, today=datetime.now(UTC).date())


def put_input() -> None:
    Aws().put_object(REGION, BUCKET, "data/val/a/b.txt", b"data")
    Aws().put_object(REGION, BUCKET, "data/valley.txt", b"no part of it")


@pytest.fixture
def required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A requirements file; pip knows just its wheels here."""
    make_wheel(tmp_path / "index", "needed", needs=("torch",))
    make_wheel(tmp_path / "index", "torch", version=BASE.torch)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    path = tmp_path / "requirements.txt"
    path.write_text("needed>=1\ntorch\n")
    return path


def assert_was_prepared(run: Run, ledger: Ledger, home: Path, *, is_timed: bool, names: list[str]) -> None:
    assert run.summary is not None
    startup = run.summary.startup
    assert startup.input_bytes == 4 and startup.install_s is not None and startup.install_s > 0
    assert (startup.inputs_s is not None) == is_timed
    (attempt,) = ledger.attempts_of(run.id)
    known = attempt_to_dict(run, attempt, home=home, now=datetime.now(UTC))
    assert [phase["name"] for phase in known["phases"]] == names


def test_a_script_comes_home_with_what_it_left(world: World, script: Path, required: Path) -> None:
    put_input()
    wheels = requirements_bundle(required, BASE)
    world.site = replace(
        world.site,
        requirements=upload_bundle(Aws(), REGION, BUCKET, "fastlaunch", wheels),
        inputs={"val-set": INPUT},
    )
    command = ("python", "train.py", "{lr}")
    scripts = [Script(command=command, variant=(("lr", lr),)) for lr in ("1", "2")]
    first, second = submit_script(world, script, *scripts)
    assert [first.state, second.state] == [RunState.COMPLETED] * 2, consoles(world)
    assert_script_came_home(first, "1")
    assert_script_came_home(second, "2")
    assert_was_prepared(
        first, world.ledger, world.home, is_timed=True, names=["requirements", "input val-set"]
    )


@pytest.mark.parametrize("name", BY_NAME)
def test_an_example_comes_home(world: World, tmp_path: Path, name: str) -> None:
    example = BY_NAME[name]
    furnish(tmp_path / "script", example.program)
    command = Script(command=("python", *example.command), nproc=example.num_ranks)
    (run,) = submit_script(world, tmp_path / "script", command)
    assert run.state is RunState.COMPLETED, consoles(world)
    assert_measured(run, example)


SWEEP = (
    *("sweep", "--instance", "g5.xlarge,g6.xlarge", "--parallel", "2", "--max-hours", "20h"),
    *("--yes", "--output", "json"),
)


@pytest.fixture
def typed(world: World, isolated: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Exit code of `fastlaunch ARGV`, in this process."""
    moto, base = world.scene.moto, training_base(None, today=world.now().date())
    moto.quotas[REGION, "L-DB2E81BA"] = 768
    moto.images[REGION, "763104351884", base.repository, base.tag] = "sha256:" + "b" * 64
    configure(isolated, world.region)
    # The interpreter that stands for the image's has what it needs.
    wheels = isolated.parent / "wheels.txt"
    wheels.touch()
    monkeypatch.setenv("FASTLAUNCH_WHEELS", str(wheels))

    def typed(*argv: str) -> int:
        context = replace(
            app_context(*argv), sleep=lambda seconds: time.sleep(seconds / SCALE), now=world.now
        )
        return cli(list(argv), context)

    return typed


@pytest.fixture
def sweep(typed: Callable[..., int]) -> Callable[..., int]:
    """Exit code of `fastlaunch sweep` over both types."""
    return partial(typed, *SWEEP)


def assert_swept(world: World, labels: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A machine for each type, with the rounds interleaved; and the table, printed twice."""
    out, err = capsys.readouterr()
    printed = json.loads(out)
    by_type = {name: [run for run in runs() if run.instance == name] for name in ("g5.xlarge", "g6.xlarge")}
    first, second = labels
    for name, of_type in by_type.items():
        assert [run.recipe for run in of_type] == [first, second, second, first, first, second]
        done = {run.state for run in of_type if not run.is_unneeded}
        assert done == {RunState.COMPLETED}, err + consoles(world)
        assert f"{name}: [" in err
    types = [world.scene.moto.instance(each.instance_id).instance_type for each in world.scene.started]
    assert sorted(types) == [*by_type] and not world.scene.moto.instances("pending", "running")
    assert {(row["instance"], row["recipe"]) for row in printed["rows"]} == {*product(by_type, labels)}
    assert cli(["compare", f"sweep={printed['sweep']['id']}", "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == printed["rows"]


def test_a_sweep_of_two_types_comes_home(
    world: World, sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--workload", "vit-tiny", "--batch-size", "4", "--steps", "60", "--max-rounds", "3")
    assert sweep("--recipe", "fp32,bf16", *options) == 0
    assert_swept(world, ("fp32", "bf16"), capsys)


def test_a_sweep_of_a_script_comes_home(
    world: World,
    sweep: Callable[..., int],
    script: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(script)
    world.machines.update(training="real")
    assert sweep("--repeats", "3", "-L", "lr=1,2", "--", "python", "train.py", "{lr}") == 0
    for run in runs():
        assert run.summary is not None and run.directory is not None
        left = run.directory / "output" / "a model" / "weights.bin"
        assert left.read_bytes() == run.summary.setup.variant["lr"].encode() * 1000
    assert_swept(world, ("lr=1", "lr=2"), capsys)


def test_the_first_hour_of_an_account(
    world: World, isolated: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """init, doctor and submit, as the tutorial has them."""
    moto, base = world.scene.moto, training_base(None, today=world.now().date())
    moto.quotas[REGION, "L-DB2E81BA"] = 8
    moto.images[REGION, "763104351884", base.repository, base.tag] = "sha256:" + "b" * 64
    ec2 = backend("ec2", REGION)
    gateway, vpc = ec2.create_internet_gateway(), ec2.get_default_vpc()
    ec2.attach_internet_gateway(gateway.id, vpc.id)
    (main,) = (table for table in ec2.route_tables.values() if table.vpc_id == vpc.id)
    ec2.create_route(main.id, "0.0.0.0/0", gateway_id=gateway.id)
    wheels = isolated.parent / "wheels.txt"
    wheels.touch()
    monkeypatch.setenv("FASTLAUNCH_WHEELS", str(wheels))
    (isolated.parent / "config.yaml").unlink()

    def typed(*argv: str) -> int:
        capsys.readouterr()
        context = replace(
            default_context(argv, config_may_lack=True),
            sleep=lambda seconds: time.sleep(seconds / SCALE),
            now=world.now,
            ask=None,
        )
        return cli(list(argv), context)

    # The scene looks into its own bucket.
    assert typed("init", "--bucket", BUCKET, "--import-existing", "--max-cost", "1", "--yes") == 0
    assert typed("doctor", "--instance", "g6.xlarge") == 0, capsys.readouterr()
    small = ("--workload", "vit-tiny", "--batch-size", "4", "--steps", "20", "--recipe", "fp32,bf16", "--yes")
    submit = ("submit", "--instance", "g6.xlarge", *small)
    assert typed(*submit) == 2
    assert "above the budget" in capsys.readouterr().err and not world.scene.started
    assert typed(*submit, "--max-hours", "0.75") == 0, consoles(world)
    done = runs()
    assert [(run.recipe, run.state) for run in done] == [
        ("fp32", RunState.COMPLETED),
        ("bf16", RunState.COMPLETED),
    ]
    assert not moto.instances("pending", "running")
    (instance,) = (moto.instance(each.instance_id) for each in world.scene.started)
    assert instance.subnet_id in load_settings().aws[REGION].subnets.values()
    assert typed("compare", "--output", "json") == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 2


def take_first(
    world: World, number: int, instance: SimulatedInstance, run_id: Callable[[], str] | None = None
) -> None:
    """Take the first instance back once its run records steps, with the notice that spot gets.

    run_id: tells which that is; by default, the first one of the world's ledger.
    """
    if number > 1:
        return
    first = (run_id or world.run_id)()
    output = f"{RUNS}/{first}/attempt-1"
    world.scene.wait_for(f"{output}/node-0/{first}/rank-", 120)
    instance.spot_notice()
    world.scene.wait_for(f"{output}/node-0/status.json", 120)
    instance.take()


def test_a_spot_interruption_is_gone_on_from(world: World) -> None:
    world.events = partial(take_first, world)
    (run,) = world.submit(replace(JOB, terms=Terms(purchase="spot"), steps=4000, checkpoint_every=100))
    assert run.state is RunState.COMPLETED, consoles(world)
    assert run.summary is not None and run.summary.num_steps == 4000
    one, two = world.ledger.attempts_of(run.id)
    assert (one.state, one.reason) == (RunState.INTERRUPTED, "EC2 took the spot instance back")
    assert (one.billing.source, one.billing.billed_s) == ("free", 0.0)
    assert two.state is RunState.COMPLETED and (two.max_minutes or 0) < 120
    # It went on, and did not begin again.
    steps = [path.read_text().count('"kind":"step"') for path in sorted(run.directory.glob("rank-*"))]  # type: ignore[union-attr]
    assert len(steps) == 2 and 4000 <= sum(steps) < 4000 + 200 and steps[0] > 0


def test_a_script_that_spot_interrupts_goes_on_with_what_it_saved(world: World, script: Path) -> None:
    (script / "train.py").write_text(RESUMABLE)
    world.events = partial(take_first, world)
    (run,) = submit_script(world, script, Script(command=("python", "train.py")), purchase="spot")
    assert run.state is RunState.COMPLETED, consoles(world)
    assert_script_went_on(run)


def test_a_script_that_is_killed_goes_on_with_what_it_saved_on_its_machine(
    world: World, script: Path
) -> None:
    dies = """
    if (step, os.environ["FASTLAUNCH_ATTEMPT"]) == (600, "1"):
        os.kill(os.getpid(), 9)
"""
    often = "from fastlaunch_train.script import recording\nrecording.CHECKPOINT_EVERY_S = 1.0\n"
    head, loop, tail = RESUMABLE.partition("    total += step\n")
    (script / "train.py").write_text(f"{often}{head}{loop}{dies}{tail}")
    (run,) = submit_script(world, script, Script(command=("python", "train.py")))
    assert run.state is RunState.COMPLETED, consoles(world)
    assert run.summary is not None and run.directory is not None
    assert (run.directory / "output" / "result").read_text() == str(sum(range(1, 1001)))
    first, again = (read_record(run.directory / f"rank-00000-attempt-{number}.jsonl") for number in (1, 2))
    assert first.steps[-1].step >= again.steps[0].step - 1 > 0 and again.steps[-1].step == 1000
    assert "SIGKILL" in again.header["restarted_after"]
    # Steps that were done twice count once, and one machine was paid for.
    assert (run.summary.num_steps, run.summary.status, run.summary.problems) == (1000, "completed", ())
    assert len(world.scene.started) == 1


def put_model(scene: Account, folder: Path) -> Path:
    """Publish a tiny model below s3://BUCKET/models/tiny/."""
    for path in publish(folder).iterdir():
        scene.put(f"s3://{BUCKET}/models/tiny/{path.name}", path.read_bytes())
    return folder


def write_fine_tuning(folder: Path) -> None:
    """Write the data, and what the machine installs that AWS's images lack and the simulated one has."""
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS * 20))
    (folder / "requirements.txt").write_text("transformers\npeft\n")


def kept_secret(account: Account) -> str:
    """Return the ARN of a secret in the account that holds TOKEN."""
    return account.client("secretsmanager").create_secret(Name="hub", SecretString=TOKEN)["ARN"]


FINE_TUNING = (
    *("--requirements", "requirements.txt", "--requirements-from-index"),
    *("--recipe", "bf16", "--batch-size", "2", "--sequence-length", "64", "--data", "train.jsonl"),
    *("--checkpoint-every", "5", "--max-hours", "20h", "--yes"),
)
TOKEN = "hf_0123456789"
FROM_S3 = (
    *("--input", f"weights=s3://{BUCKET}/models/tiny"),
    *("--workload", "hf-lora:/opt/ml/input/data/weights"),
)


# Transformers warns of a name that PEFT still uses.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_interrupted_fine_tuning_goes_on_and_its_adapters_come_home(
    world: World,
    typed: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = put_model(world.scene, tmp_path / "model")
    write_fine_tuning(tmp_path)
    monkeypatch.chdir(tmp_path)
    world.machines.update(training="real")
    world.events = partial(take_first, world, run_id=lambda: runs()[0].id)
    submit = ("submit", "--instance", "g5.xlarge", "--purchase", "spot", "--steps", "200")
    assert typed(*submit, "--no-account-timer", *FINE_TUNING, *FROM_S3) == 0, (
        consoles(world) + capsys.readouterr().err
    )
    (run,) = runs()
    assert run.summary is not None and run.directory is not None
    records = [read_record(path) for path in sorted(run.directory.glob("rank-*"))]
    assert len(records) == 2 and records[1].header["first_step"] > 1
    adapters = run.directory / "model-attempt-2"
    assert f"model of {run.id}: {adapters}" in capsys.readouterr().out
    assert any(value.any() for value in loaded_adapters(base, adapters).values())
    saved = world.scene.objects(f"{RUNS}/{run.id}/checkpoints")
    content = torch.load(io.BytesIO(saved[max(saved)]), weights_only=True)
    assert content["model"] and all("lora_" in name for name in content["model"])


def test_gated_weights_are_fetched_with_a_secret_token(
    world: World,
    isolated: Path,
    typed: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub = TinyHub(publish(tmp_path / "model"), token=TOKEN)
    write_fine_tuning(tmp_path)
    monkeypatch.chdir(tmp_path)
    world.machines.update(training="real", web=hub.address)
    gated = ("--workload", f"hf-lora:{MODEL}", "--repeats", "2", "--steps", "20")
    access = (
        "--secret",
        f"HF_TOKEN={kept_secret(world.scene)}",
        "--env",
        "HF_ENDPOINT=http://{}:{}".format(*WEB),
    )
    try:
        submit = ("submit", "--instance", "g5.xlarge", "--no-account-timer", *FINE_TUNING, *gated, *access)
        assert typed(*submit) == 0, consoles(world) + capsys.readouterr().err
    finally:
        hub.close()
    first, second = runs()
    assert first.summary is not None and second.summary is not None
    assert (first.summary.startup.fetch_s or 0) > 0 and second.summary.startup.fetch_s is None
    assert hub.served.count("model.safetensors") == 1
    assert not any(TOKEN.encode() in path.read_bytes() for path in isolated.rglob("*") if path.is_file())


def test_a_machine_of_two_that_is_lost_is_replaced_and_their_shards_are_gone_on_with(
    switch: Switch, world: World
) -> None:
    """Killed without a word, once both had sent theirs; the other one ends by itself."""
    folder = f"{RUNS}/{{}}/checkpoints"

    first_come = threading.Lock()

    def lose(number: int, instance: SimulatedInstance) -> None:
        if not first_come.acquire(blocking=False):
            return
        end = time.monotonic() + 300
        while not newest_checkpoint(world.scene.keys(folder.format(world.run_id()))):
            if time.monotonic() > end:
                return
            time.sleep(0.2)
        instance.close()
        reason = "Server.InternalError: Internal error"
        world.scene.moto.set_instance(instance.instance_id, state="terminated", state_reason=reason)

    world.machines.update(switch=switch, training="real")
    world.events, world.max_minutes = lose, 600
    sharded = replace(
        JOB,
        recipe=resolve_recipe("fsdp2"),
        num_nodes=2,
        num_gpus=2,
        steps=400,
        checkpoint_every=20,
        allow_tcp=True,
    )
    (run,) = world.submit(sharded)
    assert (run.state, run.reason) == (RunState.COMPLETED, None), consoles(world)
    first, second = world.ledger.attempts_of(run.id)
    assert (first.ending, second.num_nodes) == (Ending.NODE_LOST, 2), consoles(world)
    # Four machines in all: nothing was started twice, and nothing is left.
    assert len(world.scene.started) == 4 and not world.scene.moto.instances("pending", "running")
    assert run.directory is not None
    for rank in (0, 1):
        after = read_record(run.directory / f"rank-{rank:05d}-attempt-2.jsonl")
        assert after.header["first_step"] > 1 and after.steps[-1].step == 400
    assert run.summary is not None and run.summary.num_steps == 400


def test_a_script_on_two_nodes_is_one_of_two_ranks(switch: Switch, world: World, script: Path) -> None:
    world.machines.update(switch=switch)
    command = Script(command=("python", "train.py", "{lr}"), variant=(("lr", "1"),), nproc=1)
    (run,) = submit_script(world, script, command, num_nodes=2, allow_tcp=True)
    assert run.state is RunState.COMPLETED, consoles(world)
    assert_script_came_home(run, "1")
    assert run.summary is not None and run.directory is not None
    assert (run.summary.setup.num_nodes, run.summary.setup.global_batch) == (2, 8)
    assert (run.directory / "output-node-1" / "a model" / "weights.bin").exists()


# Training jobs, by what a user types.

#: With an image that holds the code, so that nothing has to be fetched.
WITH_AWS_IMAGE = ("submit", "--backend", "sagemaker", "--instance", "g5.xlarge", "--yes")
ON_SAGEMAKER = (*WITH_AWS_IMAGE, "--image", IMAGE)
SUBMIT = (
    *ON_SAGEMAKER,
    *("--workload", "vit-tiny", "--batch-size", "4", "--steps", "60", "--checkpoint-every", "5"),
)


class TrainingJobs:
    """Where what `fastlaunch` asks for is carried out. environment, training, web: of the simulated jobs."""

    def __init__(self, scene: TrainingScene) -> None:
        self.scene = scene
        self.environment = {"FAKE_STEP_S": "0.1"}
        self.training = "fake"
        self.web: tuple[str, int] | None = None
        self._made = threading.Event()
        scene.moto.training_jobs.when_created.append(self._created)

    def _created(self, region: str, name: str) -> None:
        # In a thread of its own: it asks the server, which is still about to answer.
        threading.Thread(target=self._simulate, args=(name,), daemon=True).start()

    def _simulate(self, name: str) -> None:
        self.scene.simulate(name, environment=self.environment, training=self.training, web=self.web)
        self._made.set()

    def submit(
        self, *argv: str, command: Sequence[str] = SUBMIT, cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "fastlaunch", *command, *argv],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def job(self) -> SimulatedTrainingJob:
        """The first job that was asked for."""
        assert self._made.wait(120)
        job: SimulatedTrainingJob = self.scene.started[0]
        return job


@pytest.fixture
def training_jobs(aws_server: MotoServer, isolated: Path, tmp_path: Path) -> Iterator[TrainingJobs]:
    aws_server.set_up_region(REGION)
    for kind in ("", "spot "):
        aws_server.quotas[REGION, f"ml.g5.xlarge for {kind}training job usage"] = 2
    named = {"bucket": BUCKET, "role": aws_server.training_jobs.role()}
    (isolated.parent / "config.yaml").write_text(yaml.safe_dump({"aws": {REGION: named}}))
    scene = TrainingScene(moto=aws_server, folder=tmp_path)
    yield TrainingJobs(scene)
    scene.close()


def test_a_training_job_on_spot_ends_as_if_it_had_not_been_interrupted(
    training_jobs: TrainingJobs, isolated: Path
) -> None:
    process = training_jobs.submit("--recipe", "fp32", "--purchase", "spot")
    job = training_jobs.job()
    (run,) = runs()
    training_jobs.scene.wait_for(f"{job.uri}/{run.id}/checkpoints/step-")
    job.interrupt()
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out + job.console
    (run,) = runs()
    assert (run.state, run.backend) == (RunState.COMPLETED, "sagemaker")
    records = sorted((isolated / "runs" / run.id).glob("rank-00000-attempt-*.jsonl"))
    assert [step.step for path in records for step in read_record(path).steps] == list(range(1, 61))
    assert job.rewritten() == []


def test_a_job_from_a_queue_that_sagemaker_fails_goes_on_from_its_checkpoint(
    training_jobs: TrainingJobs, isolated: Path
) -> None:
    training_jobs.scene.moto.queues.add("team")
    process = training_jobs.submit("--recipe", "fp32", "--queue", "team", "--retries", "1")
    job = training_jobs.job()
    (run,) = runs()
    training_jobs.scene.wait_for(f"{job.uri}/{run.id}/checkpoints/step-")
    job.fail()
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out + job.console
    (run,) = runs()
    assert (run.state, run.reason) == (RunState.COMPLETED, None)
    first, second = sorted((isolated / "runs" / run.id).glob("rank-00000-attempt-*.jsonl"))
    steps = [step.step for step in read_record(second).steps]
    assert 1 < steps[0] <= read_record(first).steps[-1].step + 1 and steps[-1] == 60
    assert len(training_jobs.scene.moto.training_jobs.jobs) == 2
    assert [started.rewritten() for started in training_jobs.scene.started] == [[], []]


def test_a_script_comes_home_from_a_training_job(
    training_jobs: TrainingJobs, script: Path, required: Path, isolated: Path
) -> None:
    training_jobs.training = "real"
    images = training_jobs.scene.moto.images
    images[REGION, registry(REGION).account, BASE.repository, BASE.tag] = IMAGE.partition("@")[2]
    put_input()
    argv = ("--requirements", str(required), "--input", f"val-set={INPUT[:-1]}", "-L", "lr=1,2")
    script_argv = ("--", "python", "train.py", "{lr}")
    process = training_jobs.submit(*argv, *script_argv, command=WITH_AWS_IMAGE, cwd=script)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out + training_jobs.job().console
    assert "travels  1 file" in out
    for run, lr in zip(runs(), ("1", "2"), strict=True):
        assert_script_came_home(run, lr)
    with Ledger(isolated / "ledger.sqlite") as ledger:
        assert_was_prepared(run, ledger, isolated, is_timed=False, names=["input val-set", "requirements"])


# Transformers warns of a name that PEFT still uses.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_fine_tuning_comes_home_from_a_training_job(training_jobs: TrainingJobs, tmp_path: Path) -> None:
    base = put_model(training_jobs.scene, tmp_path / "model")
    write_fine_tuning(tmp_path)
    training_jobs.training = "real"
    images = training_jobs.scene.moto.images
    images[REGION, registry(REGION).account, BASE.repository, BASE.tag] = IMAGE.partition("@")[2]
    process = training_jobs.submit(
        *FINE_TUNING, *FROM_S3, "--steps", "20", command=WITH_AWS_IMAGE, cwd=tmp_path
    )
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out + training_jobs.job().console
    (run,) = runs()
    assert run.directory is not None and f"model of {run.id}: {run.directory}/model\n" in out
    assert any(value.any() for value in loaded_adapters(base, run.directory / "model").values())
    record = read_record(run.directory / "rank-00000-attempt-1.jsonl")
    assert record.header["data"] == "file" and record.steps[-1].num_padding


# Transformers warns of a name that PEFT still uses.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gated_weights_are_fetched_by_a_training_job(
    training_jobs: TrainingJobs, isolated: Path, tmp_path: Path
) -> None:
    hub = TinyHub(publish(tmp_path / "model"), token=TOKEN)
    write_fine_tuning(tmp_path)
    training_jobs.training, training_jobs.web = "real", hub.address
    images = training_jobs.scene.moto.images
    images[REGION, registry(REGION).account, BASE.repository, BASE.tag] = IMAGE.partition("@")[2]
    access = ("--secret", f"HF_TOKEN={kept_secret(training_jobs.scene)}", "--env", f"HF_ENDPOINT={hub.url}")
    gated = ("--workload", f"hf-lora:{MODEL}", "--steps", "20")
    try:
        process = training_jobs.submit(*FINE_TUNING, *gated, *access, command=WITH_AWS_IMAGE, cwd=tmp_path)
        out, _ = process.communicate(timeout=300)
    finally:
        hub.close()
    assert process.returncode == 0, out + training_jobs.job().console
    (run,) = runs()
    assert run.summary is not None and (run.summary.startup.fetch_s or 0) > 0
    assert hub.served.count("model.safetensors") == 1
    assert TOKEN not in out + training_jobs.job().console
    assert not any(TOKEN.encode() in path.read_bytes() for path in isolated.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", BY_NAME)
def test_an_example_comes_home_from_a_training_job(
    training_jobs: TrainingJobs, tmp_path: Path, name: str
) -> None:
    example = BY_NAME[name]
    furnish(tmp_path / "script", example.program)
    training_jobs.training = "real"
    # Not by --nproc: the instance has one GPU.
    ranks = ("torchrun", "--standalone", "--nproc-per-node", str(example.num_ranks))
    start = ranks if example.num_ranks > 1 else ("python",)
    process = training_jobs.submit(
        "--", *start, *example.command, command=ON_SAGEMAKER, cwd=tmp_path / "script"
    )
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out + training_jobs.job().console
    (run,) = runs()
    assert_measured(run, example)


def test_a_script_on_managed_spot_goes_on_with_what_it_saved(
    training_jobs: TrainingJobs, script: Path
) -> None:
    (script / "train.py").write_text(RESUMABLE)
    training_jobs.training = "real"
    argv = ("--purchase", "spot", "--", "python", "train.py")
    process = training_jobs.submit(*argv, command=ON_SAGEMAKER, cwd=script)
    job = training_jobs.job()
    (run,) = runs()
    training_jobs.scene.wait_for(f"{job.uri}/{run.id}-a1/node-0/{run.id}/rank-")
    job.interrupt()
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out + job.console
    assert "fl.checkpoint_due()" in out
    (run,) = runs()
    assert_script_went_on(run)
    assert job.rewritten() == []
