"""What the commands show at 80, 120 and 200 columns: golden texts, some of them in docs/, and their limits.

To write the texts anew after a change that is meant: python tests/launcher/test_screens.py
"""

import datetime
import io
import os
import random
import re
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
from fake_summaries import PLAIN, changed
from fake_train.launcher import app_context
from test_watch import MANY, view

from fastlaunch.cli.demo import of_one_gpu
from fastlaunch.cli.main import run
from fastlaunch.cli.watch import screen_lines
from fastlaunch.core.activity import activity
from fastlaunch.core.home import LEDGER_NAME
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.jobs.job import Job
from fastlaunch.ledger.ledger import Ledger
from fastlaunch.measure.published import shipped_summaries
from fastlaunch.measure.summary import StepProfile
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.records.records import Check, Eval

GOLDEN = Path(__file__).parents[1] / "screens"
PAGES = sorted(Path(__file__).parents[2].glob("docs/*.md"))
WIDTHS = (80, 120, 200)
OWN = "20261121-090312-k3f9"
CHARGED = "--price-as p5.4xlarge --prices-as-of 2026-11-21"
#: Brings the runs of the `compare` screens.
IMPORT = "runs import train/measurements/vit-huge-fused-h100 train/measurements/vit-huge-h100"
PLACES = "--instance p5.48xlarge,p5en.48xlarge --region us-east-1,eu-north-1"
COMMANDS = {
    "compare": f"compare {CHARGED}",
    "compare-all": f"compare {CHARGED} --all",
    "compare-why": f"compare {CHARGED} --why compile",
    "demo": "demo",
    "recommend": "recommend --workload vit-huge --samples 100M --prices-as-of 2026-07-20 --steps-only"
    " --measured-only --batch-equivalent --allow-unverified --exclude-recipe fp8-fused",
    "recommend-lora": "recommend --workload hf-lora:llama-3.1-8b --tokens 50M --sequence-length 4096"
    " --prices-as-of 2026-11-21",
    "recommend-deadline": "recommend --workload vit-huge --samples 100M --deadline 48h"
    " --prices-as-of 2026-11-21",
    "recommend-all": "recommend --workload hf-lora:llama-3.1-8b --tokens 50M --sequence-length 4096"
    " --prices-as-of 2026-11-21 --all",
    "estimate": "estimate --recipe te-fp8 --instance p5.48xlarge --samples 100M --prices-as-of 2026-11-21",
    "dry-run": "submit --instance p5.48xlarge --dry-run",
    "dry-run-places": f"submit {PLACES} --recipe bf16,te-fp8 --repeats 2 --no-account-timer --dry-run",
    "dry-run-nodes": "submit --instance p5.48xlarge --num-nodes 4 --dry-run",
    "dry-run-first": "submit --instance g6.xlarge --workload vit-huge --batch-size 16"
    " --recipe bf16,compile,te-fp8 --max-hours 0.75 --dry-run",
    "dry-run-sagemaker": "submit --instance ml.p5.48xlarge,ml.p4d.24xlarge --dry-run",
    "help": "--help",
    "submit-help": "submit --help",
    "sweep": "sweep --instance p4d.24xlarge,p5.48xlarge,g6e.12xlarge --recipe bf16,te-fp8 --until-best"
    " --max-cost 200 --dry-run",
    "recipes": "recipes",
    "recipe": "recipes te-fp8",
    "prices": "prices --instance p5* --region us-east-1 --as-of 2026-11-21",
    "runs-list": "runs list",
    "runs-show": f"runs show {OWN}",
    "status": f"status {OWN}",
}
#: As `init` writes it, of an account with two zones.
CONFIG = """\
region: us-east-1
max_cost: 1
aws:
  us-east-1:
    bucket: acme-training
    instance_profile: fastlaunch-node
    security_groups: [sg-0123456789abcdef0]
    subnets: {us-east-1a: subnet-0123456789abcdef0, us-east-1b: subnet-0fedcba9876543210}
    scheduler_role: arn:aws:iam::123456789012:role/fastlaunch-scheduler
"""
#: A moment of `watch`, which on a terminal has no end: a run that trains, one that waits, one that failed.
MOMENT = "watch"
#: Prose: on a wider screen it is the same.
UP_TO_120 = (
    *("dry-run", "dry-run-first", "dry-run-places", "dry-run-nodes", "dry-run-sagemaker"),
    *("submit-help", "sweep", "recipe", "status"),
)
MAX_LINES = 40
#: Where the answer stands first, and has to be seen when the command ends.
MAX_LINES_IN = dict.fromkeys(("recommend", "recommend-lora", "recommend-deadline", "estimate"), 30)
#: Details that were asked for.
LONG = ("compare-all", "recipes", "help", "submit-help", "runs-show", "recommend-all")
#: Which decides how old prices are.
NOW = datetime.datetime(2026, 11, 21, 12, tzinfo=datetime.UTC)


def golden(name: str, width: int) -> Path:
    return GOLDEN / f"{name}-{min(width, 120) if name in UP_TO_120 else width}.txt"


def fill(ledger: Ledger, name: str) -> None:
    """Give the screen the runs of `IMPORT`, or a run of this machine with all that a run may have."""
    if name.startswith("compare"):
        # Those of a third folder were measured on one of two GPUs.
        shipped = of_one_gpu(shipped_summaries())
        other = re.compile("vit-huge-fp8-fused-256-x1-r[1-6]-h1-.*")
        runs = {run_id: summary for run_id, summary in shipped.items() if not other.fullmatch(run_id)}
        ledger.add_imported(
            [(summary, Path("records")) for summary in runs.values()],
            submission_id=ledger.add_submission("fastlaunch runs import"),
            run_ids=list(runs),
        )
    if not name.startswith(("runs", "status")):
        return
    scored = {"num_samples": 500, "seconds": 2.5, "metric": "accuracy"}
    parts = {"data": 0.003, "forward": 0.04, "backward": 0.06, "communication": 0.015, "other": 0.002}
    summary = changed(
        PLAIN,
        recipe="compile",
        evals=(
            Eval(step=100, split="validation", loss=None, metric_value=0.5, **scored),
            Eval(step=150, split="validation", loss=None, has_loss=False, metric_value=0.75, **scored),
            Eval(step=200, split="test", weights="best", loss=0.25, metric_value=0.9125, **scored),
        ),
        checks=(
            Check(name="equivalence", passed=True, value=0.00312, limit=0.01),
            Check(name="isolation", passed=False, detail="28 other samples changed"),
        ),
        padding_fraction=0.125,
        profile=StepProfile(num_steps=5, step_time_s=0.12, parts_s=parts, overlapped_communication_s=0.01),
    )
    job = Job(workload="vit-huge", recipe=resolve_recipe("compile"), batch_size=64, steps=200, num_gpus=1)
    ledger.add_run(
        ledger.add_submission("fastlaunch submit --local --recipe compile"),
        OWN,
        spec=job.to_json(),
        plan={"request": {"argv": ["python", "-m", "x y"]}},
        workload="vit-huge",
        recipe="compile",
        backend="local",
        directory=Path("records"),
    )
    ledger.set_state(OWN, RunState.RUNNING)
    attempt, _ = ledger.add_attempt([OWN])
    ledger.set_handle(attempt, {"pid": 5})
    ledger.set_summary(OWN, summary)
    ledger.set_state(OWN, RunState.COMPLETED)
    ledger.end_attempt(attempt, RunState.COMPLETED)
    ledger.add_imported(
        [(changed(PLAIN, step_time_s=None, status="killed", final_loss=2.5), Path("records"))],
        submission_id=ledger.add_submission("fastlaunch runs import"),
        run_ids=["vit-huge-bf16-on-a-machine-with-a-long-name"],
    )


def screens(name: str) -> dict[int, str]:
    """Return stdout and stderr of the command by the screen's columns."""
    if name == MOMENT:
        moment = view(*MANY, cost_usd=33.1)
        return {width: "".join(f"{line}\n" for line in screen_lines(moment, width, 24)) for width in WIDTHS}
    if name == "dry-run-first":
        Path(os.environ["FASTLAUNCH_CONFIG"]).write_text(CONFIG, encoding="utf-8")
    home = load_settings().home
    home.mkdir(parents=True, exist_ok=True)
    with Ledger(home / LEDGER_NAME, clock=lambda: NOW, randomness=random.Random(0)) as ledger:
        fill(ledger, name)
    found = {}
    for width in WIDTHS:
        os.environ["COLUMNS"] = str(width)
        shown = io.StringIO()
        # Inside an activity others show nothing, however slow the machine.
        with activity(name), redirect_stdout(shown), redirect_stderr(shown):
            argv = tuple(COMMANDS[name].split())
            assert run([*argv], replace(app_context(*argv), now=lambda: NOW)) == 0
        found[width] = shown.getvalue()
    return found


@pytest.mark.parametrize("name", (*COMMANDS, MOMENT))
def test_a_screen_is_the_golden_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "")
    for width, shown in screens(name).items():
        assert shown == golden(name, width).read_text(encoding="utf-8")
        lines = shown.splitlines()
        # A command is left whole, to be copied.
        whole = ("next: ", "train: ", "measure: ", "command ", "fastlaunch ")
        assert max(len(line) for line in lines if not line.lstrip().startswith(whole)) <= width
        assert len(lines) <= MAX_LINES_IN.get(name, MAX_LINES) or name in LONG


#: The most words of an answer: it is read at a glance.
MOST_WORDS = 20


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "name", [name for name in COMMANDS if name.startswith(("compare", "demo", "recommend"))]
)
def test_an_answer_is_read_at_a_glance(name: str, width: int) -> None:
    assert is_read_at_a_glance(golden(name, width).read_text(encoding="utf-8"))


def is_read_at_a_glance(shown: str) -> bool:
    """Return whether the answer is, and its second line if there is one."""
    answer = re.split(r"\.?\n(?=\n|\* )", shown)[0]
    return all(len(sentence.split()) <= MOST_WORDS for sentence in re.split(r"\.\n", answer))


@pytest.mark.parametrize(
    "options", ["--finish 10000", "--finish 1000000", "--baseline te-fp8", "--target loss=6.2"]
)
def test_an_answer_to_a_further_question_is_too(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    home = load_settings().home
    home.mkdir(parents=True)
    with Ledger(home / LEDGER_NAME, clock=lambda: NOW, randomness=random.Random(0)) as ledger:
        fill(ledger, "compare")
    argv = f"{COMMANDS['compare']} {options}".split()
    assert run(argv, replace(app_context(*argv), now=lambda: NOW)) == 0
    assert is_read_at_a_glance(capsys.readouterr().out)


def with_screens(page: str) -> str:
    """Return a page of docs/ with today's golden texts between its markers."""

    def screen(match: re.Match[str]) -> str:
        name = match[1]
        shown = golden(name, 80).read_text(encoding="utf-8").rstrip()
        first = f"$ fastlaunch {IMPORT}\n" if name.startswith("compare") else ""
        return (
            f"<!-- screen:{name} -->\n```console\n{first}$ fastlaunch {COMMANDS[name]}\n```\n\n"
            f"```text\n{shown}\n```\n<!-- /screen -->\n"
        )

    return re.sub(r"<!-- screen:(\S+) -->\n.*?<!-- /screen -->\n", screen, page, flags=re.DOTALL)


def test_the_screens_of_the_documents_are_the_golden_ones() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert any("<!-- screen:" in text for text in texts)
    assert texts == [with_screens(text) for text in texts]


def test_no_golden_screen_is_left_over() -> None:
    assert {*GOLDEN.iterdir()} == {golden(name, width) for name in (*COMMANDS, MOMENT) for width in WIDTHS}


if __name__ == "__main__":
    for each in (*COMMANDS, MOMENT):
        with tempfile.TemporaryDirectory() as home:
            os.environ |= {"FASTLAUNCH_HOME": home, "FASTLAUNCH_CONFIG": str(Path(home, "config.yaml"))}
            Path(home, "config.yaml").touch()
            for at, text in screens(each).items():
                golden(each, at).write_text(text, encoding="utf-8")
    for page in PAGES:
        page.write_text(with_screens(page.read_text(encoding="utf-8")), encoding="utf-8")
