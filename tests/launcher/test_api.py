"""`import fastlaunch`: what the commands call, from Python."""

import datetime
import importlib
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
import pandas
import pytest
from cloud_commands import configure
from fake_train.launcher import app_context

import fastlaunch
from fastlaunch import UserError
from fastlaunch.api.keywords import SubmitArguments
from fastlaunch.cli.main import fastlaunch as group
from fastlaunch.core.plan import RunState
from fastlaunch.jobs.options import arguments, command_line
from fastlaunch.ledger.ledger import open_ledger
from fastlaunch.lifecycle.announcement import DryRun
from fastlaunch.lifecycle.world import World


def test_no_subpackage_hides_a_function() -> None:
    importlib.import_module("fastlaunch.report.table")
    assert fastlaunch.report is importlib.import_module("fastlaunch.api.report").report
    rooms = {path.name for path in Path(fastlaunch.__file__).parent.iterdir()}
    assert rooms & set(fastlaunch.__all__) == {"report"}


def test_compare_says_what_it_takes() -> None:
    for selectors, options in (((["workload=vit-huge"],), {}), ((), {"usd_per_hour": "x"})):
        with pytest.raises(UserError, match=r"as text|usd_per_hour is 'x'"):
            fastlaunch.compare(*selectors, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        (
            "submit",
            {"local": True, "recipes": "fp32,bf16", "until_resolved": True, "checkpoint_every": 5, "seed": 3},
            "--local --recipe fp32,bf16 --until-resolved --checkpoint-every 5 --seed 3",
        ),
        (
            "submit",
            {
                **{"instances": ["p5.48xlarge", "p5en.48xlarge"], "max_minutes": 90, "account_timer": False},
                **{"max_cost_usd": 12.5, "tags": {"team": "vision"}, "batch_size": "auto", "nproc": "gpu"},
                **{"lists": {"amp": ["bf16", "fp32"]}, "command": "python train.py --amp {amp}"},
                **{
                    "hang_timeout_s": 600.0,
                    "subnets": {"us-east-1a": "subnet-1"},
                    "inputs": {"x": "s3://b/p"},
                },
            },
            "--instance p5.48xlarge,p5en.48xlarge --max-hours 90min --no-account-timer --max-cost 12.5 "
            "--tag team=vision --batch-size auto --nproc gpu -L amp=bf16,fp32 --hang-timeout 600 "
            "--subnet us-east-1a=subnet-1 --input x=s3://b/p -- python train.py --amp '{amp}'",
        ),
        ("submit", {"local": True, "batch_size": 64}, "--local --batch-size 64"),
        (
            "sweep",
            {"local": True, "batch_sizes": [8, "auto"], "repeats": 2},
            "--local --batch-size 8,auto --repeats 2",
        ),
        ("sweep", {"instances": "g6e.xlarge", "parallel": 2}, "--instance g6e.xlarge --parallel 2"),
    ],
)
def test_arguments_and_the_command_line_say_the_same(name: str, given: dict[str, Any], words: str) -> None:
    taken = arguments(given, function=name)
    assert shlex.join(command_line(name, taken)) == f"{name} {words}"
    with click.Context(group) as context:
        command = group.get_command(context, name)
        assert command is not None
        parsed = command.make_context(name, shlex.split(words), **group.context_settings).params
    assert {key: parsed[key] for key in taken} == taken


def test_text_means_what_the_option_means_and_numbers_what_they_are() -> None:
    given = {"batch_size": "010", "nproc": "2", "lists": {"x": ["2.10", "a,b"], "y": [1.5]}}
    taken = arguments(given, function="submit")
    assert taken == {"batch_size": 10, "nproc": 2, "lists": (r"x=2.10,a\,b", "y=1.5")}
    assert arguments({"batch_sizes": "8,auto"}, function="sweep") == {"batch_sizes": (8, "auto")}
    assert command_line("submit", {"max_cost_usd": 1234567.25})[-1] == "1234567.25"
    assert command_line("submit", {"base_image": "2.0", "max_price_usd": 3.0})[1:] == (
        *("--base-image", "2.0", "--max-price", "3"),
    )
    for wrong in (
        {"batch_size": "1:00"},
        {"nproc": "two"},
        {"max_cost_usd": math.nan},
        {"max_cost_usd": -1},
        {"num_nodes": 0},
        {"max_replacements": -1},
    ):
        with pytest.raises(UserError):
            arguments(wrong, function="submit")
    numbers: tuple[Any, ...] = ({"num_nodes": True}, {"max_minutes": "1:30"}, {"max_cost_usd": True})
    for wrong in (*numbers, {"recipes": {"bf16": 1}}, {"instances": [5]}, {"security_groups": {"a": "b"}}):
        with pytest.raises(TypeError):
            arguments(wrong, function="submit")


def test_what_a_function_does_not_have() -> None:
    with pytest.raises(TypeError, match=r"submit\(\) has no argument 'recipe': recipes\?"):
        fastlaunch.submit(recipe="bf16")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"no argument 'env': variables\?"):
        fastlaunch.submit(env={"A": "b"})  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="recipes is 5, and takes text"):
        fastlaunch.submit(recipes=5)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"submit\(\): steps is '200', and takes int | None"):
        fastlaunch.submit(local=True, steps="200")  # type: ignore[call-overload]
    assert set(dir(fastlaunch)) >= {"submit", "sweep", "compare", "runs", "prices", "UserError"}
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        _ = fastlaunch.train  # type: ignore[attr-defined]


def test_runs_are_submitted_compared_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    context = app_context()
    planned = fastlaunch.submit(local=True, recipes=["fp32", "bf16"], steps=70, dry_run=True, context=context)
    assert [job.recipe.name for job in planned.jobs] == ["fp32", "bf16"] and len(planned.plans) == 2
    assert list(fastlaunch.runs(context=context)) == []
    submitted = fastlaunch.submit(local=True, recipes="fp32,bf16", steps=70, repeats=2, context=context)
    assert [run.state for run in submitted.runs] == [RunState.COMPLETED] * 4
    assert (submitted.exit_code, submitted.is_stopped) == (0, False)
    comparison = fastlaunch.compare(context=context)
    assert [row.setup.recipe for row in comparison.rows] == ["fp32", "bf16"]
    assert str(comparison).startswith(f"{comparison.answer}\n\n") and "fp32" in comparison.answer
    assert comparison.to_json()["rows"][0]["num_runs"] == 2
    found = fastlaunch.runs("recipe=fp32", context=context)
    assert {run.recipe for run in found} == {"fp32"} and found[0].id == submitted.runs[0].id
    for table, columns in (
        (found.to_pandas(), {"id", "state", "step_time_s"}),
        (comparison.to_pandas(), {"recipe", "samples_per_s", "samples_per_s_low", "verdict"}),
        (fastlaunch.prices("p5*").to_pandas(), {"instance", "usd_per_hour", "source"}),
    ):
        assert isinstance(table, pandas.DataFrame) and columns <= set(table.columns) and len(table)
    # Data go to the caller, and progress to stderr.
    out, err = capsys.readouterr()
    assert out == "" and "[4/4]" in err


def test_prices_are_those_of_the_command_and_unknown_ones_an_error() -> None:
    (price,) = fastlaunch.prices(
        "p5.48xlarge", service="ec2", region="us-east-1", as_of=datetime.date(2026, 1, 1)
    )
    assert price.usd_per_hour > 0 and price.as_of <= datetime.date(2026, 1, 1)
    with pytest.raises(UserError, match="p99"):
        fastlaunch.prices("p99.48xlarge")


def test_a_command_line_from_python_is_stored_and_goes_on() -> None:
    context = app_context(*command_line("sweep", {"local": True, "recipes": ("fp32", "bf16"), "steps": 70}))
    swept = fastlaunch.sweep(local=True, recipes=["fp32", "bf16"], steps=70, repeats=1, context=context)
    assert swept.comparison is not None and set(swept.by_part) == {"this machine"}
    again = fastlaunch.sweep(resume="", context=app_context())
    assert (again.id, [run.id for run in again.runs]) == (swept.id, [run.id for run in swept.runs])
    with pytest.raises(UserError, match="goes on with a sweep as it was typed"):
        fastlaunch.sweep(resume=swept.id, local=True, context=app_context())
    with open_ledger(context.settings) as ledger:
        command = ledger.command_of(swept.runs[0].submission_id)
    assert command == "fastlaunch sweep --local --recipe fp32,bf16 --steps 70"


def test_money_is_not_spent_unless_the_caller_says_so(isolated: Path) -> None:
    configure(
        isolated, bucket="acme", instance_profile="train", scheduler_role="arn:aws:iam::123456789012:role/s"
    )

    def submit(context: World | None = None, **how: Any) -> Any:
        return fastlaunch.submit(instances="p5.48xlarge", max_minutes=30, context=context, **how)

    planned = submit(dry_run=True)
    assert isinstance(planned, DryRun) and planned.ceiling and planned.ceiling.usd > 0
    assert planned.plans[0].operation == "RunInstances" and not planned.lacks_scheduler
    with pytest.raises(UserError, match="no terminal to ask on") as raised:
        submit()
    assert "yes=True in Python" in (raised.value.hint or "")
    with pytest.raises(UserError, match="may cost"):
        submit(yes=True, max_cost_usd=1.0)
    assert get_args(get_type_hints(SubmitArguments)["max_cost_usd"]) == (float, type(None))


@pytest.mark.parametrize("given", [{"yes": "no"}, {"yes": 1}, {"dry_run": "no"}])
@pytest.mark.parametrize("function", [fastlaunch.submit, fastlaunch.sweep])
def test_no_word_agrees_to_spend(function: Callable[..., object], given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="not a bool"):
        function(instances="p5.48xlarge", **given)
