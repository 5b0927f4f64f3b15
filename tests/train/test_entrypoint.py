"""The training entrypoint as a process: what it records, how it ends, what it refuses."""

import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from entrypoint import (
    ROOT,
    TINY,
    Run,
    arguments,
    end_of,
    ended,
    losses,
    record,
    run_command,
    start,
    start_command,
    trained,
)

ENDLESS = ("--steps", "100000")
SAGEMAKER_PLAN = ROOT / "tests" / "plans" / "sagemaker-p5.48xlarge-on-demand.json"


def wait_for_blocks(output: Path, count: int, process: Run | subprocess.Popen[str]) -> None:
    path = output / "rank-00000-attempt-1.jsonl"
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_text().count('"kind":"block"') < count:
        assert process.poll() is None, "ended early"
        assert time.monotonic() < deadline, "no block was written"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float | None]:
    """The losses of 24 steps without a stop."""
    return [step.loss for step in trained(tmp_path_factory.mktemp("whole"), "--steps", "24").steps]


@pytest.fixture(scope="module")
def ten_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of 10 steps, with checkpoints after 5 and 10."""
    output = tmp_path_factory.mktemp("ten")
    trained(output, "--steps", "10", "--checkpoint-every", "5")
    return output


@pytest.fixture
def stopped(ten_steps: Path, tmp_path: Path) -> Path:
    """A copy of that output, to go on in."""
    return Path(shutil.copytree(ten_steps, tmp_path / "stopped"))


def test_a_plain_run_records_everything(tmp_path: Path) -> None:
    read = trained(
        tmp_path,
        *("--seed", "3"),
        FASTLAUNCH_RUN_ID="r1",
        FASTLAUNCH_COMMIT="abc",
        FASTLAUNCH_SESSION="sub-1",
        FASTLAUNCH_ROUND="2",
        FASTLAUNCH_CUDA_COMPAT="compat 580.1",
        FASTLAUNCH_SERVICE="sagemaker",
    )
    header = read.header
    assert (header["run_id"], header["commit"], header["seed"]) == ("r1", "abc", 3)
    assert (header["session"], header["round"], header["num_data_workers"]) == ("sub-1", 2, 0)
    assert (header["recipe"]["label"], header["recipe"]["precision"]) == ("fp32", "fp32")
    assert header["workload"]["name"] == f"{TINY}:build"
    assert header["workload"]["num_parameters"] == 16 * 32 + 32 + 2 * 32 + 32 * 4 + 4
    machine = [header["machine"][name] for name in ("device_type", "cuda_compat", "service")]
    assert machine == ["cpu", "compat 580.1", "sagemaker"]
    assert header["versions"]["torch"]
    assert [step.step for step in read.steps] == list(range(1, 21))
    assert all(step.num_samples == 4 and step.num_tokens == 0 for step in read.steps)
    assert all(step.step_time_s > 0 and step.loss is not None for step in read.steps)
    assert {1, 10, 20} <= {block.last_step for block in read.blocks}, "the first step, and the warm-up"
    assert [phase.name for phase in read.phases] == ["build"] * 3
    assert (end_of(tmp_path).status, end_of(tmp_path).num_steps) == ("completed", 20)


def test_arguments_reach_the_users_function_and_the_record(tmp_path: Path) -> None:
    more = ("--set-workload", "width=3", "--set-workload", "rate=1", "--checkpoint-every", "20")
    sized = f"{TINY}:sized"
    workload = trained(tmp_path, *more, workload=sized).header["workload"]
    assert (workload["arguments"], workload["learning_rate"]) == ({"width": 3, "rate": 1}, 1.0)
    assert workload["num_parameters"] == 16 * 3 + 3 + 3 * 4 + 4
    # Nothing needs the gradient of the inputs.
    assert workload["flops_per_sample"] == 2 * (2 * 16 * 3 + 3 * 3 * 4)
    longer = ("--steps", "30", "--resume", "--set-workload", "width=4")
    assert "another arguments" in ended(2, arguments(tmp_path, *longer, workload=sized))
    assert "cannot be called with no arguments" in ended(2, arguments(tmp_path / "none", workload=sized))
    assert not (tmp_path / "none").exists()


def test_what_is_printed_for_programs_is_what_sagemakers_expressions_find(tmp_path: Path) -> None:
    assert "fastlaunch: " not in ended(0, arguments(tmp_path / "plain", "--steps", "1"))
    printed = ended(0, arguments(tmp_path), FASTLAUNCH_PRINT_METRICS="1")
    request = json.loads(SAGEMAKER_PLAN.read_text())["request"]
    definitions = request["AlgorithmSpecification"]["MetricDefinitions"]
    found = {one["Name"]: [float(v) for v in re.findall(one["Regex"], printed)] for one in definitions}
    recorded = record(tmp_path)
    ends = [recorded.steps[block.last_step - 1] for block in recorded.blocks]
    assert found["loss"] == pytest.approx([step.loss for step in ends], abs=1e-6)
    times_s = [b.wall_s / (b.last_step - b.first_step + 1) for b in recorded.blocks]
    assert found["step_time_s"] == pytest.approx(times_s, abs=1e-6)
    assert found["samples_per_s"] == pytest.approx([4 / time_s for time_s in times_s], abs=0.01)


@pytest.mark.slow
def test_the_processes_that_load_data_are_counted_also_after_a_resume(tmp_path: Path) -> None:
    more = ("--data", "loader", "--checkpoint-every", "2", "--resume")
    for attempt, num_workers in ((1, 2), (2, 1)):
        steps = ("--steps", str(2 * attempt), "--num-workers", str(num_workers))
        read = trained(tmp_path, *more, *steps, workload="vit-tiny", attempt=attempt)
        assert read.header["num_data_workers"] == num_workers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    process = start(arguments(tmp_path, *ENDLESS, "--checkpoint-every", "100000", workload=f"{TINY}:slow"))
    wait_for_blocks(tmp_path, 2, process)
    process.send_signal(number)
    output = process.wait(timeout_s=30)
    assert process.poll() == 130, output
    end = end_of(tmp_path)
    assert (end.status, end.message) == ("interrupted", f"stopped by {number.name}")
    assert end.num_steps == record(tmp_path).steps[-1].step
    assert (tmp_path / "checkpoints" / f"step-{end.num_steps:08d}.pt").exists()


@pytest.mark.slow
def test_a_process_that_cannot_hear_is_ended_with_its_record(tmp_path: Path) -> None:
    process = start(arguments(tmp_path, workload=f"{TINY}:hanging"))
    wait_for_blocks(tmp_path, 1, process)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout_s=60)
    assert process.poll() == 130
    assert end_of(tmp_path).status == "interrupted"
    assert "no step ended" in (end_of(tmp_path).message or "")


@pytest.mark.parametrize(
    ("function", "status", "code"), [("nan", "nan_loss", 33), ("out_of_memory", "out_of_memory", 12)]
)
def test_a_failure_has_its_own_status(tmp_path: Path, function: str, status: str, code: int) -> None:
    output = ended(code, arguments(tmp_path, workload=f"{TINY}:{function}"))
    assert end_of(tmp_path).status == status
    assert end_of(tmp_path).message
    assert status in output


def test_sigkill_leaves_the_record_up_to_the_last_block(tmp_path: Path) -> None:
    argv = arguments(tmp_path, "--steps", "30", "--checkpoint-every", "5", workload=f"{TINY}:kill_itself")
    ended(-9, argv)
    read = record(tmp_path)
    assert read.end is None
    assert read.blocks[-1].last_step == read.steps[-1].step == 20


def test_resuming_gives_the_same_losses_as_not_stopping(stopped: Path, whole: list[float | None]) -> None:
    again = trained(stopped, "--steps", "24", "--checkpoint-every", "6", "--resume", attempt=2)
    assert again.header["first_step"] == 11
    assert again.checks == ()
    assert losses(stopped) + losses(stopped, attempt=2) == whole


def test_a_checkpoint_alone_is_enough_to_go_on_from_on_another_machine(
    stopped: Path, tmp_path: Path, whole: list[float | None]
) -> None:
    output = tmp_path / "second"
    (output / "checkpoints").mkdir(parents=True)
    newest = stopped / "checkpoints" / "step-00000010.pt"
    newest.rename(output / "checkpoints" / newest.name)
    assert "already holds the checkpoints" in ended(2, arguments(output))
    read = trained(output, "--steps", "14", "--resume", attempt=3, FASTLAUNCH_ATTEMPT="3")
    assert [path.name for path in output.glob("rank-*.jsonl")] == ["rank-00000-attempt-3.jsonl"]
    assert (read.header["attempt"], read.header["first_step"]) == (3, 11)
    assert losses(output, attempt=3) == whole[10:14]


def test_a_finished_run_that_is_resumed_stays_completed(stopped: Path) -> None:
    """As when a job is killed before its end line. No attempt takes the number of one before."""
    more = ("--steps", "10", "--checkpoint-every", "5", "--resume")
    again = trained(stopped, *more, attempt=2, FASTLAUNCH_ATTEMPT="1")
    assert not again.steps
    assert again.end is not None and (again.end.status, again.end.num_steps) == ("completed", 10)


def test_a_signal_during_a_checkpoint_needs_no_second_one(tmp_path: Path) -> None:
    argv = arguments(tmp_path, *ENDLESS, "--checkpoint-every", "10", workload=f"{TINY}:slow_checkpoint")
    process = start(argv, CHECKPOINT_S="1.0", FASTLAUNCH_STOP_GRACE_S="0.3")
    wait_for_blocks(tmp_path, 2, process)
    # The second block ends with step 10, and with it begins the checkpoint.
    assert record(tmp_path).steps[-1].step == 10
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    output = process.wait(timeout_s=30)
    assert process.poll() == 130, output
    assert (end_of(tmp_path).status, end_of(tmp_path).num_steps) == ("interrupted", 10)
    checkpoint, *_ = (phase for phase in record(tmp_path).phases if phase.name == "checkpoint")
    assert checkpoint.seconds >= 1.0
    assert (tmp_path / "checkpoints" / "step-00000010.pt").exists()


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (("--steps", "5", "--resume"), "--steps"),
        (("--resume", "--seed", "5"), "another seed"),
        ((), "already holds the record"),
    ],
)
def test_another_run_is_refused_where_one_was(stopped: Path, more: tuple[str, ...], word: str) -> None:
    path = stopped / "rank-00000-attempt-1.jsonl"
    before = path.read_bytes()
    assert word in ended(2, arguments(stopped, "--checkpoint-every", "5", *more))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("more", "env", "word"),
    [
        (["--recipe", "bf61"], {}, "bf16"),
        ([], {"FASTLAUNCH_ATTEMPT": "soon"}, "FASTLAUNCH_ATTEMPT is 'soon'"),
    ],
)
def test_a_bad_request_is_refused_before_anything_is_written(
    tmp_path: Path, more: list[str], env: dict[str, str], word: str
) -> None:
    output = ended(2, [*arguments(tmp_path / "out"), *more], **env)
    assert word in output
    assert "Traceback" not in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("function", "hook", "error"),
    [("wrong_shapes", "loss", "RuntimeError"), ("without_a_loss", "without_a_loss", "TypeError")],
)
def test_an_error_of_ones_own_file_names_its_hook_and_line(
    tmp_path: Path, function: str, hook: str, error: str
) -> None:
    output = ended(1, arguments(tmp_path, workload=f"{TINY}:{function}"))
    message = end_of(tmp_path).message or ""
    found = re.match(rf"{hook} \({re.escape(str(TINY))}, line (\d+)\): {error}: ", message)
    assert found is not None, message
    assert int(found[1]) <= len(Path(TINY).read_text().splitlines())
    assert output.splitlines()[-1] == f"error: {message}"
    assert output.count("Traceback") == 1


@pytest.mark.parametrize(
    ("function", "more", "word"),
    [
        ("ending_batches", [], "batches have ended"),
        ("no_parameters", [], "nothing to train"),
        ("loss_of_each_sample", [], "shape (4,)"),
        ("listed_batches", [], "list, no iterator"),
        ("build", ["--batch-size", "6", "--set", "grad_accumulation=4"], "--batch-size 8"),
        # Before any pass, which would fail.
        ("without_outputs", ["--recipe", "bf16-fused", "--batch-size", "16"], "no transformer blocks"),
        # Before the model is built: only its blocks' refusal would follow.
        ("sized", ["--recipe", "bf16-fused", "--set-workload", "width=1792"], "and it is 1792"),
    ],
)
def test_what_cannot_be_trained_says_why_and_leaves_a_record(
    tmp_path: Path, function: str, more: list[str], word: str
) -> None:
    output = ended(2, [*arguments(tmp_path, workload=f"{TINY}:{function}"), *more])
    assert word in output
    assert "Traceback" not in output
    assert end_of(tmp_path).status == "failed"
    assert end_of(tmp_path).message


def test_a_failed_check_is_recorded_and_warned_of_and_ends_nothing(tmp_path: Path) -> None:
    output = ended(0, arguments(tmp_path, "--steps", "2", workload=f"{TINY}:mixing"))
    read = record(tmp_path)
    passed = {check.name: check.passed for check in read.checks}
    names = ("equivalence", "isolation", "permutation", "gradients", "gradients-by-tensor", "as-trained")
    assert passed == {name: name != "isolation" for name in names}
    (warning,) = [text for text in read.header["warnings"] if "check" in text]
    assert "isolation" in warning and f"warning: {warning}" in output


def test_a_workload_is_asked_for_batches_in_what_the_recipe_computes_in(tmp_path: Path) -> None:
    trained(tmp_path, "--steps", "2", "--eval-every", "2", workload=f"{TINY}:in_bf16", recipe="bf16")


@pytest.mark.parametrize(("batch_size", "parts", "probed"), [(12, 2, 6), (64, 1, 16)])
def test_no_more_samples_are_probed_than_a_step_has(
    tmp_path: Path, batch_size: int, parts: int, probed: int
) -> None:
    requested = tmp_path / "requested"
    more = ("--batch-size", str(batch_size), "--steps", "1", "--set", f"grad_accumulation={parts}")
    read = trained(tmp_path / "out", *more, workload=f"{TINY}:batches_noted", BATCHES_NOTED=str(requested))
    assert requested.read_text().split() == [str(probed), str(batch_size)]
    assert len(read.checks) == 6


@pytest.mark.parametrize(
    ("blocker", "more", "code"), [("out", [], 28), ("out/checkpoints", ["--checkpoint-every", "10"], 2)]
)
def test_what_cannot_be_written_to_is_told_before_training(
    tmp_path: Path, blocker: str, more: list[str], code: int
) -> None:
    (tmp_path / blocker).parent.mkdir(exist_ok=True)
    (tmp_path / blocker).write_text("in the way")
    output = ended(code, arguments(tmp_path / "out", *more))
    assert "File exists" in output and str(tmp_path / blocker) in output
    assert "Traceback" not in output


def test_auto_is_the_workloads_own_batch_without_a_gpu_and_trains_as_if_it_had_been_given(
    tmp_path: Path,
) -> None:
    searched, given = tmp_path / "searched", tmp_path / "given"
    read = trained(searched, "--batch-size", "auto", "--steps", "3")
    batch_size = read.header["batch_size_per_gpu"]
    assert batch_size == 8
    assert str(batch_size) in (read.phases[0].detail or "")
    trained(given, "--batch-size", str(batch_size), "--steps", "3")
    assert losses(searched) == losses(given)


def test_a_disk_that_fills_up_ends_the_run_and_leaves_whole_blocks(tmp_path: Path) -> None:
    output = ended(28, arguments(tmp_path, "--steps", "5000"), FILE_SIZE_LIMIT="40000")
    assert "File too large" in output
    assert "Traceback" not in output
    read = record(tmp_path)
    assert not read.truncated
    assert read.blocks[-1].last_step == read.steps[-1].step


def test_a_run_whose_end_line_does_not_fit_does_not_pass_for_completed(tmp_path: Path) -> None:
    whole, cut = tmp_path / "1", tmp_path / "2"
    ended(0, arguments(whole, "--steps", "1"))
    # Half of the end line fits: more than that the times of one step do not differ in digits.
    lines = (whole / "rank-00000-attempt-1.jsonl").read_bytes().splitlines(keepends=True)
    limit = sum(map(len, lines)) - len(lines[-1]) // 2
    output = ended(28, arguments(cut, "--steps", "1"), FILE_SIZE_LIMIT=str(limit))
    assert "could not be finished" in output
    assert record(cut).end is None


def test_a_checkpoint_that_does_not_fit_ends_the_run_and_says_so_in_its_record(tmp_path: Path) -> None:
    ended(28, arguments(tmp_path, "--checkpoint-every", "10", "--steps", "30"), FILE_SIZE_LIMIT="8000")
    # It is told at the end of a block: before the next save begins, at the latest.
    assert end_of(tmp_path).status == "failed" and end_of(tmp_path).num_steps in (10, 20)
    assert not list(tmp_path.glob("checkpoints/*"))


@pytest.mark.slow
def test_two_ranks_agree_and_record_their_own_files(tmp_path: Path) -> None:
    code, output = run_command(arguments(tmp_path, "--steps", "30"), nproc=2)
    assert code == 0, output
    first, second = record(tmp_path, rank=0), record(tmp_path, rank=1)
    assert first.header["world_size"] == second.header["world_size"] == 2
    assert [(b.first_step, b.last_step) for b in first.blocks] == [
        (b.first_step, b.last_step) for b in second.blocks
    ]
    assert losses(tmp_path) != losses(tmp_path, rank=1), "each rank has its own data"
    assert output.count("(the model)") == output.count("step 30 of 30") == 1, output


@pytest.mark.slow
def test_a_failing_rank_ends_the_run_with_records_that_say_so(tmp_path: Path) -> None:
    code, output = run_command(arguments(tmp_path, *ENDLESS, workload=f"{TINY}:failing_rank"), nproc=2)
    assert code != 0, output
    assert end_of(tmp_path, rank=1).status == "failed"
    assert "rank 1 had enough" in (end_of(tmp_path, rank=1).message or "")
    assert end_of(tmp_path, rank=0).status in ("failed", "interrupted")


@pytest.mark.slow
def test_a_signal_to_torchrun_interrupts_every_rank_at_the_same_step(tmp_path: Path) -> None:
    argv = arguments(tmp_path, *ENDLESS, "--checkpoint-every", "100000", workload=f"{TINY}:slow")
    process = start_command(argv, nproc=2)
    wait_for_blocks(tmp_path, 2, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=40)
    ends = [end_of(tmp_path, rank=rank) for rank in range(2)]
    assert [end.status for end in ends] == ["interrupted", "interrupted"]
    assert len({end.num_steps for end in ends}) == 1
    assert len(list((tmp_path / "checkpoints").glob("step-*.pt"))) == 1
