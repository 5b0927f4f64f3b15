"""`fastlaunch estimate`: from which measurements a training is estimated, how long it is, what is refused."""

import datetime
import io
import json
import math
import re
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import ec2_builders
import pytest
from attempt_builders import add_attempt
from fake_summaries import CATALOGUE, LLAMA_8B, compared, imported, on_p5

import fastlaunch
from fastlaunch.analysis.cost import parse_assumptions
from fastlaunch.analysis.rate import Evidence, Finder, Origin, Query, Rate, subject_of
from fastlaunch.api.estimation import Estimate
from fastlaunch.backends.ec2.plan import plan_ec2
from fastlaunch.catalog.updates import MARKET_PRICES, MarketPrice, write_market
from fastlaunch.cli.main import run
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import open_ledger
from fastlaunch.measure.published import shipped_runs
from fastlaunch.measure.summary import Interval, RunSummary
from fastlaunch.report.text import MOST_WORDS
from fastlaunch_train.recipes.recipes import RECIPES
from fastlaunch_train.records.records import Eval

THEN = "2023-11-15"


def estimate(instance: str = "p5.48xlarge", **arguments: Any) -> Estimate:
    given = {"samples": 100_000_000, **arguments}
    return fastlaunch.estimate("vit-huge", instance, prices_as_of=THEN, **given)


def part(estimate: Estimate, name: str) -> Any:
    return next(part for part in estimate.cost.parts if part.name == name)


def test_own_runs_on_the_same_machine_are_measured_with_their_interval() -> None:
    times = enumerate((0.198, 0.2, 0.202))
    imported(*(on_p5(time_s, seed=seed, build_s=5.0) for seed, time_s in times))
    found = estimate()
    steps = part(found, "steps")
    assert steps.evidence == "measured" and "your" in steps.source
    assert steps.seconds.value == pytest.approx(1e8 / 512 * 0.2, rel=1e-4)
    assert found.cost.hours.low is not None and found.cost.hours.low < found.cost.hours.value
    assert part(found, "build").evidence == "measured" and part(found, "build").seconds.value == 5
    assert part(found, "boot").evidence == "assumed"
    # `estimate` and `recommend` have one range, and `compare` the same at 95%: 1.7% with 5 dof.
    (row,) = fastlaunch.compare(prices_as_of=THEN).rows
    choices = fastlaunch.recommend("vit-huge", 100_000_000, measured_only=True, steps_only=True).by_instance
    measured_here = next(each for each in choices if each.instance == "p5.48xlarge")
    ends = [
        (usd.low / usd.value, usd.high / usd.value)
        for usd in (
            estimate(steps_only=True).cost.usd,
            measured_here.total.usd,
            row.cost.usd_per_million_samples,
        )
        if usd and usd.low and usd.high
    ]
    assert ends[0] == pytest.approx(ends[1])
    assert math.log(ends[0][1]) == pytest.approx(2.015 / 2.571 * math.log(ends[2][1]), rel=0.02)
    assert ends[2][1] > math.exp(2.571 * 0.017)


def test_the_article_s_rows_cost_what_they_did() -> None:
    # 0.21651 s for 1,024 images and 0.3321 s for 512: published, and older than the shipped runs.
    new = estimate("p5.48xlarge", recipe="te-article-fp8")
    old = estimate("p4d.24xlarge", recipe="te-article")
    for found, samples_per_s in ((new, 1024 / 0.21651), (old, 512 / 0.3321)):
        assert found.rate.evidence is Evidence.PREDICTED and found.rate.published is not None
        figure = found.rate.published
        assert (figure.evidence, figure.measured_on) == (Evidence.PUBLISHED, THEN)
        assert figure.samples_per_s == Interval(value=pytest.approx(samples_per_s, rel=1e-4))
        assert any("published" in note and THEN in note for note in found.notes)


def test_several_nodes_are_predicted_by_one_with_the_network_in_the_range() -> None:
    imported(on_p5(0.2))
    found = estimate(num_nodes=2, steps_only=True)
    steps = part(found, "steps")
    assert found.rate.evidence is Evidence.PREDICTED and "an assumption" in steps.source
    assert steps.seconds.low < 1e8 / 1024 * 0.2 / 0.95 < steps.seconds.high
    given = estimate(num_nodes=2, assume=("scaling=0.9",), steps_only=True)
    seconds = part(given, "steps").seconds
    assert seconds.low is None and seconds.value == pytest.approx(1e8 / 1024 * 0.2 / 0.9)


@pytest.mark.parametrize(
    ("images_per_s", "most"),
    [
        # An A10G's peak in bf16 is 70 TFLOP/s, an H100's 989.4; an image takes 763.504 GFLOP.
        (920, 0.75 * 70e12 / 763.504e9),
        # At 0.75 of the peak products take 1.029 ms on the H100, and the rest the other 2.304 ms. On an A10G,
        # with 600 GB/s instead of 3,350, it takes (5.583 + 14.134) / 2 times as long, and products 14.543 ms.
        (300, 1000 / (14.543 + 2.304 * 9.859)),
    ],
)
def test_no_gpu_does_more_than_it_can(images_per_s: float, most: float) -> None:
    imported(on_p5(64 / images_per_s, workload="vit-tiny"))
    speed = fastlaunch.estimate("vit-tiny", "g5.xlarge", samples=100_000_000).rate.samples_per_s
    assert speed.low is not None and speed.high is not None
    assert speed.low < speed.value < speed.high <= most * 1.001
    assert speed.high > 0.8 * most, "it is near"


def test_another_number_of_gpus_of_a_node_is_predicted_unless_its_scaling_is_given() -> None:
    imported(on_p5(0.2, workload="vit-tiny"))

    def on_one_gpu(**arguments: Any) -> Any:
        found = fastlaunch.estimate("vit-tiny", "p5.4xlarge", samples=100_000_000, **arguments)
        return part(found, "steps")

    predicted = on_one_gpu()
    assert predicted.evidence == "predicted"
    linear_s = 1e8 / 64 * 0.2
    assert predicted.seconds.low < linear_s < predicted.seconds.high
    given = on_one_gpu(assume=("scaling=0.5",))
    assert given.evidence == "predicted" and given.seconds.value == pytest.approx(2 * linear_s)


def test_a_batch_that_nobody_measured_is_predicted() -> None:
    imported(
        on_p5(0.2),
        on_p5(0.35, batch_size_per_gpu=128, samples_per_step=1024.0),
        on_p5(0.7, batch_size_per_gpu=256, samples_per_step=2048.0),
    )
    found = estimate(batch_size=100)
    assert (found.batch_size, found.rate.evidence) == (100, Evidence.PREDICTED)
    assert 512 / 0.2 * 0.9 < found.rate.samples_per_s.value < 1024 / 0.35 * 1.1
    assert estimate(batch_size=256).rate.evidence is Evidence.MEASURED


def test_what_nobody_measured_is_an_error_that_names_what_was() -> None:
    with pytest.raises(UserError, match="no-such") as error:
        estimate(recipe="no-such")
    assert "bf16" in str(error.value.hint)
    with pytest.raises(UnknownName):
        estimate("p99.metal")
    with pytest.raises(UserError, match="not NVIDIA GPUs"):
        estimate("trn1.32xlarge")
    # What a CPU takes says nothing of a GPU.
    imported(on_p5(0.2, workload="vit-tiny", instance=None, device_name="cpu"))
    with pytest.raises(UserError, match="on a GPU"):
        fastlaunch.estimate("vit-tiny", "p5.48xlarge", samples=1000)
    imported(on_p5(0.2, workload="toy.py", variant={"lr": "1"}, instance=None, device_name="cpu"))
    with pytest.raises(UserError, match="ran on no GPU"):
        fastlaunch.estimate("toy.py", "p5.48xlarge", samples=1000)


def test_a_batch_that_does_not_fit_in_memory_is_refused() -> None:
    sizes = ((0.2, 64, 40.0), (0.1, 32, 24.0))
    imported(
        *(
            on_p5(
                step_time_s,
                workload="vit-tiny",
                peak_memory_gib=peak_gib,
                batch_size_per_gpu=batch,
                samples_per_step=8.0 * batch,
            )
            for step_time_s, batch, peak_gib in sizes
        )
    )

    def of_batch(batch_size: int | None, instance: str = "p5.48xlarge") -> Estimate:
        return fastlaunch.estimate("vit-tiny", instance, samples=1000, batch_size=batch_size)

    # 8 GiB and 0.5 for each sample; 73.6 of 80 can be used.
    assert of_batch(131).batch_size == 131
    with pytest.raises(UserError, match="74 GiB") as error:
        of_batch(132)
    assert "--batch-size 128 " in str(error.value.hint) and "grad_accumulation=2" in str(error.value.hint)
    with pytest.raises(UserError, match="memory of L4"):
        of_batch(None, "g6.xlarge")


def test_a_recipe_that_the_gpu_cannot_run_is_refused_whatever_its_batch() -> None:
    for batch_size in (None, 64):
        with pytest.raises(UserError, match="te-fp8 cannot run on p4d") as error:
            fastlaunch.estimate("vit-huge", "p4d.24xlarge", recipe="te-fp8", samples=1, batch_size=batch_size)
        assert "te-bf16" in str(error.value.hint)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ("recommend --workload vit-hug", "unknown workload 'vit-hug'"),
        ("recommend --workload vit-huge --exclude-recipe te-f8", "unknown recipe 'te-f8'"),
        ("recommend --workload vit-huge --purchase spt", "unknown purchase option 'spt'"),
        ("recommend --workload vit-huge --assume bot=3", "unknown assumption 'bot'"),
        ("estimate --workload vit-hug", "unknown workload 'vit-hug'"),
        ("estimate --recipe te-f8", "unknown recipe 'te-f8'"),
        ("estimate --recipe te-f8 --instance p5.48xlarge --samples 1M", "unknown recipe 'te-f8'"),
        ("estimate --instance p5.48xlarg", "unknown instance 'p5.48xlarg'"),
        ("estimate --assume bot=3", "unknown assumption 'bot'"),
        ("estimate --recipe compile", "no instance type is named, and the length of the training is missing"),
        ("recommend --workload vit-huge", "the length of the training is missing"),
    ],
)
def test_a_mistyped_name_is_reported_before_a_missing_option(
    argv: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(argv.split()) == 2
    assert f"error: {problem}\n" in capsys.readouterr().err


def test_the_command_that_measures_first_is_of_what_was_asked_for() -> None:
    with pytest.raises(UserError) as error:
        fastlaunch.estimate("vit-tiny", "g6.xlarge", samples=1000, recipe="fp32 optimizer=adamw")
    command = "fastlaunch submit --workload vit-tiny --instance g6.xlarge --recipe fp32 --set optimizer=adamw"
    assert command in str(error.value.hint)
    on_a_cpu = {"instance": None, "device_name": None, "num_gpus": 1}
    imported(on_p5(0.2, workload="train.py", recipe="train.py", variant={"width": "64"}, **on_a_cpu))
    with pytest.raises(UnknownName, match="unknown variant"):
        fastlaunch.estimate("train.py", "g6.xlarge", samples=1000, recipe="width=65")


def on_other_gpus(instance: str, *, recipe: str = "bf16", precision: str = "bf16") -> Rate | str:
    """The rate on an instance type by runs on an H200 and on eight H100 and A100."""
    rows = compared(
        *(
            on_p5(step_time_s, recipe=recipe, precision=precision, **place)
            for step_time_s, place in (
                (0.2, {}),
                (0.41, {"instance": "p4d.24xlarge", "device_name": None}),
                (0.17, {"instance": "p5en.48xlarge", "device_name": "NVIDIA H200"}),
            )
        )
    ).rows
    subject = subject_of("vit-huge", rows, rows[0].setup, CATALOGUE)
    finder = Finder({Origin.LEDGER: rows}, subject, CATALOGUE, lambda: ())
    return finder.rate(
        Query(
            instance=CATALOGUE.instance(instance),
            num_nodes=1,
            recipe=RECIPES[recipe],
            batch_size_per_gpu=64,
            precision=precision,
        )
    )


def test_on_a_gpu_of_a_generation_that_was_measured_it_is_predicted_with_a_range() -> None:
    found = on_other_gpus("p4de.24xlarge")
    assert isinstance(found, Rate)
    assert (found.evidence, found.prediction_class, found.num_rows) == (Evidence.PREDICTED, "A", 3)
    # As fast as on the A100 of 40 GB or faster, and slower than on the H100.
    rate = found.samples_per_s
    assert 512 / 0.45 < rate.value < 512 / 0.2
    assert rate.low is not None and rate.high is not None and rate.low < rate.value < rate.high
    assert "FP8" in str(on_other_gpus("p4de.24xlarge", recipe="te-fp8", precision="fp8"))


def test_the_same_gpu_elsewhere_counts_with_what_machines_differ_by() -> None:
    imported(
        *(
            on_p5(step_time_s, seed=seed, instance=instance)
            for seed, step_time_s in enumerate((0.2, 0.2, 0.201))
            for instance in ("p5.48xlarge", None)
        )
    )
    on_type = estimate().rate
    imported(*(on_p5(0.2, seed=seed, recipe="te-bf16", instance=None) for seed in range(3)))
    elsewhere = estimate(recipe="te-bf16").rate
    assert (on_type.evidence, elsewhere.evidence) == (Evidence.MEASURED, Evidence.SAME_GPU)
    assert elsewhere.deviation == pytest.approx(2**0.5 * on_type.deviation, rel=0.2)


def test_a_published_figure_is_beaten_by_newer_runs_alone() -> None:
    figure = {"kind": "published", "source": "a post, torch 2.1", "build_s": None}
    imported(on_p5(0.3, recipe="fp32", precision="fp32", measured_on="2026-01-01", **figure))
    found = estimate(recipe="fp32").rate
    assert (found.evidence, found.source) == (Evidence.PUBLISHED, "a post, 2026-01-01")
    one = {"instance": None, "num_gpus": 1, "samples_per_step": 64.0}
    imported(on_p5(0.2, recipe="fp32", precision="fp32", measured_on="2026-02-01", **one))
    found = estimate(recipe="fp32").rate
    assert found.evidence is Evidence.PREDICTED and found.published is not None


def test_without_a_recipe_bf16_counts_or_the_only_one() -> None:
    # On p5 the article has three recipes, bf16 among them.
    assert estimate().recipe == "bf16"
    imported(on_p5(0.2, recipe="te-fp8"), on_p5(0.2, instance="p5e.48xlarge", device_name="NVIDIA H200"))
    assert estimate().recipe == "te-fp8"
    imported(on_p5(0.2, recipe="compile"))
    with pytest.raises(UserError, match="2 recipes"):
        estimate()


@pytest.mark.parametrize("length", [{}, {"samples": 1, "tokens": 1}, {"samples": 0}, {"epochs": -1.0}])
def test_a_training_is_as_long_as_one_number_says(length: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        fastlaunch.estimate("vit-huge", "p5.48xlarge", **length)


def test_counts_are_read_as_text_and_are_above_zero() -> None:
    imported(on_p5(0.2))
    assert estimate(samples="100M").cost == estimate().cost
    for arguments in ({"batch_size": -4}, {"num_nodes": 0}, {"samples": "many"}):
        with pytest.raises(UserError):
            estimate(**arguments)


def test_tokens_are_counted_by_those_of_a_sample() -> None:
    imported(on_p5(0.2, tokens_per_step=51_200.0), on_p5(0.2, recipe="fp32", sequence_length=50))
    for recipe, samples in (("bf16", 10), ("fp32", 20)):
        assert estimate(samples=None, tokens=1000, recipe=recipe).samples.value == samples
    with pytest.raises(UserError, match="tokens"):
        estimate("p4d.24xlarge", recipe="te-article", samples=None, tokens=1000)


def test_fine_tuning_that_nobody_ran_is_predicted_where_it_fits(
    sizes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes["hf-lora:llama-3.1-8b"] = LLAMA_8B
    lora = partial(fastlaunch.estimate, "hf-lora:llama-3.1-8b", tokens="50M")
    assert re.search(
        r"batch 1 per GPU, [\d,]+ tokens/s, in all \$[\d.]+ per million tokens; ", lora("p5.4xlarge").subject
    )
    found = lora("g6e.xlarge", recipe="liger").to_json()
    assert (found["evidence"], found["batch_size_per_gpu"], found["sequence_length"]) == (
        "predicted",
        1,
        4096,
    )
    assert found["samples"]["value"] == pytest.approx(50e6 / 4096)
    assert found["tokens_per_s"]["value"] == pytest.approx(4096 * found["samples_per_s"]["value"])
    assert found["usd_per_million_tokens"] == pytest.approx(found["usd"]["value"] / 50)
    # Blocks are computed twice, so that less has to be kept.
    twice = lora("g6e.xlarge", recipe="liger activation_checkpointing=block").to_json()
    assert twice["tokens_per_s"]["value"] < 0.85 * found["tokens_per_s"]["value"]
    with pytest.raises(UserError, match="does not fit in the memory of L4") as refused:
        lora("g6.xlarge", recipe="compile")
    assert "--sequence-length 1024" in (refused.value.hint or "")
    assert lora("g6.xlarge", recipe="compile", sequence_length=1024).sequence_length == 1024
    twice_typed = ["--recipe", "liger", "--set", "activation_checkpointing=block", "--output", "json"]
    capsys.readouterr()
    lora_8b = ("--workload", "hf-lora:llama-3.1-8b", "--tokens", "50M", "--instance", "g6e.xlarge")
    assert run(["estimate", *lora_8b, *twice_typed]) == 0
    assert json.loads(capsys.readouterr().out)["tokens_per_s"] == twice["tokens_per_s"]
    with pytest.raises(UserError, match="epochs"):
        fastlaunch.estimate("hf-lora:llama-3.1-8b", "p5.4xlarge", epochs=1)


def test_epochs_need_a_run_of_whole_epochs() -> None:
    imported(on_p5(0.2))
    with pytest.raises(UserError, match="epochs"):
        estimate(samples=None, epochs=2)
    with open_ledger(load_settings()) as ledger:
        ledger.add_run(
            ledger.add_submission("fastlaunch submit"),
            "whole",
            **{"backend": "ec2", "workload": "vit-huge", "recipe": "bf16", "instance": "p5.48xlarge"},
            **{"spec": {"epochs": 4}, "plan": None, "directory": None},
        )
        ledger.set_summary("whole", on_p5(0.2, num_steps=200))
    # 200 steps of 512 images in four epochs.
    assert estimate(samples=None, epochs=2).samples.value == 2 * 50 * 512


def test_a_script_s_variant_is_estimated_in_steps_where_it_does_not_say_its_samples() -> None:
    script = {"workload": "train.py", "precision": "unknown", "batch_size_per_gpu": None}
    imported(
        *(
            on_p5(step_time_s, recipe=f"amp={amp}", variant={"amp": amp}, samples_per_step=None, **script)
            for step_time_s, amp in ((0.2, "bf16"), (1.2, "fp32"))
        )
    )
    found = fastlaunch.estimate("train.py", "p5.48xlarge", recipe="amp=fp32", samples=1000, steps_only=True)
    assert found.sample_unit == "steps"
    assert found.cost.hours.value == pytest.approx(1200 / 3600)


def test_a_target_takes_as_many_samples_as_the_seeds_that_reached_it() -> None:
    def scored(seed: int, step: int) -> RunSummary:
        evals = (Eval(step=step, seconds=1.0, split="validation", loss=2.0, num_samples=10),)
        return on_p5(0.2, seed=seed, evals=evals)

    imported(scored(0, 90), scored(1, 100), scored(2, 110))
    found = estimate(samples=None, target="loss=2.5")
    # 100 steps, and 2.920 x 10 / sqrt(3) of these to each side.
    assert found.samples.value == pytest.approx(51_200)
    assert found.samples.high == pytest.approx(51_200 + 2.920 * 10 / 3**0.5 * 512, rel=1e-4)
    assert part(found, "steps").seconds.high is not None
    for arguments in ({"target": "loss=1.5"}, {"target": "loss=2.5", "num_nodes": 2}):
        with pytest.raises(UserError):
            estimate(samples=None, **arguments)


def test_a_price_can_be_given_and_that_of_spot_has_to_be_known() -> None:
    found = estimate(usd_per_hour=1.0, steps_only=True)
    assert found.cost.usd.value == pytest.approx(found.cost.hours.value)
    with pytest.raises(UserError, match="spot price"):
        estimate(purchase="spot")


def market_price(purchase: str, zone: str, usd_per_hour: float, **more: Any) -> MarketPrice:
    given = {"instance": "p5.48xlarge", "region": "us-east-1", "at": "2026-11-24T09:00:00+00:00"}
    return MarketPrice(**given, purchase=purchase, zone=zone, usd_per_hour=usd_per_hour, **more)


def test_spot_costs_its_median_and_a_block_its_offer_in_the_cheapest_zone() -> None:
    write_market(
        load_settings().home / MARKET_PRICES,
        [
            market_price("spot", "us-east-1a", 10.0, median_usd_per_hour=20.0, p90_usd_per_hour=30.0),
            market_price("spot", "us-east-1b", 25.0, median_usd_per_hour=19.0, p90_usd_per_hour=30.0),
            market_price("capacity-block", "us-east-1a", 31.5),
        ],
    )
    arguments: dict[str, Any] = {"samples": 100_000_000}
    assume = {"spot_losses_per_hour": 0.1, "spot_available": 0.9}
    spot = fastlaunch.estimate("vit-huge", "p5.48xlarge", purchase="spot", assume=assume, **arguments)
    assert spot.price.usd_per_hour == 19.0
    block = fastlaunch.estimate("vit-huge", "p5.48xlarge", purchase="capacity-block", **arguments)
    assert block.cost.fee_usd == pytest.approx(24 * 31.5)
    assert "24 h" in block.answer and part(block, "unused block").usd.value > 0
    # What either costs on another day nobody kept.
    with pytest.raises(UserError, match="spot price of"):
        estimate(purchase="spot", assume=assume)


def test_the_account_s_rates_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text("rates: {p5: {sunk: true}}\n")
    monkeypatch.setenv("FASTLAUNCH_CONFIG", str(tmp_path / "config.yaml"))
    found = estimate()
    assert found.cost.hours.value > 0 and part(found, "steps").usd.value == 0


def on_spot(**arguments: Any) -> Estimate:
    return estimate(purchase="spot", usd_per_hour=20.0, **arguments)


def test_what_is_not_asked_for_takes_nothing_on_spot() -> None:
    found = on_spot(assume={"spot_losses_per_hour": 0.1, "spot_available": 0.8})
    assert part(found, "evaluations").seconds.value == 0 == part(found, "evaluations").usd.value


def test_an_answer_is_read_at_a_glance_and_the_samples_are_those_of_recommend() -> None:
    recipe = "fp8-frozen dgrad_accumulation=fast compile_mode=none activation_checkpointing=block"
    job: dict[str, Any] = {"recipe": recipe, "tokens": 50_000_000, "sequence_length": 4096}
    found = fastlaunch.estimate("hf-lora:llama-2-7b", "p5.48xlarge", num_nodes=2, **job)
    assert len(found.answer.split()) <= MOST_WORDS and "(class " in found.answer
    (again,) = {fastlaunch.recommend("hf-lora:llama-2-7b", tokens=50e6, sequence_length=4096).job.samples}
    assert found.subject.startswith(f"{math.ceil(again):,} sequences of 4,096 tokens")


def test_spot_by_a_trace_and_by_rates(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    # Lost once in six hours of eight.
    hours = (("00", "up"), ("06", "down"), ("08", "up"))
    trace.write_text("time,state\n" + "".join(f"2026-11-24T{at}:00:00,{state}\n" for at, state in hours))
    by_trace = on_spot(spot_trace=trace)
    assert part(by_trace, "restarts").evidence == "measured"
    by_rates = on_spot(assume={"spot_losses_per_hour": 1 / 6, "spot_available": 0.75})
    assert part(by_rates, "restarts").evidence == "assumed"
    assert by_rates.cost.hours.value == pytest.approx(by_trace.cost.hours.value)
    assert by_rates.cost.checkpoint_every_s is not None
    assert any("--checkpoint-every" in note for note in by_rates.notes)
    with pytest.raises(UserError):
        on_spot(spot_trace=tmp_path / "none.csv")
    with pytest.raises(UserError, match="both") as error:
        on_spot(spot_trace=trace, assume={"spot_losses_per_hour": 1 / 6})
    assert error.value.hint == "give one of them"


def test_spot_by_one_s_own_runs_and_never_by_a_guess() -> None:
    with pytest.raises(UserError, match="not known"):
        on_spot()
    with open_ledger(load_settings()) as ledger:
        attempt = add_attempt(
            ledger,
            ec2_builders.job(purchase="spot"),
            plan=lambda jobs, n: plan_ec2(
                jobs,
                attempt=n,
                site=ec2_builders.site(),
                max_minutes=60,
                render=ec2_builders.bootstrap_as_text,
            ),
        )
        ledger.set_handle(attempt.id, {"instance_ids": ["i-1"]})
        ledger.end_attempt(attempt.id, RunState.COMPLETED, lived_s=20 * 3600)
    # None lost counts as half a one, and one of one that was had as half of it.
    by_rates = on_spot(assume={"spot_losses_per_hour": 0.5 / 20, "spot_available": 0.5})
    by_runs = on_spot()
    assert by_runs.cost.hours.value == pytest.approx(by_rates.cost.hours.value)
    assert part(by_runs, "restarts").evidence == "measured"
    with pytest.raises(UserError, match="not known"):
        on_spot(region="us-west-2")


def printed(capsys: pytest.CaptureFixture[str], argv: Sequence[str], code: int = 0) -> str:
    assert run(["estimate", *argv]) == code
    return capsys.readouterr().out


def test_the_answer_comes_first_and_the_json_has_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--instance", "p5.48xlarge", "--samples", "100M", "--prices-as-of", THEN]
    table = printed(capsys, argv)
    data = json.loads(printed(capsys, [*argv, "--output", "json"]))
    assert " ".join(table.split("\n\n")[0].split()) == data["answer"]
    assert sum(part["usd"]["value"] for part in data["parts"]) == pytest.approx(data["usd"]["value"])
    assert data["price"]["as_of"] <= THEN and datetime.date.fromisoformat(data["price"]["as_of"])
    lines = printed(capsys, [*argv, "--output", "csv"]).splitlines()
    assert len(lines) == len(data["parts"]) + 2
    assert run(["estimate", "--samples", "3"]) == 2
    assert "no instance type is named\n  give --instance, such as p5.48xlarge\n" in capsys.readouterr().err
    assert run(["estimate"]) == 2
    assert "and one of --samples, --epochs, --tokens and --target" in capsys.readouterr().err


def test_a_prediction_says_what_its_range_its_class_and_its_figures_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = printed(capsys, ["--instance", "p5.48xlarge", "--samples", "100M"])
    assert re.search(r": \$\d+ \(90% range \d+ to \d+\), [\d.]+ h, predicted \(class A\)\.\n\n", table)
    words = " ".join(table.split())
    assert "* class A: predicted from this model and precision on this generation of GPU" in words
    assert re.search(r"\* published: [\d,]+ images/s by .*; newer runs predict [\d,]+ images/s", words)
    assert re.search(
        r"from \d+ results with this recipe on other machines, and \d+ with other recipes", words
    )
    assert re.search(r"part +time +\$ +evidence\n", table)


@pytest.mark.parametrize("command", ["estimate --instance p5.48xlarge", "recommend --workload vit-huge"])
def test_the_region_is_reported_after_the_answer(command: str) -> None:
    both = io.StringIO()
    with redirect_stdout(both), redirect_stderr(both):
        assert run([*command.split(), "--samples", "100M"]) == 0
    out = both.getvalue()
    assert 0 < out.index("90% range") < out.index("region us-east-1: ")


def test_assumptions_are_read_with_their_units() -> None:
    assumptions = parse_assumptions(["boot=5min", "waiting=2h", "storage_gib=500"])
    assert (assumptions.boot_s, assumptions.waiting_s, assumptions.storage_gib) == (300, 7200, 500)
    for text in ("boot", "boot=soon", "storage_gib=5GiB", "boot=-1"):
        with pytest.raises(UserError):
            parse_assumptions([text])
    with pytest.raises(UnknownName):
        parse_assumptions(["boots=3"])


def test_shipped_runs_that_were_imported_count_once() -> None:
    before = estimate(batch_size=32).rate
    imported(*shipped_runs("vit-huge").values())
    after = estimate(batch_size=32).rate
    assert (after.num_rows, after.num_other_rows) == (before.num_rows, before.num_other_rows)
    assert after.samples_per_s.value == pytest.approx(before.samples_per_s.value, rel=1e-6)


@pytest.mark.parametrize(("per_vcpu_s", "is_said"), [(330, False), (10, True)])
def test_a_dry_run_says_where_image_files_are_decoded_too_slowly(
    per_vcpu_s: int, is_said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fastlaunch.lifecycle.evidence.JPEGS_PER_VCPU_S", per_vcpu_s)
    files = ("--input", "train=s3://acme/train", "--data", "folder:/opt/ml/input/data/train")
    argv = ["submit", "--instance", "p5.48xlarge", "--recipe", "te-fp8", "--batch-size", "256", *files]
    assert run([*argv, "--dry-run"]) == 0
    assert ("192 vCPUs decode about 1,920 JPEGs" in capsys.readouterr().err) is is_said
