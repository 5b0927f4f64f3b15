"""Tables fit the terminal, and every row of one has a name of its own."""

from typing import Any

import pytest
from fake_summaries import CATALOGUE, P5_NODE, PLAIN, changed, compared, evaluated

from fastlaunch.analysis.compare import MeasuredRun
from fastlaunch.measure.summary import Interval
from fastlaunch.report.cost import finish_table
from fastlaunch.report.table import as_table
from fastlaunch.report.target import target_table
from fastlaunch.report.text import name_of


@pytest.mark.parametrize("width", [80, 120])
def test_no_table_is_wider_than_the_terminal(width: int) -> None:
    candidates = [
        MeasuredRun(
            run_id=f"{recipe}-{seed}",
            summary=changed(
                evaluated(recipe, seed, 2.0 + 0.1 * seed),
                step_time_s=Interval(value=time_s, low=0.99 * time_s, high=1.01 * time_s),
                build_s=20.0,
                compile_s=300.0,
                warmup_s=4.0,
                num_warmup_steps=10,
                total_s=12.0,
                number=2,
                last_step=100,
            ),
        )
        for recipe, time_s in (
            ("bf16 grad_accumulation=2", 0.1),
            ("compile-max-autotune precision=fp16", 0.08),
        )
        for seed in (0, 1, 2)
    ]
    comparison = compared(*candidates, usd_per_hour=7.5)
    parts = [as_table(comparison, width=width), finish_table(comparison, 10_000, CATALOGUE, width=width)]
    text = "\n".join([*parts, target_table(comparison, "loss=3", CATALOGUE, width=width)])
    assert max(map(len, text.splitlines())) <= width
    for heading in ("% peak", "verdict", "convergence", "measured", "mean s"):
        assert heading in text


@pytest.mark.parametrize(
    ("setups", "offers", "names"),
    [
        (({}, {"recipe": "fp32"}), ({}, {}), ["bf16", "fp32"]),
        (
            ({"fingerprint": {"torch": "2.12.0"}}, {"fingerprint": {"torch": "2.13.0", "driver": "580"}}),
            ({}, {}),
            ["bf16 with torch 2.12.0, driver none", "bf16 with torch 2.13.0, driver 580"],
        ),
        ((P5_NODE, P5_NODE), ({}, {"purchase": "spot"}), ["bf16 (on-demand)", "bf16 (spot)"]),
        (
            (P5_NODE, P5_NODE),
            ({"service": "sagemaker"}, {"region": "us-west-2"}),
            ["bf16 (sagemaker, us-east-1)", "bf16 (ec2, us-west-2)"],
        ),
    ],
)
def test_each_row_has_a_name_of_its_own(setups: Any, offers: Any, names: list[str]) -> None:
    step = Interval(value=0.1, low=0.0999, high=0.1001)
    rows = compared(
        *(
            MeasuredRun(run_id=str(number), summary=changed(PLAIN, step_time_s=step, **setup), **offer)
            for number, (setup, offer) in enumerate(zip(setups, offers, strict=True))
        )
    ).rows
    assert [name_of(row, rows) for row in rows] == names


@pytest.mark.parametrize("width", [80, 120])
def test_long_recipes_have_letters_in_what_a_job_costs_and_a_target_takes(width: int) -> None:
    names = ("bf16", "bf16 optimizer_impl=fused parameter_dtype=bf16-master")
    candidates = [
        changed(evaluated(name, seed, 2.0 + 0.1 * seed), step_time_s=Interval(value=time_s))
        for name, time_s in zip(names, (0.1, 0.08), strict=True)
        for seed in (0, 1, 2)
    ]
    comparison = compared(*candidates, usd_per_hour=7.5)
    for text in (
        finish_table(comparison, 10_000, CATALOGUE, width=width),
        target_table(comparison, "loss=3", CATALOGUE, width=width),
    ):
        sentence, _, rows, legend, *_ = text.split("\n\n")
        assert "bf16 (two options)" in " ".join(sentence.split()) and legend == (
            "o: optimizer_impl=fused, p: parameter_dtype=bf16-master"
        )
        assert [line.split("  ")[0] for line in rows.splitlines()[2:]] == ["bf16 +o+p", "bf16"]
