"""A small run of the tools in tests/benchmarks that no other test runs, so that none breaks unseen."""

import json
import subprocess
from statistics import fmean, mean

import pytest

from benchmarks import bench, mlperf_throughput, prediction, regret, scale, script_cost, step_profile, sweeps
from fastlaunch.catalog.hardware import TRAINING_THROUGHPUT

PUBLISHED = prediction.read_rows(TRAINING_THROUGHPUT)


def test_sweeps_of_a_few_small_matrices_cost_a_part_of_all_runs() -> None:
    outcomes = sweeps.simulate(sweeps.SIZES[0], sweeps.NOISES[0], draws=4)
    assert fmean(each.cost for each in outcomes) < 0.3
    assert all(each.ratio <= sweeps.NEAR and 1.0 <= each.ratio_of_full <= sweeps.NEAR for each in outcomes)
    assert all(each.num_runs < each.num_cells * sweeps.MAX_ROUNDS / 2 for each in outcomes)


def test_predictions_of_rows_that_were_left_out_are_judged() -> None:
    judged = list(prediction.cases(PUBLISHED[::10], 2))
    assert {case.evidence for case in judged} >= {"A", "B", "C"}
    assert mean(case.errors["fastlaunch"] for case in judged) < 1
    assert prediction.table(judged).count("\n") > 3


def test_mlperf_throughput_is_logged_or_told_by_the_time_to_train() -> None:
    def system(submitter: str, seconds: float, line: str, benchmark: str = "retinanet") -> dict[str, str]:
        return {
            "submitter": submitter,
            "system": "s",
            "benchmark": benchmark,
            "accelerator": "NVIDIA H200",
            "nodes": "1",
            "accelerators_per_node": "8",
            "framework": "PyTorch",
            "logs": "5",
            "median_of_throughput_lines": line,
            "global_batch": "256",
            "seconds_to_train_median": str(seconds),
        }

    systems = [
        system("whole", 2000, "2500"),
        system("another", 1250, "4000"),
        system("per-gpu", 2000, "312"),
        system("unsaid", 1000, ""),
        system("too-short", 200, ""),
        system("slow-data", 4000, "2500"),
        system("alone", 2000, "2500", "rgat"),
        system("unsaid", 2000, "", "rgat"),
    ]
    rows = mlperf_throughput.rows_of(systems, "v5.1")
    found = {row["path"].partition("/")[0]: float(row["throughput"]) for row in rows}
    assert found == {"another": 4000, "per-gpu": 2496, "unsaid": 5000, "whole": 2500}
    assert {row["num_gpus"] for row in rows} == {"8"}
    shipped = TRAINING_THROUGHPUT.read_bytes()
    once = mlperf_throughput.joined(shipped, rows, "v5.1")
    assert once != shipped and mlperf_throughput.joined(once, rows, "v5.1") == once


def test_lines_that_all_count_one_accelerator_show_it_beside_systems_of_other_sizes() -> None:
    def system(nodes: int, seconds: float, line: str, batch: str) -> dict[str, str]:
        return {
            "submitter": f"of {nodes}",
            "system": batch,
            "benchmark": "retinanet",
            "accelerator": "NVIDIA H200",
            "nodes": str(nodes),
            "accelerators_per_node": "8",
            "framework": "PyTorch",
            "logs": "5",
            "median_of_throughput_lines": line,
            "global_batch": batch,
            "seconds_to_train_median": str(seconds),
        }

    systems = [
        *(system(1, 2000, "310", "320"), system(2, 1040, "298", "320"), system(4, 560, "277", "320")),
        *(system(1, 2050, "308", "256"), system(8, 442, "174", "256")),
    ]
    rows = mlperf_throughput.rows_of(systems, "v5.0")
    found = {(row["num_gpus"], float(row["batch_per_gpu"])): float(row["throughput"]) for row in rows}
    assert found == {("8", 40): 2480, ("16", 20): 4768, ("32", 10): 8864, ("8", 32): 2464, ("64", 4): 11136}


def test_a_round_is_read_from_the_logs_that_reached_the_target(tmp_path) -> None:
    def log(start_ms: int, stop_ms: int, status: str) -> str:
        lines = [
            {"key": "global_batch_size", "value": 64, "time_ms": 1, "metadata": {}},
            {"key": "run_start", "value": None, "time_ms": start_ms, "metadata": {}},
            {"key": "tracked_stats", "value": {"throughput": 50.0}, "time_ms": 5, "metadata": {}},
            {"key": "run_stop", "value": None, "time_ms": stop_ms, "metadata": {"status": status}},
        ]
        return "noise\n" + "\n".join(f"0: :::MLLOG {json.dumps(line)}" for line in lines)

    of_system, described = tmp_path / "Who/results/box/bert", tmp_path / "Who/systems/box.json"
    of_system.mkdir(parents=True)
    described.parent.mkdir()
    number_of = {"number_of_nodes": "2", "accelerators_per_node": 8}
    described.write_text(
        json.dumps({"accelerator_model_name": "NVIDIA H200", "framework": "PyTorch", **number_of})
    )
    for number, run in enumerate([(0, 9000, "success"), (0, 11000, "success"), (0, 99000, "aborted")]):
        (of_system / f"result_{number}.txt").write_text(log(*run))
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "Add results"]):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True)
    (system,) = mlperf_throughput.systems_of(tmp_path)
    assert (system["submitter"], system["system"], system["benchmark"]) == ("Who", "box", "bert")
    assert (system["nodes"], system["accelerators_per_node"], system["logs"]) == ("2", "8", "2")
    assert float(system["seconds_to_train_median"]) == 10 and system["global_batch"] == "64"
    assert float(system["median_of_throughput_lines"]) == 50


def test_a_pick_by_prediction_is_judged_by_what_was_published() -> None:
    picks = list(
        regret.picks([row for row in PUBLISHED if row["source_repo"] == "NVIDIA/DeepLearningExamples"])
    )
    assert {(pick.known, pick.method) for pick in picks} == {
        (known, method) for known in regret.KNOWN for method in regret.METHODS
    }
    assert min(pick.regret for pick in picks) == pytest.approx(0)
    assert regret.table(picks).count("\n") == 1 + len(regret.KNOWN) * len(regret.METHODS)


def test_the_cost_of_recording_is_measured() -> None:
    (result,) = bench.bench_record()
    assert result.limit == 0.005 and 0 < result.ratio < 1


@pytest.mark.parametrize(("number", "num_outside"), [(6, 0), (20, 5), (100, 39)])
def test_the_medians_interval_by_order_statistics(number: int, num_outside: int) -> None:
    # The 6th and the 15th of 20 values.
    assert script_cost.num_outside(number) == num_outside


def test_a_profile_without_a_record_has_empty_cells(tmp_path) -> None:
    assert set(step_profile._cells(tmp_path)) == {"n/a"}


def test_kernels_share_a_gpus_time_by_what_they_do() -> None:
    names = {"nvjet_sm90_tst_coopA": 5, "cudnn_generated_sdpa_flash_bprop": 3, "triton_poi_fused_add": 1}
    events = [{"cat": "kernel", "name": name, "dur": dur} for name, dur in names.items()]
    events += [
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "dur": 1},
        {"cat": "cpu_op", "name": "mm", "dur": 9},
    ]
    shares = step_profile.shares_of_kernels(events)
    assert shares == {"attention": 0.3, "matrix products": 0.5, "other kernels": 0.2}


@pytest.mark.full
def test_commands_over_a_small_ledger_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main(["--runs", "40", "--people", "2", "--machines", "1"])
    assert "| fastlaunch reap --dry-run" in capsys.readouterr().out
