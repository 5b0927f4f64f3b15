"""`fastlaunch report`: what it writes and refuses, and what the page's scripts are given to draw."""

import base64
import gzip
import hashlib
import json
import os
import random
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_records import write_run
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.api.report import report
from fastlaunch.cli.main import run
from fastlaunch.core.errors import UserError
from fastlaunch.measure.record_files import read_record
from fastlaunch.measure.steptime import NUM_POINTS, read_series, thin, wall_times_s
from fastlaunch.measure.summary import Interval
from fastlaunch.report.page.charts import picture
from fastlaunch.report.page.page import Predicted, as_html, cost_chart
from fastlaunch_train.records.records import STEP_PARTS, Eval, Profile

MEASUREMENTS = Path(__file__).parents[2] / "train" / "measurements"
CHARGED = "p5en.48xlarge:1/8"
PROFILE = Profile(
    step=60, num_steps=3, step_time_s=0.1, data_s=0.01, forward_s=0.03, backward_s=0.05, other_s=0.01
)


def import_runs(folder: Path, *, num_rounds: int = 3, steps: int = 60, **changes: Any) -> None:
    """Runs of bf16 and te-fp8 in rounds, imported; te-fp8 is 1.6 times as fast."""
    noise = random.Random(0)
    for number in range(num_rounds):
        for recipe, seconds in (("bf16", 0.16), ("te-fp8", 0.1)):
            name = f"{recipe}-{number}"
            write_run(
                folder / name,
                recipe=recipe,
                run_id=name,
                steps=steps,
                step_time_s=seconds * noise.gauss(1, 0.002),
                batch_size=64,
                seed=number,
                evals=[Eval(step=steps, split="validation", loss=2.0, num_samples=64, seconds=1.0)],
                header={"session": "one", "round": number + 1},
                **changes,
            )
    assert run(["runs", "import", str(folder)]) == 0


def page(*selectors: str, predictions: bool = False, **options: Any) -> str:
    """The page, without the JavaScript of Vega, which another process would make."""
    return as_html(report(*selectors, predictions=predictions, **options).page_input(), "")


def text_of(html: str) -> str:
    """The page without the marks of names that stay whole."""
    return re.sub(r'<span class="whole">(.*?)</span>', r"\1", html)


def data_of(html: str) -> Any:
    """What the page's script is given, by workload."""
    found = re.search(r'<script type="application/gzip" id="data">(.*?)</script>', html)
    assert found
    sections = json.loads(gzip.decompress(base64.b64decode(found[1])))
    return {section["workload"]: section for section in sections}


def test_a_page_and_a_chart_hold_the_answer_what_is_ranked_and_what_is_predicted(tmp_path: Path) -> None:
    import_runs(tmp_path, profile=PROFILE)
    priced = report(price_as=CHARGED)
    given = priced.page_input()
    html = as_html(given, "")
    assert json.loads(priced.json())["answer"]["sentence"] in text_of(html).partition("<main>")[0]
    section = data_of(html)["vit-huge"]
    fast, slow = section["rows"]
    assert (fast["colour"], slow["colour"]) == ("te-fp8", "bf16")
    value, low, high = fast["rate"]
    assert low < value < high and value == pytest.approx(640, rel=0.01)
    # Hours of a million images.
    assert fast["hours"][0] == pytest.approx(1e6 / value / 3600, rel=1e-3)
    assert fast["usdPerHour"] == pytest.approx(7.912, rel=0.2)
    assert {price["offer"] for price in section["prices"]} == {"p5en.48xlarge ec2 us-east-1 on-demand"}
    assert {point["name"] for point in section["parts"]} == {"te-fp8", "bf16"}
    assert section["parts"][0] == {"name": "te-fp8", "part": STEP_PARTS[0], "ms": 10.0, "order": 0}
    assert section["references"]["te-fp8"] == "bf16"
    assert {curve["name"] for curve in section["curves"]} == {"te-fp8", "bf16"}
    # Nobody measured on these, and each is dearer or cheaper, but not by more than was asked for.
    assert section["predicted"]
    cheapest = fast["hours"][0] * fast["usdPerHour"]
    assert all(of["hours"][0] * of["usdPerHour"] <= 3.01 * cheapest for of in section["predicted"])

    spec, data = cost_chart(given)
    measured = {point["name"]: point for point in data["rows"] if point["kind"] == "measured"}
    assert set(measured) == {"bf16 on H200", "te-fp8 on H200"}
    drawn = measured["te-fp8 on H200"]
    assert drawn["usd_low"] < drawn["usd"] < drawn["usd_high"]
    assert drawn["usd"] / drawn["hours"] == pytest.approx(7.912, rel=0.2)
    # No point is both cheaper and faster than one of the front.
    for point in data["front"]:
        assert not any(of["usd"] < point["usd"] and of["hours"] < point["hours"] for of in data["rows"])
    assert "predicted" in {point["kind"] for point in data["rows"]}
    assert picture(spec, data).startswith(b"\x89PNG")


def test_the_large_number_is_there_too_where_the_baseline_is_best(tmp_path: Path) -> None:
    import_runs(tmp_path)
    for options in ({}, {"baseline": "te-fp8"}):
        html = page(price_as=CHARGED, **options)
        block = re.search(r"<strong>(1\.(?:59|6\d)\dx)</strong>\s*<div>\s*<p>(.*?)</p>", text_of(html))
        # Beside it what, where, and how sure.
        assert block and block[2].startswith("te-fp8 on H200 gives ")
        assert f"{block[1]} that of bf16 (95% interval " in block[2]
    assert re.search(
        r"<strong>[\d,]+</strong>\s*<div>\s*<p>bf16", text_of(page("recipe=bf16", price_as=CHARGED))
    )
    # A number that is not proven is not written large.
    assert "<strong>" not in page("te-fp8-0", "bf16-0", price_as=CHARGED).partition("<main>")[0]


def test_the_second_best_is_named_below_the_answer() -> None:
    assert run(["runs", "import", str(MEASUREMENTS / "gpt2-xsmall-graph-h100")]) == 0
    head = text_of(page(price_as="p5.4xlarge")).partition("<main>")[0]
    assert re.search(
        r"bf16 \(95% interval .*?</p>\s*<p>Second: graph, \d\d% less \(95% interval [^<]*\); settled\.</p>",
        head,
    )


def test_a_cheaper_prediction_is_named_below_the_answer_and_colours_agree(tmp_path: Path) -> None:
    import_runs(tmp_path)
    given = report(price_as=CHARGED).page_input()
    html = as_html(given, "")
    section = data_of(html)["vit-huge"]
    domains = {
        name: re.findall(r'"domain": (\[.*?\])', json.dumps(spec))
        for name, spec in section["specs"].items()
        if name in ("cost", "usd", "rate")
    }
    (domain,) = {of for found in domains.values() for of in found}
    shown = {of["colour"] for of in (*section["rows"], *section["predicted"])}
    assert set(json.loads(domain)) == shown and all(domains.values())
    costs = [of["hours"][0] * of["usdPerHour"] for of in section["predicted"]]
    best = section["rows"][0]["hours"][0] * section["rows"][0]["usdPerHour"]
    assert ("Not measured, and may cost less: " in html) == (min(costs) < best)
    # A prediction at a tenth of the price costs the least.
    (first, *others) = given.predicted["vit-huge"]
    cheap = replace(first, name="cheap", usd_per_hour=first.usd_per_hour / 10)
    html = as_html(replace(given, predicted={"vit-huge": [cheap, *others]}), "")
    (sentence,) = re.findall(r"Not measured, and may cost less: [^<]*", text_of(html))
    assert f" on {first.instance}, $" in sentence and sentence in text_of(html).partition("<main>")[0]
    assert "nobody has run" not in html


def test_a_prediction_for_sequences_is_compared_in_tokens_as_the_rows_are() -> None:
    assert run(["runs", "import", str(MEASUREMENTS / "gpt2-xsmall-graph-h100")]) == 0
    given = report(price_as="p5.4xlarge").page_input()
    ((workload, rows),) = given.comparison.by_workload.items()
    best = max(rows, key=lambda row: row.cost.samples_per_usd.value if row.cost.samples_per_usd else 0.0)
    assert best.price is not None and best.cost.usd_per_million_samples is not None

    def beside(times_as_dear: float) -> str:
        assert best.price is not None and best.cost.usd_per_million_samples is not None
        usd = times_as_dear * best.cost.usd_per_million_samples.value
        hours = Interval(value=usd / best.price.usd_per_hour)
        predicted = Predicted(
            name="of a million sequences",
            recipe="bf16",
            instance="p5en.48xlarge",
            usd_per_hour=best.price.usd_per_hour,
            hours=hours,
            global_batch=8,
        )
        return as_html(replace(given, predicted={workload: [predicted]}), "")

    assert "and may cost less" in beside(0.9) and "for a million tokens" in beside(0.9)
    assert "and may cost less" not in beside(1.1)


def test_what_was_not_measured_says_so_in_the_answer_and_in_its_row(tmp_path: Path) -> None:
    assert run(["runs", "import", str(MEASUREMENTS / "llama-2-7b-lora-h100")]) == 0
    head, _, main = text_of(page(price_as="p5.4xlarge", predictions=True)).partition("<main>")
    assert "Whether fp8-frozen trains as well as bf16 is not known: no held-out loss was recorded" in head
    # It was measured with another batch, and cost something else.
    assert re.search(
        r"Not measured, .*: fp8-frozen dgrad_accumulation=fast on p5.4xlarge at a global batch of 1, "
        r"\$.*\(measured at a global batch of 2: \$[\d.]+\)",
        head,
    )
    rows = re.findall(r"<tr data-predicted-row.*?</th>", main)
    assert rows and all('<span class="kind">predicted</span>' in row for row in rows)
    import_runs(tmp_path)
    assert "is not known" not in page("workload=vit-huge", price_as=CHARGED).partition("<main>")[0]


def test_what_decides_stands_beside_the_name(tmp_path: Path) -> None:
    import_runs(tmp_path)
    rows = page(price_as=CHARGED).partition('<table class="rows">')[2]
    headings = re.findall(r"<th scope=\"col\"[^>]*>([^<]*)</th>", rows)
    assert headings[:4] == ["row", "x base", "verdict", "$/M images"]
    # The heading says what all rows have, and the chart is below.
    assert not {"GPUs", "batch", "runs"} & {*headings} and 'data-part="cost"' in rows


def test_a_chart_is_of_one_workload_with_prices(tmp_path: Path) -> None:
    import_runs(tmp_path / "one", num_rounds=1)
    with pytest.raises(UserError, match="price"):
        report(predictions=False).chart()
    write_run(tmp_path / "two", workload="gpt2-xsmall", run_id="other")
    assert run(["runs", "import", str(tmp_path / "two")]) == 0
    with pytest.raises(UserError, match="workload"):
        report(price_as=CHARGED, predictions=False).chart()


def test_another_batch_is_shown_and_not_ranked(tmp_path: Path) -> None:
    import_runs(tmp_path / "runs")
    write_run(tmp_path / "other", recipe="te-fp8", run_id="larger", batch_size=128, step_time_s=0.15)
    assert run(["runs", "import", str(tmp_path / "other")]) == 0
    given = report(price_as=CHARGED, predictions=False).page_input()
    section = data_of(as_html(given, ""))["vit-huge"]
    # The only row of its batch is beside no other.
    assert [row["base"] for row in section["rows"]] == [1, 1, None]
    # The last is the cheapest.
    assert [row["ranked"] for row in section["rows"]] == [True, True, False]
    assert section["rows"][2]["rate"][0] > section["rows"][0]["rate"][0]
    _, data = cost_chart(given)
    assert len(data["rows"]) == 2


def test_a_row_of_another_batch_is_priced_beside_the_baseline_of_its_batch(tmp_path: Path) -> None:
    import_runs(tmp_path / "runs")
    for number in range(3):
        for recipe, seconds in (("bf16", 0.2), ("te-fp8", 0.1)):
            name = f"{recipe}-{number}"
            write_run(
                tmp_path / "other" / name,
                run_id=f"wide-{name}",
                recipe=recipe,
                batch_size=128,
                step_time_s=seconds,
                seed=number,
            )
    assert run(["runs", "import", str(tmp_path / "other")]) == 0
    html = page(price_as=CHARGED)
    assert [row["base"] for row in data_of(html)["vit-huge"]["rows"]] == [1, 1, 3, 3]
    rows = re.findall(r'<tr data-row="(\d)".*?</tr>', html, re.DOTALL)
    assert len(rows) == 4
    ratios = re.findall(r'data-cell="ratio">([0-9.]+)', html)
    assert [round(float(ratio), 1) for ratio in ratios] == [1.6, 1.0, 2.0, 1.0]


def test_labels_have_letters_for_long_settings(tmp_path: Path) -> None:
    several = "bf16 ddp_bucket_mb=25 grad_accumulation=2"
    for number, recipe in enumerate(("bf16", "bf16 ddp_bucket_mb=25", several)):
        write_run(tmp_path / str(number), recipe=recipe, run_id=f"run-{number}")
    assert run(["runs", "import", str(tmp_path)]) == 0
    given = report(price_as=CHARGED, predictions=False).page_input()
    labels = {"bf16 on H200", "bf16 +u on H200", "bf16 +u+g on H200"}
    spec, data = cost_chart(given)
    assert {of["label"] for of in data["rows"]} == labels
    assert "ddp_bucket_mb=25" in spec["title"]["text"] and "grad_accumulation=2" in spec["title"]["text"]
    html = as_html(given, "")
    assert {row["short"] for row in data_of(html)["vit-huge"]["rows"]} == labels
    assert spec["title"]["text"] in html


def test_without_a_price_rows_have_speeds_and_nothing_is_predicted(tmp_path: Path) -> None:
    import_runs(tmp_path)
    section = data_of(page(predictions=True))["vit-huge"]
    assert [row["usdPerHour"] for row in section["rows"]] == [None, None]
    assert section["predicted"] == section["prices"] == []
    assert all(row["rate"] for row in section["rows"])


def test_runs_whose_samples_nobody_knows_have_runs_an_hour() -> None:
    assert run(["runs", "import", "--published"]) == 0
    made = report("workload=gpt2-xsmall", predictions=False)
    html = as_html(made.page_input(), "")
    (section,) = data_of(html).values()
    rates = [row["rate"] for row in section["rows"]]
    assert len(rates) == 5 and all(rate[0] > 3 and rate[1:] == [None, None] for rate in rates)
    for text in (html, made.markdown()):
        assert "runs/h" in text and "7.23" in text and "sequences/s" not in text


def test_every_row_has_the_command_that_makes_its_runs_again(tmp_path: Path) -> None:
    import_runs(tmp_path)
    html = page()
    commands = re.findall(r"<code>(fastlaunch submit .*?)</code>", html)
    assert len(commands) == 2
    for command, recipe in zip(commands, ("te-fp8", "bf16"), strict=True):
        words = command.split()
        assert words[words.index("--recipe") + 1] == recipe
        assert words[-4:] == ["--seed", "0", "--repeats", "3"]
    assert "sdpa:flash" in html  # of the fingerprint


def test_what_a_record_says_is_text_on_the_page(tmp_path: Path) -> None:
    nasty = '</script><img src=x onerror="alert(1)">'
    import_runs(tmp_path, device_name=nasty)
    html = page()
    assert nasty not in html and "<img src=x" not in html
    assert data_of(html)["vit-huge"]["rows"][0]["place"] == f"1 x {nasty}"


def test_a_page_names_no_other_host(tmp_path: Path) -> None:
    import_runs(tmp_path)
    html = page()
    outside_scripts = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert not re.findall(r"(?:src|href)=[\"'](?!#)", outside_scripts)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', html)
    allowed = dict(part.strip().split(" ", 1) for part in unescape(policy).split(";"))
    assert allowed["default-src"] == "'none'"
    for element, directive in (("script", "script-src"), ("style", "style-src")):
        own = re.findall(rf'<{element}(?: type="module")?>(.*?)</{element}>', html, flags=re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in own]
        assert allowed[directive].split() == [f"'sha256-{digest}'" for digest in digests] != []


def test_many_ranks_leave_the_page_small(tmp_path: Path) -> None:
    import_runs(tmp_path, num_rounds=2, steps=40, world_size=80)
    html = page()
    runs = data_of(html)["vit-huge"]["runs"]
    assert sum(len(run["ranks"]) for run in runs) <= 300
    # Of each row as many as of the other.
    assert [run["name"] for run in runs[:2]] == ["te-fp8", "bf16"]
    assert len(html.encode()) < 2e6
    assert f"Of 4 runs {len(runs)} are here" in html


def test_series_are_the_walls_that_the_step_time_is_of(tmp_path: Path) -> None:
    def seconds(rank: int, step: int) -> float:
        return 0.1 + 0.01 * rank + (0.3 if step == 57 else 0.0)

    paths = write_run(
        tmp_path, steps=80, step_time_s=seconds, world_size=2, wall_ratio=1.25, num_unsynchronised=4
    )
    first, second = read_series(paths)
    assert (first.rank, second.rank) == (0, 1)
    assert first.steps == list(range(1, 77))
    for series, path in zip((first, second), paths, strict=True):
        assert series.step_times_s == pytest.approx(wall_times_s(read_record(path)).tolist())
    assert max(first.step_times_s) == first.step_times_s[56]
    assert first.losses == pytest.approx([2 + 1 / step for step in first.loss_steps])


def test_a_step_that_was_done_again_is_the_later_attempts(tmp_path: Path) -> None:
    paths = write_run(tmp_path, steps=30, step_time_s=0.1, status=None)
    paths += write_run(tmp_path, steps=20, first_step=21, attempt=2, step_time_s=0.2)
    (series,) = read_series(paths)
    assert series.steps == list(range(1, 41))
    assert series.step_times_s[19:21] == pytest.approx([0.1, 0.2])


def test_a_file_that_cannot_be_read_has_no_series(tmp_path: Path) -> None:
    (path,) = write_run(tmp_path, steps=20)
    path.write_bytes(path.read_bytes()[:-7])  # as a killed process leaves it
    assert len(read_series([path])[0].steps) == 20
    path.write_text("no record\n")
    assert read_series([path, tmp_path / "gone.jsonl"]) == ()


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=2000),
    st.integers(min_value=4, max_value=NUM_POINTS),
)
def test_thinning_keeps_ends_and_extremes(values: list[float], num_points: int) -> None:
    kept = thin(np.array(values), num_points).tolist()
    assert len(kept) <= num_points and kept == sorted(set(kept))
    if values:
        assert kept[0] == 0 and kept[-1] == len(values) - 1
        assert {min(values), max(values)} <= {values[at] for at in kept}


def test_one_slow_step_of_many_is_kept() -> None:
    values = np.full(10_001, 0.1)
    values[[4321, 8765]] = 0.9, 0.05
    kept = thin(values, NUM_POINTS).tolist()
    assert {0, 4321, 8765, 10_000} <= set(kept) and len(kept) <= NUM_POINTS


def test_the_other_formats_are_what_compare_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_runs(tmp_path)
    for name in ("csv", "json"):
        capsys.readouterr()
        assert run(["compare", "--output", name]) == 0
        compared = capsys.readouterr().out
        assert run(["report", "--format", name]) == 0
        assert capsys.readouterr().out == compared


def test_markdown_has_a_row_for_each_and_escapes_what_is_markdown(tmp_path: Path) -> None:
    import_runs(tmp_path, device_name="a|b *c* <d>")
    lines = report(price_as=CHARGED, predictions=False).markdown().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 4
    assert len({re.sub(r"\\.", "", line).count("|") for line in table}) == 1
    assert lines[0].startswith("**vit-huge**: ")


def test_without_arguments_it_covers_every_run(tmp_path: Path) -> None:
    import_runs(tmp_path / "first")
    write_run(tmp_path / "second", recipe="compile", run_id="compile-1", batch_size=64)
    assert run(["runs", "import", str(tmp_path / "second")]) == 0
    recipes = {row["name"] for row in data_of(page())["vit-huge"]["rows"]}
    assert recipes == {"bf16", "te-fp8", "compile"}
    (section,) = data_of(page("recipe=te-*")).values()
    assert [row["name"] for row in section["rows"]] == ["te-fp8"]


@pytest.mark.slow
def test_a_page_is_written_over_its_own_with_the_prices_that_were_proposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another process makes the JavaScript of each page."""
    import_runs(tmp_path / "runs", num_rounds=1)
    monkeypatch.chdir(tmp_path)
    typed = ["report", "recipe=*", "--measured-only"]
    capsys.readouterr()
    assert run(typed) == 0
    # No run has a price, so the same command with one is proposed last.
    proposed = shlex.split(capsys.readouterr().err.splitlines()[-1].removeprefix("next: fastlaunch "))
    assert set(typed) <= set(proposed) and "--price-as" in proposed
    assert run(proposed) == 0
    assert "next:" not in capsys.readouterr().err
    assert Path("report.html").read_text().startswith("<!doctype")
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "report.html"}


def test_a_page_is_never_written_over_another_file_that_was_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import_runs(tmp_path / "runs", num_rounds=1)
    monkeypatch.chdir(tmp_path)
    Path("report.html").write_text("<p>somebody's own")
    capsys.readouterr()
    assert run(["report", "--measured-only"]) == 2
    assert "report.html" in capsys.readouterr().err
    assert Path("report.html").read_text() == "<p>somebody's own"
    assert run(["report", "--format", "md", "-o", "report.html"]) == 0  # named
    assert run(["report", "--format", "md", "-o", "no/such/folder.html"]) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "report.html"}


def test_what_is_no_plain_file_is_written_as_it_is(tmp_path: Path) -> None:
    import_runs(tmp_path / "runs", num_rounds=1)
    text, link, pipe = (tmp_path / name for name in ("page.md", "link.md", "pipe.md"))
    link.symlink_to(text)
    assert run(["report", "-o", str(link)]) == 0
    assert link.is_symlink() and text.read_text().startswith("**vit-huge**")
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        shown = pool.submit(pipe.read_text)
        assert run(["report", "-o", str(pipe)]) == 0
        assert shown.result().startswith("**vit-huge**") and pipe.is_fifo()
    assert run(["report", "-o", str(text / "a.md")]) == 2  # in a file


def test_the_files_name_says_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import_runs(tmp_path / "runs")
    for name, start in (("a.md", "**vit-huge**"), ("a.csv", "workload,")):
        assert run(["report", "-o", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_text().startswith(start)
    assert run(["report", "-o", str(tmp_path / "a.md"), "--format", "json"]) == 0
    assert json.loads((tmp_path / "a.md").read_text())["rows"]
    assert run(["report", "-o", str(tmp_path / "a.pdf")]) == 2
    assert not (tmp_path / "a.pdf").exists()


def test_what_cannot_be_reported_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "-o", str(tmp_path / "none.html")]) == 2
    import_runs(tmp_path / "runs")
    with pytest.raises(UserError):
        report(sweep="20200101")
    assert run(["report", "--format", "png", "-o", "-"]) == 2
    assert run(["report", "--open", "--format", "md"]) == 2
    assert "--open" in capsys.readouterr().err
    assert not (tmp_path / "none.html").exists()


def test_without_altair_the_page_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import_runs(tmp_path / "runs")
    monkeypatch.setitem(__import__("sys").modules, "altair", None)
    assert run(["report", "-o", str(tmp_path / "page.html")]) == 2
    assert "fastlaunch[report]" in capsys.readouterr().err
    assert run(["report", "--format", "md"]) == 0


def test_specifications_are_vega_lites() -> None:
    import altair

    from fastlaunch.report.page import charts

    for spec in (
        charts.cost_against_time("images", ["bf16"]),
        charts.bars("USD", ["bf16"]),
        charts.step_times(),
        charts.step_parts(STEP_PARTS),
        charts.losses(),
        charts.price_history(),
    ):
        altair.Chart.from_dict(spec)  # raises SchemaValidationError


def test_a_name_does_not_break_at_its_hyphens_on_a_phone(tmp_path: Path) -> None:
    import_runs(tmp_path)
    html = page(price_as=CHARGED)
    assert '<span class="whole">te-fp8</span> on H200 gives' in html
    assert html != text_of(html) and "te-fp8 on H200 gives" in text_of(html)
