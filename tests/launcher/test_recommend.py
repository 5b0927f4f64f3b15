"""`fastlaunch recommend`: the article's decisions, the choice under limits, and what is worth measuring."""

import csv
import datetime
import io
import json
import math
import re
import shlex
import tarfile
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ec2_builders import IMAGE
from fake_summaries import (
    CATALOGUE,
    LLAMA_8B,
    P5_NODE,
    PLAIN,
    changed,
    compared,
    evaluated,
    imported,
    on_p5,
    price_of,
)

import fastlaunch
from fastlaunch.analysis.configurations import Configuration, Scope, configurations
from fastlaunch.analysis.cost import Assumptions, Purchase, cost_of, training_of
from fastlaunch.analysis.memory import FINE_TUNING, ModelSize
from fastlaunch.analysis.rate import (
    Evidence,
    Finder,
    Origin,
    Query,
    Rate,
    peak_flops,
    subject_of,
    times_as_fast,
)
from fastlaunch.analysis.recommend import (
    Choices,
    Limits,
    Task,
    chance_of_cheapest,
    choices_of,
    expected_saving,
    recommend,
)
from fastlaunch.catalog.updates import MARKET_PRICES, MarketPrice, write_market
from fastlaunch.cli.main import run
from fastlaunch.core.errors import UserError
from fastlaunch.core.home import make_folder
from fastlaunch.core.paths import shipped
from fastlaunch.core.settings import config_path, load_settings
from fastlaunch.core.terminal import filled
from fastlaunch.jobs.job import SCRIPT_RECIPE
from fastlaunch.lifecycle.model_size import counted_size, model_size
from fastlaunch.lifecycle.world import default_context as fastlaunch_world
from fastlaunch.measure.published import shipped_workloads
from fastlaunch.measure.summary import Interval
from fastlaunch.report.recommendation import as_text, why
from fastlaunch.report.text import MOST_WORDS
from fastlaunch_train.recipes.recipes import RECIPES, recipe_of

ARTICLE = (
    *("--workload", "vit-huge", "--samples", "100M", "--batch-equivalent", "--steps-only"),
    "--measured-only",
)
P5, P4D = "p5.48xlarge", "p4d.24xlarge"
MEASUREMENTS = Path(__file__).parents[2] / "train" / "measurements"


def data(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    """What `recommend --output json` prints."""
    capsys.readouterr()
    code = run(["recommend", *argv, "--output", "json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (1 if found["pick"] is None else 0)
    return found


@pytest.fixture
def published() -> None:
    """The published figures alone in the ledger, so that others keep the global batch of their bf16."""
    assert run(["runs", "import", "--published"]) == 0


def on_article_s(found: Any) -> list[Any]:
    """The cheapest choices on its two instance types, the cheaper first."""
    return [choice for choice in found["by_instance"] if choice["instance"] in (P5, P4D)]


@pytest.mark.parametrize(
    ("day", "excluded", "pick", "runner_up", "ratio"),
    [
        ("2023-11-15", (), (P5, "te-article-fp8", 128), (P4D, "te-article", 64), 1 / 0.978),
        ("2023-11-15", ("te-article-fp8",), (P4D, "te-article", 64), (P5, "te-article", 128), 1.22),
        ("2026-07-20", (), (P5, "te-article-fp8", 128), (P4D, "te-article", 64), 1 / 0.817),
        ("2026-07-20", ("te-article-fp8",), (P4D, "te-article", 64), (P5, "te-article", 128), 1.021),
    ],
)
def test_the_articles_decisions(
    day: str,
    excluded: tuple[str, ...],
    pick: tuple[str, str, int],
    runner_up: tuple[str, str, int],
    ratio: float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    without = [word for name in excluded for word in ("--exclude-recipe", name)]
    found = data(capsys, *ARTICLE, "--allow-unverified", "--prices-as-of", day, *without)
    first, second = on_article_s(found)
    for choice, expected in ((first, pick), (second, runner_up)):
        assert (choice["instance"], choice["recipe"], choice["batch_size_per_gpu"]) == expected
        assert (choice["num_nodes"], choice["purchase"], choice["evidence"]) == (1, "on-demand", "published")
        assert choice["usd"] == pytest.approx(choice["hours"] * choice["usd_per_hour"])
    assert second["usd"] / first["usd"] == pytest.approx(ratio, rel=0.002)


def test_what_is_not_equivalent_is_left_out_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, *ARTICLE, "--prices-as-of", "2023-11-15")
    first, _ = on_article_s(found)
    assert (first["instance"], first["recipe"]) == (P4D, "bf16")
    reasons = {(each["instance"], each["recipe"]): each["reason"] for each in found["left_out"]}
    for place, recipe in ((P4D, "te-article"), (P5, "te-article"), (P5, "te-article-fp8")):
        assert "known not to be equivalent" in reasons[place, recipe]


@pytest.mark.usefixtures("published")
def test_another_global_batch_is_left_out_unless_a_sample_counts_as_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [word for word in ARTICLE if word != "--batch-equivalent"]
    found = data(capsys, *words, "--allow-unverified", "--prices-as-of", "2023-11-15")
    assert found["reference"] == {"recipe": "bf16", "global_batch": 512}
    first, _ = on_article_s(found)
    assert (first["instance"], first["recipe"]) == (P4D, "te-article")
    reasons = {each["recipe"]: each["reason"] for each in found["left_out"] if each["instance"] == P5}
    assert reasons["te-article-fp8"].startswith("global batch 1024, not 512 as bf16")


def test_measurements_that_are_shipped_or_imported_keep_one_global_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--workload", "vit-huge", "--samples", "100M")
    shipped = data(capsys, *words)
    assert run(["runs", "import", str(MEASUREMENTS / "vit-huge-fused-h100")]) == 0
    imported = data(capsys, *words)
    # The published figures were on an instance type, with another batch.
    assert shipped["reference"] == imported["reference"] == {"recipe": "bf16", "global_batch": 256}
    for name in ("instance", "recipe", "batch_size_per_gpu"):
        assert shipped["pick"][name] == imported["pick"][name], name


@pytest.mark.parametrize(("steps_only", "cheapest"), [(True, P5), (False, P4D)])
def test_boot_time_flips_the_decision_for_a_short_job(
    steps_only: bool, cheapest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What comes before the steps costs three times as much on p5, whose steps are 2.2% cheaper."""
    words = [word for word in ARTICLE if word not in ("--steps-only", "100M")]
    words.insert(words.index("--samples") + 1, "10M")
    found = data(
        capsys,
        *[*words, "--allow-unverified", "--prices-as-of", "2023-11-15"],
        *(["--steps-only"] if steps_only else []),
    )
    assert on_article_s(found)[0]["instance"] == cheapest


# A choice among made-up configurations.

DAY = datetime.date(2026, 11, 21)
JOB = Task(
    workload="vit-huge",
    samples=3.6e6,
    like=PLAIN,
    own_region="us-east-1",
    assumptions=Assumptions(),
    steps_only=True,
)


def configuration(
    instance: str,
    samples_per_s: float,
    *,
    recipe: str = "bf16",
    num_nodes: int = 1,
    batch_size_per_gpu: int = 64,
    deviation: float | None = None,
    by: str | None = None,
) -> Configuration:
    """A configuration, measured unless it is predicted `by` a class; 1,000 samples/s make the job one hour.

    deviation: of the logarithm of its speed.
    """
    speed = Interval(value=samples_per_s)
    if deviation:
        half = math.exp(1.645 * deviation)
        mean = math.exp(deviation**2 / 2)
        speed = Interval(value=samples_per_s / mean, low=samples_per_s / half, high=samples_per_s * half)
    query = Query(
        instance=CATALOGUE.instance(instance),
        num_nodes=num_nodes,
        recipe=recipe_of(recipe) or recipe,
        batch_size_per_gpu=batch_size_per_gpu,
        precision="bf16",
    )
    return Configuration(
        query=query,
        rate=Rate(
            samples_per_s=speed,
            evidence=Evidence.PREDICTED if by else Evidence.MEASURED,
            prediction_class=by,
        ),
    )


def bought(instance: str, usd_per_hour: float, **changes: Any) -> Purchase:
    return Purchase(price=price_of(usd_per_hour, instance=instance, as_of=DAY, **changes))


def chosen(*choices: tuple[Configuration, Purchase], job: Task = JOB) -> Choices:
    return choices_of([one for one, _ in choices], list(dict.fromkeys(other for _, other in choices)), job)


CHEAP = (configuration("g6e.xlarge", 100), bought("g6e.xlarge", 2.0))  # 10 h, $20
MIDDLE = (configuration("p5.4xlarge", 500), bought("p5.4xlarge", 12.0))  # 2 h, $24
FAST = (configuration("p5.48xlarge", 2000), bought("p5.48xlarge", 60.0))  # 0.5 h, $30
POOR = (configuration("p4d.24xlarge", 400), bought("p4d.24xlarge", 20.0))  # 2.5 h, $50


def test_a_budget_of_what_is_shown_is_enough() -> None:
    for shown, usd in ((195.31, 195.3149), (1062.0, 1062.4)):
        assert Limits(budget_usd=shown).keep(usd, 1.0)
        assert not Limits(budget_usd=shown - (1 if shown > 999 else 0.01)).keep(usd, 1.0)


@pytest.mark.parametrize(
    ("limits", "pick"),
    [
        (Limits(), "g6e.xlarge"),
        (Limits(deadline_hours=9.9), "p5.4xlarge"),
        (Limits(deadline_hours=1), "p5.48xlarge"),
        (Limits(deadline_hours=1, budget_usd=29), None),
        (Limits(budget_usd=19), None),
    ],
)
def test_the_pick_is_the_cheapest_within_the_limits(limits: Limits, pick: str | None) -> None:
    found = recommend(chosen(CHEAP, MIDDLE, FAST, POOR), limits)
    assert (found.pick and found.pick.instance) == pick
    if pick is None:
        assert found.runner_up is found.break_even is found.experiment is found.command is None


def test_one_gpu_is_given_no_recipe_of_several() -> None:
    """Its gradients go nowhere, in buckets of whatever size."""
    imported(on_p5(0.2, workload="vit-tiny", recipe="bf16 ddp_bucket_mb=4096"))
    cheapest = fastlaunch.recommend("vit-tiny", "100M").by_instance
    used = {choice.configuration.query.num_gpus for choice in cheapest}
    assert used and min(used) > 1


@pytest.mark.parametrize(
    ("accelerator", "precision", "tflops"),
    [("H100", "fp8", 1978.9), ("L4", "tf32", 60), ("L4", "fp32", 30.3), ("A10G", "bf16", 70)],
)
def test_a_peak_is_the_formats(accelerator: str, precision: str, tflops: float) -> None:
    """Also of a format that the price file does not name."""
    assert peak_flops(CATALOGUE.accelerators[accelerator], precision) == pytest.approx(0.75e12 * tflops)


def test_the_front_has_what_nothing_else_beats_in_both() -> None:
    found = recommend(chosen(POOR, FAST, CHEAP, MIDDLE), Limits())
    assert [choice.instance for choice in found.front] == ["g6e.xlarge", "p5.4xlarge", "p5.48xlarge"]


def test_a_deadline_holds_for_the_upper_end_of_a_prediction() -> None:
    # 8 h expected, 15 h at the upper end.
    likely = configuration("g6e.xlarge", 125, by="B", deviation=0.4)
    choices = chosen((likely, CHEAP[1]), MIDDLE)
    assert choices[0].hours == pytest.approx(8 * math.exp(0.4**2 / 2))
    assert choices[0].total.hours.high == pytest.approx(8 * math.exp(1.645 * 0.4))
    found = recommend(choices, Limits(deadline_hours=10))
    assert found.pick is not None
    assert found.pick.instance == "p5.4xlarge"


@pytest.mark.parametrize(
    ("samples_per_s", "by", "deviation", "pick", "rival"),
    [
        (125, "B", 0.4, "p5.4xlarge", "g6e.xlarge"),  # $17 expected and $31 at most, against $24 as measured
        (125, "B", 0.1, "g6e.xlarge", None),  # $19 at most
        (80, "B", 0.4, "p5.4xlarge", "g6e.xlarge"),  # dearer as expected, and perhaps $13
        (80, "B", 0.01, "p5.4xlarge", None),  # $25 at least
        (90, None, 0.2, "g6e.xlarge", None),  # measured like the other
    ],
)
def test_of_choices_that_may_be_the_cheapest_the_best_known_is_the_pick(
    samples_per_s: float, by: str | None, deviation: float, pick: str, rival: str | None
) -> None:
    other = configuration("g6e.xlarge", samples_per_s, by=by, deviation=deviation)
    found = recommend(chosen((other, CHEAP[1]), MIDDLE), Limits())
    assert found.pick is not None and found.pick.instance == pick
    assert (found.rival and found.rival.choice.instance) == rival
    if found.rival:
        # Two minutes of the predicted one, for $2 an hour, after its start.
        assert 2 * 2 / 60 < found.rival.usd < 2


def test_at_the_break_even_price_another_instance_type_costs_the_same() -> None:
    """Of the pick's configurations the whole costs change with its price: $10 more for its ten hours."""
    job = replace(JOB, steps_only=False)
    choices = chosen(CHEAP, MIDDLE, FAST, job=job)
    found = recommend(choices, Limits())
    assert found.break_even is not None
    at_that_price = choices_of([CHEAP[0]], [bought("g6e.xlarge", found.break_even.usd_per_hour)], job)
    assert at_that_price[0].usd == pytest.approx(choices[1].usd)


def test_the_runner_up_is_another_instance_recipe_or_purchase_option() -> None:
    in_parts = configuration("g6e.xlarge", 99, batch_size_per_gpu=128, recipe="bf16 grad_accumulation=2")
    larger = (in_parts, CHEAP[1])
    elsewhere = (CHEAP[0], bought("g6e.xlarge", 2.0, region="us-west-2"))
    found = recommend(chosen(CHEAP, larger, elsewhere, MIDDLE), Limits())
    assert found.runner_up is not None
    assert found.runner_up.instance == "p5.4xlarge"
    spot = (CHEAP[0], bought("g6e.xlarge", 2.1, purchase="spot"))
    found = recommend(chosen(CHEAP, spot, MIDDLE), Limits())
    assert found.runner_up is not None
    assert found.runner_up.purchase.price.purchase == "spot"


def test_what_is_paid_already_costs_nothing_more_and_is_picked() -> None:
    sunk = replace(FAST[1], usd_per_hour=0.0)
    found = recommend(chosen(CHEAP, (FAST[0], sunk), MIDDLE), Limits())
    assert found.pick is not None and found.break_even is not None
    assert (found.pick.instance, found.pick.usd, found.experiment) == (P5, 0.0, None)
    # For $20, as g6e.xlarge costs, half an hour may cost $40 an hour.
    assert found.break_even.usd_per_hour == pytest.approx(40.0)


def test_the_totals_of_a_grid_are_those_of_the_costs_part_by_part() -> None:
    rates = [
        bought(name, usd, region=region)
        for name, usd in (("p5.48xlarge", 60.0), ("p5.4xlarge", 7.0))
        for region in ("us-east-1", "us-west-2")
    ]
    ways = [
        configuration(name, rate, num_nodes=nodes, deviation=deviation, by=by)
        for name, rate, nodes, (deviation, by) in product(
            ("p5.48xlarge", "p5.4xlarge"), (10, 1000), (1, 3), ((None, None), (0.1, "A"), (0.5, "C"))
        )
    ]
    for steps_only in (True, False):
        job = replace(JOB, steps_only=steps_only)
        choices = choices_of(ways, rates, job)
        assert len(choices) == 2 * len(ways)
        for at, choice in enumerate(map(choices.__getitem__, range(len(choices)))):
            parts = cost_of(
                training_of(
                    choice.configuration.rate,
                    choice.configuration.query.recipe,
                    Interval(value=job.samples),
                    num_nodes=choice.configuration.query.num_nodes,
                    global_batch=choice.configuration.global_batch,
                ),
                choice.purchase,
                assumptions=job.assumptions,
                steps_only=steps_only,
            )
            assert choice.usd == pytest.approx(sum(part.usd.value for part in parts.parts))
            assert choice.total.hours == parts.hours
            for column, quantity in ((choices.usd, choice.total.usd), (choices.hours, choice.total.hours)):
                ends = [quantity.value if end is None else end for end in (quantity.low, quantity.high)]
                assert column[:, at] == pytest.approx([quantity.value, *ends])


# What follows from measured configurations.


@pytest.mark.parametrize(
    ("two_nodes_s", "scaling", "speed", "whose"),
    [
        (None, None, 4 * 0.95**2, "an assumption"),
        (0.512 / 0.9, None, 4 * 0.9**2, "as measured on other nodes"),
        (0.512 / 0.9, 0.8, 4 * 0.9 * 0.8, "as given"),
    ],
)
def test_several_nodes_are_nearly_linear_by_assumption_or_by_runs(
    two_nodes_s: float | None, scaling: float | None, speed: float, whose: str
) -> None:
    pair = {"num_nodes": 2, "num_gpus": 16, "samples_per_step": 1024.0}
    rows = compared(on_p5(0.512), *([on_p5(two_nodes_s, **pair)] if two_nodes_s else [])).rows
    subject = subject_of("vit-huge", rows, rows[0].setup, CATALOGUE)
    finder = Finder({Origin.LEDGER: rows}, subject, CATALOGUE, lambda: (), scaling=scaling)
    found = finder.rate(
        Query(
            instance=CATALOGUE.instance(P5),
            num_nodes=4,
            recipe=RECIPES["bf16"],
            batch_size_per_gpu=64,
            precision="bf16",
        )
    )
    assert isinstance(found, Rate)
    assert (found.evidence, found.prediction_class) == (Evidence.PREDICTED, "A")
    assert found.samples_per_s.value == pytest.approx(1000 * speed, rel=0.01)
    assert found.assumption is not None and found.assumption.endswith(whose)


def test_what_does_not_fit_in_memory_or_has_no_efa_is_left_out() -> None:
    # 44 GiB and 0.25 for each sample.
    sizes = ((64, 60.0), (128, 76.0))
    rows = compared(
        *(on_p5(0.5, batch_size_per_gpu=batch, peak_memory_gib=peak_gib) for batch, peak_gib in sizes)
    ).rows
    subject = replace(subject_of("vit-huge", rows, rows[0].setup, CATALOGUE), params=None)
    finder = Finder({Origin.LEDGER: rows}, subject, CATALOGUE, lambda: ())
    left_out: list[Any] = []
    kinds = [CATALOGUE.instances[name] for name in ("g6e.xlarge", "g5.xlarge")]
    scope = Scope(max_nodes=2)
    configurations(finder, subject, rows, (), rows[0].setup, scope, left_out, {}, kinds, CATALOGUE)
    reasons = {(each.instance, each.recipe): each.reason for each in left_out}
    assert reasons["g6e.xlarge", "bf16"] == (
        "does not fit in memory: one sample needs 44.2 GiB, and 41.1 can be used"
    )
    assert reasons["g5.xlarge", None] == "several nodes need EFA, which it does not have"


# What is worth measuring.


@pytest.mark.parametrize("usd", [50.0, 100.0, 130.0])
def test_the_value_of_a_measurement_is_that_of_draws(usd: float) -> None:
    deviation, against_usd, num = 0.4, 100.0, 4001
    # The quantiles of the lognormal cost whose mean is `usd`.
    from statistics import NormalDist

    z = [NormalDist().inv_cdf((k + 0.5) / num) for k in range(num)]
    costs = [usd * math.exp(deviation * each - deviation**2 / 2) for each in z]
    below = [max(0.0, against_usd - cost) for cost in costs]
    at_most = [max(0.0, against_usd - cost) for cost in costs if cost < 80]
    probability, saving = expected_saving(usd, deviation, against_usd, at_most=80.0)
    assert probability == pytest.approx(sum(cost < 80 for cost in costs) / num, abs=1e-3)
    assert saving == pytest.approx(sum(at_most) / num, rel=1e-2)
    probability, saving = expected_saving(usd, deviation, against_usd)
    assert probability == pytest.approx(sum(cost < against_usd for cost in costs) / num, abs=1e-3)
    assert saving == pytest.approx(sum(below) / num, rel=1e-2)
    probability, saving = expected_saving(usd, deviation, against_usd, dearer=True)
    assert probability == pytest.approx(sum(cost > against_usd for cost in costs) / num, abs=1e-3)
    assert saving == pytest.approx(sum(max(0.0, cost - against_usd) for cost in costs) / num, rel=1e-2)


def test_the_chance_of_being_the_cheapest_is_that_of_draws() -> None:
    costs = [(100.0, 0.1), (110.0, 0.2), (130.0, 0.3)]
    draws = np.random.default_rng(1).standard_normal((200_000, 3))
    means, deviations = np.array(costs).T
    drawn = means * np.exp(deviations * draws - deviations**2 / 2)
    share = float((drawn.argmin(axis=1) == 0).mean())
    others = [(*cost, math.inf) for cost in costs[1:]]
    assert chance_of_cheapest(*costs[0], others) == pytest.approx(share, abs=5e-3)
    assert chance_of_cheapest(50.0, 0.1, [(50.0, 0.1, math.inf)]) == pytest.approx(0.5)
    assert chance_of_cheapest(50.0, 0.1, [(50.0, 0.1, 30.0)]) == pytest.approx(1.0)
    assert chance_of_cheapest(0.0, 0.1, others) == 1
    assert chance_of_cheapest(1.0, 0.1, [(0.0, 0.1, math.inf)]) == 0


def test_predictions_that_err_alike_leave_open_what_machines_differ_by() -> None:
    job, rates = replace(JOB, samples=3.6e9), [CHEAP[1]]
    one, other = (
        configuration("g6e.xlarge", speed, recipe=recipe, by="C", deviation=0.3)
        for recipe, speed in {"compile": 50, "bf16": 49}.items()
    )
    found = recommend(choices_of([one, other], rates, job), Limits())
    assert found.chance is not None and 0.7 < found.chance < 0.9


def test_a_wide_prediction_near_the_pick_is_measured_and_a_narrow_one_far_off_is_not() -> None:
    job = replace(JOB, samples=3.6e9)
    wide = configuration("g5.xlarge", 50, by="C", deviation=0.5)  # $22,000 or so against $20,000
    rates = [CHEAP[1], bought("g5.xlarge", 1.0)]
    found = recommend(choices_of([CHEAP[0], wide], rates, job), Limits())
    assert found.pick is not None and found.experiment is not None
    assert found.pick.instance == "g6e.xlarge"
    assert found.experiment.choice.instance == "g5.xlarge"
    assert 0.3 < found.experiment.probability < 0.6
    assert found.experiment.saves_usd > 1000 > 10 > found.experiment.usd
    # The same, but so short that the saving is not worth a person's time.
    short = recommend(choices_of([CHEAP[0], wide], rates, replace(job, samples=4e6)), Limits())
    assert short.experiment is not None and found.proposed is found.experiment and short.proposed is None
    assert as_text(short, width=120).startswith("Train on g6e.xlarge")
    assert as_text(found, width=120).startswith("Best so far is g6e.xlarge")
    # The pick stays the cheapest unless a measurement would change it.
    known = configuration("g6e.xlarge", 25, deviation=0.01)
    ranged = recommend(choices_of([known, wide], rates, job), Limits())
    assert ranged.experiment is not None and ranged.chance == pytest.approx(
        1 - ranged.experiment.probability, abs=0.02
    )
    # What is likely to be late is counted as far as it would be in time.
    hours = found.pick.hours
    late = recommend(choices_of([known, wide], rates, job), Limits(deadline_hours=1.1 * hours))
    assert late.experiment is None or late.experiment.probability < ranged.experiment.probability
    narrow = configuration("g5.xlarge", 25, by="A", deviation=0.05)
    found = recommend(choices_of([CHEAP[0], narrow], rates, job), Limits())
    assert found.experiment is None


def test_the_command_of_a_script_has_its_variant_and_where_it_runs() -> None:
    job = replace(
        JOB,
        like=changed(PLAIN, precision=SCRIPT_RECIPE.precision, variant={"amp": "fp32"}),
        scripts={"amp=bf16": ("--", "python", "train.py", "--amp", "{amp}")},
        variants={"amp=bf16": {"amp": "bf16"}},
    )
    nodes = configuration(P5, 1000, recipe="amp=bf16", num_nodes=2)
    found = recommend(choices_of([nodes], [bought(P5, 60.0, region="us-west-2")], job), Limits())
    assert found.command == (
        "fastlaunch submit --instance p5.48xlarge --region us-west-2 --num-nodes 2 --max-hours 2 -L amp=bf16"
        " -- python train.py --amp '{amp}'"
    )


# The command line.


def test_the_ledgers_rows_come_before_those_that_are_shipped(capsys: pytest.CaptureFixture[str]) -> None:
    imported(on_p5(0.1))
    found = data(capsys, "--workload", "vit-huge", "--samples", "1M", "--measured-only")
    assert found["measured"] == "ledger"
    (here,) = (choice for choice in found["by_instance"] if choice["instance"] == P5)
    assert (here["evidence"], here["samples_per_s"]["value"]) == ("measured", pytest.approx(5120.0))
    assert "your" in here["source"]


def test_only_the_version_of_a_script_that_ran_last_is_recommended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The faster variant is of a version that is gone: the script does not have it any more."""
    script = {"workload": "a/train.py", "precision": SCRIPT_RECIPE.precision, "data": "script"}
    imported(
        *(
            on_p5(
                time_s,
                **script,
                recipe=f"{name}=bf16",
                variant={name: "bf16"},
                fingerprint={"version": version},
                started_at=f"2026-11-0{day}T09:00:00+00:00",
            )
            for name, version, time_s, day in (("amp", "old", 0.1, 1), ("precision", "new", 0.2, 2))
        )
    )
    found = data(capsys, "--workload", "a/train.py", "--samples", "1M", "--measured-only")
    assert (found["num_candidates"], found["pick"]["recipe"]) == (1, "precision=bf16")
    assert [warning for warning in found["warnings"] if "earlier versions of a/train.py" in warning]


def test_another_batch_counts_by_the_samples_that_three_seeds_took_to_the_references_loss(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At batch 512 all seeds reach a loss of 2 after 100 steps, at 1024 after 73: 1.46 times the samples."""
    small = {**P5_NODE, "step_time_s": Interval(value=0.2)}
    large = {**P5_NODE, "step_time_s": Interval(value=0.25), "batch_size_per_gpu": 128}
    large["samples_per_step"] = 1024.0
    *two, third = (evaluated("bf16", seed, 1.8, **large) for seed in range(3))
    imported(*(evaluated("bf16", seed, 2.0, **small) for seed in range(3)), *two)
    words = ("--workload", "vit-huge", "--samples", "100M", "--measured-only", "--steps-only")

    def chosen_here(*options: str) -> Any:
        choices = data(capsys, *words, *options)["by_instance"]
        return next(choice for choice in choices if choice["instance"] == P5)

    assert chosen_here()["batch_size_per_gpu"] == 64
    imported(third)
    found = chosen_here()
    factor = 73 * 1024 / (100 * 512)
    assert found["batch_size_per_gpu"] == 128
    assert found["hours"] == pytest.approx(100e6 * factor / 4096 / 3600)
    assert f"{factor:.2f} times the samples" in found["assumption"]
    assert chosen_here("--batch-equivalent")["hours"] == pytest.approx(100e6 / 4096 / 3600)


def test_small_cards_are_predicted_with_their_class_and_range(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, "--workload", "vit-huge", "--samples", "100M", "--prices-as-of", "2026-07-20")
    by_instance = {choice["instance"]: choice for choice in found["by_instance"]}
    assert {"g5.xlarge", "g6.xlarge", "g6e.xlarge", "p5.4xlarge"} <= by_instance.keys()
    small = by_instance["g5.xlarge"]
    assert small["evidence"] == "predicted" and small["prediction_class"] in ("B", "C")
    # Its peak bounds the speed.
    assert small["usd_low"] <= small["usd"] < small["usd_high"]
    # The same global batch as the reference's, in parts that fit in 24 GB.
    assert small["batch_size_per_gpu"] == small["global_batch"] == found["reference"]["global_batch"]
    assert "grad_accumulation=" in small["recipe"]
    assert by_instance["p5.4xlarge"]["evidence"] == "same GPU"
    reasons = {(each["instance"], each["recipe"]): each["reason"] for each in found["left_out"]}
    assert reasons[P4D, "te-fp8"] == "FP8 needs compute capability 8.9 (Ada), and A100 40GB has 8.0"
    assert reasons["trn1.32xlarge", None] == "Trainium1 is not an NVIDIA GPU"


@pytest.mark.parametrize(
    ("workload", "options"),
    [
        ("vit-huge", ("--max-nodes", "2", "--deadline", "4h")),
        # There fp8-fused would be the cheapest, with too few samples on each GPU.
        ("vit-huge", ("--max-nodes", "4", "--deadline", "3h")),
        ("gpt2-xsmall", ()),
        ("distilbert-imdb", ()),
        ("timm:resnet50", ()),
    ],
)
def test_the_commands_are_taken_by_submit(
    workload: str,
    options: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    sizes: dict[str, Any],
    tmp_path: Path,
) -> None:
    sizes["timm:resnet50"] = {"num_parameters": 25_557_032, "flops_per_sample": 24_400_000_000}
    found = data(capsys, "--workload", workload, "--samples", "100M", *options)
    assert found["pick"]["num_nodes"] <= 4
    commands = [found["command"], *([each["command"]] if (each := found["next_experiment"]) else [])]
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("To train, or not to train.\n" * 100)
    filled = {
        "URI@sha256:...": IMAGE,
        "file:PATH": f"file:{corpus}",
        "train=s3://BUCKET/PREFIX": "train=s3://acme-data/train",
    }
    for command in commands:
        words = [filled.get(text, text) for text in shlex.split(command)]
        assert run([*words[1:], "--dry-run"]) == 0
    # A training reads data and keeps checkpoints; a measurement does neither.
    assert [("--data " in command, "--checkpoint-every" in command) for command in commands] == [
        (True, True),
        *([(False, False)] * len(commands[1:])),
    ]


def test_a_sample_of_fewer_tokens_takes_less_time_on_every_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    def tokens_per_s(length: int) -> dict[str, float]:
        of_8b = ("--workload", "hf-lora:llama-3.1-8b", "--tokens", "50M", "--sequence-length", str(length))
        choices = data(capsys, *of_8b)["by_instance"]
        return {choice["instance"]: choice["tokens_per_s"]["value"] for choice in choices}

    usual, short = tokens_per_s(4096), tokens_per_s(512)
    for instance, per_s in usual.items():
        # Eight times less would be as if a short sample took as long as a long one.
        assert per_s / 4 < short[instance] < 2 * per_s, instance


def test_no_command_is_printed_that_submit_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Four steps give no step time, but a loss on held-out data.
    short = data(capsys, "--workload", "vit-huge", "--samples", "1k")["command"]
    assert short.endswith("--steps 4 --max-hours 1 --checkpoint-every 4 --eval-every 4")
    words = [text.replace("BUCKET/PREFIX", "acme/train") for text in shlex.split(short)]
    assert run([*words[1:], "--dry-run"]) == 0
    assert data(capsys, "--workload", "vit-huge", "--samples", "100G")["command"] is None
    _, whole = screen(capsys, "--workload", "vit-huge", "--samples", "100G")
    assert "no command: the training may take longer than the 30 days" in " ".join(whole.split())
    # A script of which only figures are known.
    table = tmp_path / "figures.csv"
    header = "workload,instance,num_nodes,recipe,batch_size_per_gpu,num_gpus,step_time_s,measured_on,source"
    rows = [f"train.py,p5.48xlarge,1,x={n},64,8,{0.4 - n / 10},2026-07-01,mine" for n in (1, 2)]
    table.write_text("\n".join([header, *rows]) + "\n")
    assert run(["runs", "import", str(table)]) == 0
    found = data(capsys, "--workload", "train.py", "--samples", "100M")
    assert found["pick"] and found["command"] is None


def test_a_model_that_nobody_ran_is_predicted_by_its_size(
    capsys: pytest.CaptureFixture[str], sizes: dict[str, Any]
) -> None:
    usd = []
    for num_parameters in (124_000_000, 355_000_000):
        name = f"hf-clm:./gpt2-{num_parameters}"
        flops = 6 * num_parameters * 1024
        sizes[name] = {
            "num_parameters": num_parameters,
            "flops_per_sample": flops,
            "tokens_per_sample": 1024,
        }
        found = data(capsys, "--workload", name, "--samples", "1M")
        assert found["pick"]["evidence"] == "predicted" and found["sample_unit"] == "sequences"
        usd.append(found["pick"]["usd"])
    assert 1.5 < usd[1] / usd[0] < 5
    sizes.clear()
    # Its size is kept: no second count.
    assert data(capsys, "--workload", "hf-clm:./gpt2-124000000", "--samples", "1M")["pick"]["usd"] == usd[0]


def test_a_length_in_tokens_is_one_in_samples(
    capsys: pytest.CaptureFixture[str], sizes: dict[str, Any]
) -> None:
    sizes["hf-clm:./gpt2"] = {
        "num_parameters": 124_000_000,
        "flops_per_sample": 6 * 124_000_000 * 1024,
        "tokens_per_sample": 1024,
    }
    of_gpt2 = ("--workload", "hf-clm:./gpt2", "--exclude-recipe", "fp16")
    by_samples = data(capsys, *of_gpt2, "--samples", "10k")["pick"]
    found = data(capsys, *of_gpt2, "--tokens", "10.24M")
    assert found["samples"] == 10_000
    assert found["pick"] == by_samples
    assert by_samples["usd_per_million_tokens"] == pytest.approx(by_samples["usd"] / 10.24)
    assert by_samples["tokens_per_s"]["value"] == pytest.approx(1024 * by_samples["samples_per_s"]["value"])
    found = data(capsys, *of_gpt2, "--tokens", "10.24M", "--sequence-length", "512")
    assert found["samples"] == 20_000
    assert "--sequence-length 512" in found["command"]
    assert run(["recommend", *of_gpt2]) == 2
    assert "give one of --samples and --tokens" in capsys.readouterr().err
    assert run(["recommend", "--workload", "vit-huge", "--tokens", "1M"]) == 2
    assert "the tokens of a sample of vit-huge are not known" in capsys.readouterr().err


def test_fine_tuning_is_weighed_where_its_memory_fits(
    capsys: pytest.CaptureFixture[str], sizes: dict[str, Any]
) -> None:
    sizes["hf-lora:llama-3.1-8b"] = LLAMA_8B
    found = data(capsys, "--workload", "hf-lora:llama-3.1-8b", "--tokens", "50M")
    assert found["samples"] == pytest.approx(50e6 / 4096)
    assert found["pick"]["usd_per_million_tokens"] == pytest.approx(found["pick"]["usd"] / 50)
    too_small = {need["recipe"]: need["too_small"] for need in found["memory"]}
    assert "L40S" in too_small["bf16"] and "L40S" not in too_small["liger"]
    assert "L4" in too_small["fp8-frozen"] and "L4" not in too_small["nf4"]
    by_place = {(each["instance"], each["recipe"]): each for each in found["left_out"]}
    fits = by_place["g6e.xlarge", "bf16"]["fits"]
    assert fits[:2] == [
        "--recipe bf16 --set activation_checkpointing=block",
        "--sequence-length 2048",
    ]
    assert "--recipe liger" in fits and "--recipe nf4" in fits
    # Where it fits only with checkpointing, it is weighed with that.
    recipes = {each["instance"]: each["recipe"] for each in found["by_instance"]}
    assert "activation_checkpointing=block" in recipes["g6.xlarge"]
    assert "activation_checkpointing=block" not in recipes["g6e.xlarge"]
    assert "rounded to 4 bits" in by_place[None, "nf4"]["reason"]
    # NVIDIA's and MLPerf's figures, at this model's FLOPs: LoRA of a model nearly as large is nearly as fast.
    by_gpu = {speed["gpu"]: speed for speed in found["published"]}
    h100 = by_gpu["H100"]
    assert (h100["source"], h100["tokens_per_s"]) == ("NVIDIA/NeMo", 24_824)
    assert h100["tokens_per_s_by_flops"] == pytest.approx(24_824 * 6.74 / 8.07, rel=0.02)
    assert by_gpu["H200"]["source"].startswith("mlcommons")
    # The commands keep the length, and shorter samples fit on smaller GPUs.
    found = data(capsys, "--workload", "hf-lora:llama-3.1-8b", "--tokens", "50M", "--sequence-length", "512")
    assert "--sequence-length 512" in found["command"]
    assert "L4" not in {need["recipe"]: need["too_small"] for need in found["memory"]}["bf16"]


def test_full_fine_tuning_needs_gpus_that_share_its_states(
    capsys: pytest.CaptureFixture[str], sizes: dict[str, Any]
) -> None:
    size = {**LLAMA_8B, "num_parameters": 8_030_261_248, "num_trained": 8_030_261_248}
    sizes["hf-sft:llama-3.1-8b"] = size
    found = data(capsys, "--workload", "hf-sft:llama-3.1-8b", "--tokens", "50M")
    on_h100 = {each["recipe"] for each in found["by_instance"] if each["instance"].startswith("p5.")}
    assert on_h100 == {"fsdp2"}
    fits = {(each["instance"], each["recipe"]): each["fits"] for each in found["left_out"]}
    assert fits["p5.4xlarge", "bf16"] == []


@pytest.mark.slow
def test_the_training_package_counts_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=256).save_pretrained(tmp_path)
    size = model_size(fastlaunch_world(), f"hf-clm:{tmp_path}", counts=True)
    assert size is not None and size.num_parameters == 256 * 64 + 1024 * 64 + 2 * 49_984 + 2 * 64
    assert size.tokens_per_sample and size.flops_per_sample
    tokens = size.tokens_per_sample
    # Products with weights, and attention of two layers of 64 features.
    expected = 6 * (size.num_parameters - 1024 * 64) * tokens + 12 * 2 * 64 * tokens**2
    assert size.flops_per_sample == pytest.approx(expected, rel=0.01)
    with pytest.raises(UserError, match="no model 'nothing'"):
        model_size(fastlaunch_world(), "timm:nothing", counts=True)


@pytest.mark.slow
def test_the_training_package_counts_the_layers_of_a_decoder() -> None:
    if find_spec("peft") is None:
        pytest.skip("without peft")
    shipped_sizes = json.loads((shipped("measurements") / "model_sizes.json").read_text(encoding="utf-8"))
    assert counted_size("hf-lora:llama-3.1-8b") == shipped_sizes["hf-lora:llama-3.1-8b"]


def test_a_model_with_shipped_measurements_has_a_shipped_size() -> None:
    names = [name for name in shipped_workloads() if name.startswith((*FINE_TUNING,))]
    sizes = {name: model_size(fastlaunch_world(), name, counts=False) for name in names}
    assert len(sizes) >= 4 and None not in sizes.values()
    assert sizes["hf-lora:llama-3.1-8b"] == ModelSize(**LLAMA_8B)


BF16_ONLY = ("--workload", "vit-huge", "--samples", "100M", "--measured-only")


def write_config(text: str) -> None:
    config_path().write_text(text, encoding="utf-8")


@pytest.mark.usefixtures("published")
def test_what_this_account_pays_decides(capsys: pytest.CaptureFixture[str]) -> None:
    assert on_article_s(data(capsys, *BF16_ONLY))[0]["instance"] == P4D
    write_config("rates: {p5: {discount: 0.5}}\n")
    first, _ = on_article_s(data(capsys, *BF16_ONLY))
    assert (first["instance"], first["usd_per_hour"]) == (P5, 55.04 / 2)


@pytest.mark.usefixtures("published")
def test_old_prices_warn_and_are_refused_only_where_the_config_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert any("fastlaunch prices update" in text for text in data(capsys, *BF16_ONLY)["warnings"])
    write_config("max_price_age: 7d\n")
    assert run(["recommend", *BF16_ONLY]) == 2
    assert data(capsys, *BF16_ONLY, "--prices-as-of", "2023-11-15")["pick"]


def write_spot_prices(usd_per_hour: float, *, age_hours: float = 0.0) -> None:
    given_at = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=age_hours)
    settings = load_settings()
    make_folder(settings.home)
    price = MarketPrice(
        instance=P5,
        region="us-east-1",
        zone="us-east-1a",
        purchase="spot",
        usd_per_hour=usd_per_hour,
        at=given_at.isoformat(),
    )
    write_market(settings.home / MARKET_PRICES, [price])


@pytest.mark.usefixtures("published")
def test_spot_is_left_out_unless_it_is_known_how_often_it_is_lost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_spot_prices(5.0)
    both = ("--purchase", "on-demand,spot")
    found = data(capsys, *BF16_ONLY, *both)
    assert found["pick"]["purchase"] == "on-demand"
    reasons = [each["reason"] for each in found["left_out"] if each["instance"] == P5]
    assert any("how often spot is lost is not known" in reason for reason in reasons)
    assert any("spot_losses_per_hour=" in warning for warning in found["warnings"])
    rates = ("--assume", "spot_losses_per_hour=0.2", "--assume", "spot_available=0.5")
    found = data(capsys, *BF16_ONLY, *both, *rates)
    assert (found["pick"]["instance"], found["pick"]["purchase"]) == (P5, "spot")
    # Work that is done again is billed, waiting is not.
    steps_hours = 100e6 / (512 / 0.199) / 3600
    assert found["pick"]["usd"] > 5 * steps_hours
    assert found["pick"]["hours"] > 1.5 * steps_hours
    assert "--purchase spot" in found["command"] and "--checkpoint-every" in found["command"]
    # The mean keeps the deadline, too many single trainings do not.
    deadline = ("--deadline", f"{1.05 * found['pick']['hours']}h")
    assert data(capsys, *BF16_ONLY, *both, *rates, *deadline)["pick"]["purchase"] == "on-demand"


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize(("age_hours", "is_old"), [(0.5, False), (1.5, True)])
def test_spot_prices_are_old_after_an_hour(
    age_hours: float, is_old: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    write_spot_prices(20.0, age_hours=age_hours)
    warnings = data(capsys, *BF16_ONLY, "--purchase", "on-demand,spot")["warnings"]
    assert any("older than an hour" in text for text in warnings) == is_old


@pytest.mark.usefixtures("published")
def test_the_result_of_the_api_is_the_text_and_the_data_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = fastlaunch.recommend("vit-huge", 100_000_000, deadline="48h", measured_only=True)
    words = ("--workload", "vit-huge", "--samples", "100M", "--deadline", "2d", "--measured-only")
    assert found.to_json() == data(capsys, *words)
    assert "p5.4xlarge with fp8-fused" in " ".join(repr(found).split())
    assert [*found.to_pandas()["instance"]][-2:] == [P4D, P5]


def test_an_estimate_of_what_is_recommended_says_the_same() -> None:
    found = fastlaunch.recommend("vit-huge", "10M")
    by_evidence = {each.configuration.rate.evidence: each for each in found.by_instance}
    assert by_evidence.keys() >= {"predicted", "same GPU"}
    for choice in by_evidence.values():
        one = choice.configuration
        estimate = fastlaunch.estimate(
            "vit-huge",
            one.instance,
            recipe=one.recipe,
            batch_size=one.query.batch_size_per_gpu,
            samples="10M",
        )
        assert (estimate.rate.evidence, estimate.rate.source) == (one.rate.evidence, one.rate.source)
        cost = estimate.cost
        for mine, theirs in ((choice.total.usd, cost.usd), (choice.total.hours, cost.hours)):
            assert [*vars(mine).values()] == pytest.approx([*vars(theirs).values()], rel=1e-6)


def test_the_csv_has_a_row_for_each_choice_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recommend", *ARTICLE, "--prices-as-of", "2026-07-20", "--output", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    picks = [(row["instance"], row["pick"]) for row in rows]
    assert picks[0] == ("p5.4xlarge", "True") and picks[-2:] == [(P4D, "False"), (P5, "False")]


@pytest.mark.usefixtures("sizes")
def test_where_nothing_is_known_the_command_measures_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, "--workload", "timm:nobody_knows_this", "--samples", "1M")
    assert found["pick"] is found["runner_up"] is found["break_even"] is found["next_experiment"] is None
    assert found["num_candidates"] == 0
    assert any("the size of timm:nobody_knows_this is unknown" in each for each in found["warnings"])
    assert run([*shlex.split(found["command"])[1:], "--dry-run"]) == 0


def test_an_unknown_workload_is_refused_and_so_is_a_price_that_nobody_knows() -> None:
    with pytest.raises(UserError, match="there is no file"):
        fastlaunch.recommend("./none.py:build", "1M")
    with pytest.raises(UserError, match="unknown workload"):
        fastlaunch.recommend("vit-hueg", "1M")
    with pytest.raises(UserError, match="te-articel"):
        fastlaunch.recommend("vit-huge", "1M", exclude_recipes=["te-articel"])
    with pytest.raises(UserError, match="no price is known"):
        fastlaunch.recommend("vit-huge", "1M", regions=["eu-south-1"])
    assert CATALOGUE.find_price(P5, region="eu-south-1", on=DAY) is None


@pytest.mark.parametrize(
    "options",
    [
        *({"samples": value} for value in (math.nan, math.inf)),
        *({"max_cost_usd": value} for value in ("400", -5, math.nan)),
        *({"deadline": value} for value in (-1, 0, math.nan)),
        *({"max_nodes": value} for value in (0, 1.5, 1_000_000)),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        fastlaunch.recommend("vit-huge", **{"samples": "100M", **options})


def test_one_purchase_option_and_one_region_may_be_plain_strings() -> None:
    job: dict[str, Any] = {"workload": "vit-huge", "samples": "100M", "measured_only": True}
    found = fastlaunch.recommend(**job, purchases="on-demand", regions="us-east-1")
    assert found.pick == fastlaunch.recommend(**job, regions=["us-east-1"]).pick


def test_what_aws_images_lack_is_told_and_no_pick_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    found = fastlaunch.recommend("gpt2-xsmall", "10M", measured_only=True)
    assert found.build == found.to_json()["build_command"] == "fastlaunch build --with transformers --push"
    assert f"image: {found.build}" in repr(found)
    given = fastlaunch.recommend("gpt2-xsmall", "10M", measured_only=True, image="URI@sha256:0")
    assert given.build is None and "image: " not in repr(given)
    assert given.command and given.command.endswith(" --image URI@sha256:0")
    nothing = fastlaunch.recommend("hf-clm:./model", "10M", measured_only=True)
    assert nothing.pick is None
    assert nothing.build == found.build
    assert nothing.command is not None and nothing.command.endswith(" --image URI@sha256:...")
    assert run(["recommend", *BF16_ONLY, "--max-cost", "1"]) == 1


def test_each_purchase_option_has_its_cheapest_choice_and_a_block_says_what_it_leaves_unused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ("--workload", "vit-huge", "--samples", "100M", "--purchase", "on-demand,spot,capacity-block")
    found = data(capsys, *argv)
    on_demand, block = found["by_purchase"]
    assert (on_demand["purchase"], block["purchase"]) == ("on-demand", "capacity-block")
    assert on_demand["unused_usd"] is None and block["block_hours"] % 24 == 0
    assert (on_demand["price_secondary"], block["price_secondary"]) == (False, True)
    used = block["usd_per_hour"] * block["hours"]
    assert block["unused_usd"] == pytest.approx(block["usd_per_hour"] * block["block_hours"] - used, rel=0.02)
    # The shipped spot prices are a third party's, and nobody's losses are known.
    assert any("spot" in text and "spot_losses_per_hour" in text for text in found["warnings"])
    assert run(["recommend", *argv, "--all"]) == 0
    shown = capsys.readouterr().out
    assert "capacity-block" in shown and "unused" in shown and "third party" in shown


def import_one_round(folder: Path) -> None:
    """Import a run of each recipe of Llama 3.1 8B on an H100."""
    with tarfile.open(shipped("measurements") / "llama-3.1-8b-lora-h100/records.tar.xz") as archive:
        members = [member for member in archive.getmembers() if "-r3-" in member.name]
        archive.extractall(folder, members, filter="data")
    assert members and run(["runs", "import", str(folder)]) == 0


def test_the_screen_counts_as_many_sequences_as_steps_and_explains_only_what_it_shows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--workload", "hf-lora:llama-3.1-8b", "--tokens", "50M", "--sequence-length", "4096"]
    import_one_round(tmp_path)
    assert run(["recommend", *words, "--prices-as-of", "2026-07-20", "--all"]) == 0
    text = capsys.readouterr().out
    (steps,) = re.findall(r"^train: .*--batch-size 1 .*--steps (\d+)", text, re.MULTILINE | re.DOTALL)
    assert f"in {int(steps):,} sequences" in " ".join(text.split())
    assert " same GPU, in one run." in text
    assert "global batch 1\n" in text
    notes = {line.split()[-1] for line in text.splitlines() if re.match(r"[a-z0-9]+\.[0-9]*x?large ", line)}
    assert {"pick", "second"} <= notes
    assert ("front" in notes) == ("front: all else" in " ".join(text.split()))


LLAMA = ("--workload", "hf-lora:llama-2-7b", "--tokens", "50M", "--sequence-length", "4096")
ON_SPOT = ("--assume", "spot_losses_per_hour=0.1", "--assume", "spot_available=0.8")


def screen(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    """The first paragraph in one line, and the whole screen, with what is beside it."""
    capsys.readouterr()
    run(["recommend", *argv])
    printed = capsys.readouterr()
    return " ".join(printed.out.partition("\n\n")[0].split()), printed.out + printed.err


def test_a_single_run_is_no_surer_than_several(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Runs on other machines would take another time, so its range counts for a limit."""
    once = tuple(word.replace("llama-2-7b", "llama-3.1-8b") for word in LLAMA)
    import_one_round(tmp_path)
    pick = data(capsys, *once)["pick"]
    assert pick["evidence"] == "same GPU" and pick["source"].startswith("1 run of yours,")
    assert pick["usd_low"] < pick["usd"] < pick["usd_high"]
    answer, _ = screen(capsys, *once, "--max-cost", f"{(pick['usd'] + pick['usd_high']) / 2:.2f}")
    assert answer.startswith("No choice is certain to cost at most")


@pytest.mark.parametrize(
    ("options", "beginning"),
    [
        (
            ("--max-cost", "5"),
            r"No choice is certain to cost at most \$5\.00; the closest is p5\.4xlarge with fp8-frozen: \$",
        ),
        (
            ("--deadline", "30min"),
            r"No choice is certain to take at most 30\.0 min; the closest is p5\.4xlarge with fp8-frozen: \d",
        ),
        (
            ("--deadline", "30min", "--max-cost", "5"),
            r"No choice is certain to take .* 30\.0 min and \$5\.00\.",
        ),
        (
            ("--purchase", "spot"),
            r"Nothing can be recommended .*: how often spot is lost is not known\.",
        ),
        (("--purchase", "spot", *ON_SPOT), r"Train on g6e\.xlarge with compile as spot: \$"),
    ],
)
def test_an_answer_says_what_stands_in_the_way_at_a_glance(
    options: tuple[str, ...], beginning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer, whole = screen(capsys, *LLAMA, *options)
    assert re.match(beginning, answer) and len(answer.split()) <= MOST_WORDS
    # More machines are faster, and cheaper never.
    assert ("--max-nodes" in whole) == ("--deadline" in options)
    assert "next: fastlaunch sweep" not in whole and "\n\n\n" not in whole
    _, whole = screen(capsys, *LLAMA, *options, "--max-nodes", "2")
    assert "--max-nodes" not in whole


@pytest.mark.parametrize(
    ("options", "second_line"),
    [
        # A batch in two parts is the same measurement, and no rival.
        (
            (
                "--prices-as-of",
                "2026-07-20",
                "--steps-only",
                "--batch-equivalent",
                "--exclude-recipe",
                "fp8-fused",
            ),
            "Second: p5.4xlarge with bf16-fused, 19% dearer: $",
        ),
        (("--prices-as-of", "2026-07-20"), "Second: p5.4xlarge with fp8-fused last_block=class_token, "),
        (
            ("--prices-as-of", "2023-11-15", "--batch-equivalent", "--allow-unverified"),
            "Second: p4d.24xlarge with te-article, 0.6% dearer: $595, 18.2 h, published.\nNot settled",
        ),
    ],
)
def test_the_second_line_says_whether_the_pick_is_settled_against_the_runner_up(
    options: tuple[str, ...], second_line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, whole = screen(capsys, "--workload", "vit-huge", "--samples", "100M", "--measured-only", *options)
    assert whole.split("\n\n")[1].startswith(second_line)
    assert "\nNext: train now; " in whole


def test_two_of_one_machine_are_told_apart_by_the_rounds_that_both_ran() -> None:
    recommended = fastlaunch.recommend("vit-huge", "100M", measured_only=True, prices_as_of="2026-07-20")
    pick, second = recommended.pick, recommended.runner_up
    assert pick and second and second.overlaps(pick) and not second.may_cost_less_than(pick)
    assert re.search(r"^Second: .*, 1\.\d+% dearer: .*, same GPU; settled\.$", " ".join(why(recommended)))
    rate = second.configuration.rate
    alone = replace(second, configuration=replace(second.configuration, rate=replace(rate, row=None)))
    assert (
        alone.may_cost_less_than(pick)
        and times_as_fast(pick.configuration.rate, alone.configuration.rate) is None
    )
    assert any(
        "the cheapest of all with probability" in text for text in why(replace(recommended, runner_up=alone))
    )


def test_it_is_said_whether_the_pick_trains_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    _, whole = screen(capsys, "--workload", "hf-lora:llama-2-7b", "--tokens", "200M", "--measured-only")
    assert "\nWhether fp8-frozen trains as well as bf16 is not known: " in whole
    _, whole = screen(capsys, "--workload", "vit-huge", "--samples", "100M", "--measured-only")
    assert "fp8-fused (three options) learns as bf16 does for 40 steps: " in whole


def test_a_sweep_is_not_proposed_on_gpus_that_are_too_small(
    capsys: pytest.CaptureFixture[str], sizes: dict[str, Any]
) -> None:
    sizes["hf-lora:llama-3.2-3b"] = {**LLAMA_8B, "num_parameters": 13_000_000_000, "num_layers": 40}
    of_13b = ("--workload", "hf-lora:llama-3.2-3b", "--tokens", "50M", "--measured-only")
    answer, whole = screen(capsys, *of_13b)
    assert answer == "Nothing can be recommended for hf-lora:llama-3.2-3b: every candidate is left out."
    (instances,) = re.findall(r"next: fastlaunch sweep --instance (\S+)", whole)
    assert not {name.partition(".")[0] for name in instances.split(",")} & {"g4dn", "g5", "g6"}


def test_a_line_does_not_end_within_a_class_of_evidence() -> None:
    text = f"{'a' * 66} predicted (class A)."
    assert filled(text, 80).splitlines() == [f"{'a' * 66} predicted", "(class A)."]
    assert filled(text, 120) == text
