"""Rows that were asked for alike are told apart: in the table, and where they are named in a sentence."""

import datetime
from typing import Any

import pytest
from fake_summaries import PLAIN, changed

from fastlaunch.analysis.compare import Comparison, MeasuredRun, PriceRequest, compare
from fastlaunch.catalog.load import load_catalogue
from fastlaunch.measure.summary import Interval
from fastlaunch.report.text import name_of

H100 = {"instance": "p5.48xlarge", "device_name": "NVIDIA H100 80GB HBM3", "num_gpus": 8}


def compared(*rows: tuple[dict[str, Any], dict[str, Any]]) -> Comparison:
    """A row for each: what its run is beside the others', and how its machine was rented."""
    step = Interval(value=0.1, low=0.0999, high=0.1001)
    candidates = [
        MeasuredRun(run_id=str(number), summary=changed(PLAIN, step_time_s=step, **changes), **terms)
        for number, (changes, terms) in enumerate(rows)
    ]
    prices = PriceRequest(today=datetime.date(2026, 11, 21))
    return compare(candidates, catalogue=load_catalogue(), prices=prices)


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        (({}, {}), ({"recipe": "fp32"}, {}), ["bf16", "fp32"]),
        (
            ({"fingerprint": {"torch": "2.12.0"}}, {}),
            ({"fingerprint": {"torch": "2.13.0", "driver": "580"}}, {}),
            ["bf16 with torch 2.12.0, driver none", "bf16 with torch 2.13.0, driver 580"],
        ),
        ((H100, {}), (H100, {"purchase": "spot"}), ["bf16 (on-demand)", "bf16 (spot)"]),
        (
            (H100, {"service": "sagemaker"}),
            (H100, {"region": "us-west-2"}),
            ["bf16 (sagemaker, us-east-1)", "bf16 (ec2, us-west-2)"],
        ),
    ],
)
def test_each_row_has_a_name_of_its_own(one: Any, other: Any, names: list[str]) -> None:
    rows = compared(one, other).rows
    assert [name_of(row, rows) for row in rows] == names
