"""The training entrypoint as a process: what it records, how it ends, what it refuses."""

import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from entrypoint import TINY, Run, arguments, record, run, run_command, start, start_command


def wait_for_blocks(output: Path, count: int, process: Run | subprocess.Popen[str]) -> None:
    path = output / "rank-00000-attempt-1.jsonl"
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_text().count('"kind":"block"') < count:
        assert process.poll() is None, "ended early"
        assert time.monotonic() < deadline, "no block was written"
        time.sleep(0.02)


def test_a_plain_run_records_everything(tmp_path: Path) -> None:
    code, output = run(
        arguments(tmp_path, "--seed", "3"),
        FASTLAUNCH_RUN_ID="r1",
        FASTLAUNCH_COMMIT="abc",
        FASTLAUNCH_CUDA_COMPAT="compat 580.1",
        FASTLAUNCH_SERVICE="sagemaker",
    )
    assert code == 0, output
    read = record(tmp_path)
    header = read.header
    assert (header["run_id"], header["commit"], header["seed"]) == ("r1", "abc", 3)
    assert header["num_data_workers"] == 0
    assert header["recipe"]["label"] == "fp32"
    assert header["recipe"]["precision"] == "fp32"
    assert header["workload"]["name"] == f"{TINY}:build"
    assert header["workload"]["num_parameters"] == 16 * 32 + 32 + 2 * 32 + 32 * 4 + 4
    assert header["machine"]["device_type"] == "cpu"
    assert header["machine"]["cuda_compat"] == "compat 580.1"
    assert header["machine"]["service"] == "sagemaker"
    assert header["versions"]["torch"]
    assert [step.step for step in read.steps] == list(range(1, 21))
    assert all(step.num_samples == 4 and step.num_tokens == 0 for step in read.steps)
    assert all(step.step_time_s > 0 and step.loss is not None for step in read.steps)
    assert read.blocks[0].last_step == 1, "the first step stands alone"
    assert read.blocks[-1].last_step == 20
    assert any(block.last_step == 10 for block in read.blocks), "a block ends with the warm-up"
    assert [phase.name for phase in read.phases] == ["build"] * 3
    assert read.end is not None
    assert (read.end.status, read.end.num_steps) == ("completed", 20)


def test_the_processes_that_load_data_are_counted_also_after_a_resume(tmp_path: Path) -> None:
    def train(output: Path, steps: int, *more: str) -> int:
        options = ("--data", "loader", "--steps", str(steps), "--checkpoint-every", "2", *more)
        code, told = run(arguments(output, *options, workload="vit-tiny"))
        assert code == 0, told
        attempt = 2 if "--resume" in more else 1
        return record(output, attempt=attempt).header["num_data_workers"]

    assert train(tmp_path / "two", 2, "--num-workers", "2") == 2
    assert train(tmp_path / "two", 4, "--num-workers", "1", "--resume") == 1
    assert train(tmp_path / "none", 2, "--num-workers", "0") == 0


def test_the_command_line_trains(tmp_path: Path) -> None:
    code, output = run_command(arguments(tmp_path))
    assert code == 0, output
    assert "step 20 of 20" in output
    end = record(tmp_path).end
    assert end is not None
    assert end.status == "completed"


def test_a_block_lasts_as_long_as_its_steps(tmp_path: Path) -> None:
    code, output = run(arguments(tmp_path, workload=f"{TINY}:slow"))
    assert code == 0, output
    read = record(tmp_path)
    for block in read.blocks:
        steps = read.steps[block.first_step - 1 : block.last_step]
        # The wall time is until the ranks have met; float sums differ in the last bits.
        assert sum(step.step_time_s for step in steps) <= block.wall_s + 1e-9
        assert block.wall_s >= 0.02 * len(steps)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    argv = arguments(tmp_path, "--steps", "100000", workload=f"{TINY}:slow")
    process = start(argv)
    wait_for_blocks(tmp_path, 2, process)
    process.send_signal(number)
    output = process.wait(timeout_s=30)
    assert process.returncode == 130, output
    end = record(tmp_path).end
    assert end is not None
    assert (end.status, end.message) == ("interrupted", f"stopped by {number.name}")
    assert end.num_steps == record(tmp_path).steps[-1].step


@pytest.mark.slow
def test_a_process_that_cannot_hear_is_ended_with_its_record(tmp_path: Path) -> None:
    process = start(arguments(tmp_path, workload=f"{TINY}:hanging"))
    wait_for_blocks(tmp_path, 1, process)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout_s=60)
    assert process.returncode == 130
    end = record(tmp_path).end
    assert end is not None
    assert end.status == "interrupted"
    assert "no step ended" in (end.message or "")


@pytest.mark.parametrize(
    ("function", "status", "code"), [("nan", "nan_loss", 33), ("out_of_memory", "out_of_memory", 12)]
)
def test_a_failure_has_its_own_status(tmp_path: Path, function: str, status: str, code: int) -> None:
    returned, output = run(arguments(tmp_path, workload=f"{TINY}:{function}"))
    assert returned == code, output
    end = record(tmp_path).end
    assert end is not None
    assert end.status == status
    assert end.message
    assert status in output


def test_a_nan_loss_is_recorded_as_none_at_its_step(tmp_path: Path) -> None:
    run(arguments(tmp_path, workload=f"{TINY}:nan"))
    losses = [step.loss for step in record(tmp_path).steps]
    assert losses[14] is None
    assert all(loss is not None for loss in losses[:14])


def test_sigkill_leaves_the_record_up_to_the_last_block(tmp_path: Path) -> None:
    argv = arguments(tmp_path, "--steps", "30", "--checkpoint-every", "5", workload=f"{TINY}:kill_itself")
    code, _ = run(argv, KILL_WHEN=str(tmp_path))
    assert code == -9
    read = record(tmp_path)
    assert read.end is None
    assert read.blocks[-1].last_step == read.steps[-1].step == 20


def test_resuming_gives_the_same_losses_as_not_stopping(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(arguments(whole, "--steps", "24"))[0] == 0
    first = arguments(parts, "--steps", "12", "--checkpoint-every", "6")
    assert run(first)[0] == 0
    code, output = run(arguments(parts, "--steps", "24", "--checkpoint-every", "6", "--resume"))
    assert code == 0, output
    resumed = record(parts, attempt=2)
    assert resumed.header["first_step"] == 13
    expected = [step.loss for step in record(whole).steps]
    assert [step.loss for step in record(parts).steps] == expected[:12]
    assert [step.loss for step in resumed.steps] == expected[12:]


def test_an_interrupted_run_saves_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    argv = arguments(tmp_path, "--steps", "100000", "--checkpoint-every", "100000", workload=f"{TINY}:slow")
    process = start(argv)
    wait_for_blocks(tmp_path, 2, process)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout_s=30)
    done = record(tmp_path).steps[-1].step
    assert (tmp_path / "checkpoints" / f"step-{done:08d}.pt").exists()


def test_a_checkpoint_alone_is_enough_to_go_on_from_on_another_machine(tmp_path: Path) -> None:
    whole, first, second = tmp_path / "whole", tmp_path / "first", tmp_path / "second"
    assert run(arguments(whole, "--steps", "14"))[0] == 0
    assert run(arguments(first, "--steps", "10", "--checkpoint-every", "5"))[0] == 0
    (second / "checkpoints").mkdir(parents=True)
    newest = first / "checkpoints" / "step-00000010.pt"
    newest.rename(second / "checkpoints" / newest.name)
    code, output = run(arguments(second, "--steps", "14", "--resume"), FASTLAUNCH_ATTEMPT="3")
    assert code == 0, output
    (path,) = second.glob("rank-*.jsonl")
    assert path.name == "rank-00000-attempt-3.jsonl"
    resumed = record(second, attempt=3)
    assert (resumed.header["attempt"], resumed.header["first_step"]) == (3, 11)
    assert [step.loss for step in resumed.steps] == [step.loss for step in record(whole).steps[10:]]


def test_an_attempt_never_takes_the_number_of_one_before(tmp_path: Path) -> None:
    assert run(arguments(tmp_path), FASTLAUNCH_ATTEMPT="2")[0] == 0
    assert run(arguments(tmp_path, "--resume"), FASTLAUNCH_ATTEMPT="2")[0] == 0
    names = sorted(path.name for path in tmp_path.glob("rank-*.jsonl"))
    assert names == ["rank-00000-attempt-2.jsonl", "rank-00000-attempt-3.jsonl"]


def test_an_attempt_with_a_number_needs_an_empty_folder_unless_it_resumes(tmp_path: Path) -> None:
    assert run(arguments(tmp_path), FASTLAUNCH_ATTEMPT="2")[0] == 0
    code, output = run(arguments(tmp_path), FASTLAUNCH_ATTEMPT="9")
    assert code == 2
    assert "already holds the record" in output


def test_a_signal_during_a_checkpoint_needs_no_second_one(tmp_path: Path) -> None:
    argv = arguments(
        tmp_path, "--steps", "100000", "--checkpoint-every", "10", workload=f"{TINY}:slow_checkpoint"
    )
    process = start(argv, CHECKPOINT_S="1.5", FASTLAUNCH_STOP_GRACE_S="0.5")
    wait_for_blocks(tmp_path, 2, process)
    # The second block ends with step 10, and with it begins the checkpoint.
    assert record(tmp_path).steps[-1].step == 10
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    output = process.wait(timeout_s=30)
    assert process.returncode == 130, output
    read = record(tmp_path)
    assert read.end is not None
    assert (read.end.status, read.end.num_steps) == ("interrupted", 10)
    (checkpoint,) = [phase for phase in read.phases if phase.name == "checkpoint"]
    assert checkpoint.seconds >= 1.5
    assert (tmp_path / "checkpoints" / "step-00000010.pt").exists()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_checkpoint_too_slow_for_spot_is_told(tmp_path: Path) -> None:
    argv = arguments(
        tmp_path, "--steps", "10", "--checkpoint-every", "10", workload=f"{TINY}:slow_checkpoint"
    )
    process = start(argv, CHECKPOINT_S="60.5")
    output = process.wait(timeout_s=120)
    assert "warning: the checkpoint took 6" in output and "spot" in output


def test_resume_without_a_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    code, output = run(arguments(tmp_path, "--resume"))
    assert code == 0, output
    assert record(tmp_path).steps[0].step == 1


def test_a_finished_run_that_is_resumed_stays_completed(tmp_path: Path) -> None:
    # As when a job is killed between its last checkpoint and its end line, and started again.
    argv = arguments(tmp_path, "--steps", "20", "--checkpoint-every", "10")
    assert run(argv)[0] == 0
    code, output = run([*argv, "--resume"])
    assert code == 0, output
    again = record(tmp_path, attempt=2)
    assert again.steps == ()
    assert again.end is not None
    assert (again.end.status, again.end.num_steps) == ("completed", 20)


def test_fewer_steps_than_the_checkpoint_has_are_refused(tmp_path: Path) -> None:
    assert run(arguments(tmp_path, "--steps", "10", "--checkpoint-every", "10"))[0] == 0
    code, output = run(arguments(tmp_path, "--steps", "5", "--checkpoint-every", "10", "--resume"))
    assert code == 2
    assert "give more --steps" in output


def test_resuming_another_job_is_refused(tmp_path: Path) -> None:
    assert run(arguments(tmp_path, "--steps", "10", "--checkpoint-every", "10"))[0] == 0
    code, output = run(arguments(tmp_path, "--checkpoint-every", "10", "--resume", "--seed", "5"))
    assert code == 2
    assert "another seed" in output
    assert "seed 0" in output


def test_a_used_output_folder_is_refused(tmp_path: Path) -> None:
    assert run(arguments(tmp_path, "--steps", "2"))[0] == 0
    before = (tmp_path / "rank-00000-attempt-1.jsonl").read_bytes()
    code, output = run(arguments(tmp_path, "--steps", "2"))
    assert code == 2
    assert "already holds" in output
    assert (tmp_path / "rank-00000-attempt-1.jsonl").read_bytes() == before


def test_another_runs_checkpoints_are_not_taken_for_this_ones(tmp_path: Path) -> None:
    assert run(arguments(tmp_path, "--steps", "10", "--checkpoint-every", "10"))[0] == 0
    (tmp_path / "rank-00000-attempt-1.jsonl").unlink()
    code, output = run(arguments(tmp_path, "--steps", "4", "--checkpoint-every", "2"))
    assert code == 2, output
    assert "already holds the checkpoints" in output


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (["--batch-size", "0"], "less than 1"),
        (["--steps", "-1"], "less than 1"),
        (["--steps", "ten"], "not a whole number"),
        (["--seed", str(2**63)], "more than"),
        (["--data", "disk"], "synthetic, loader, folder:PATH or file:PATH"),
        (["--set", "precison=fp16"], "precision"),
        (["--memory-budget", "much"], "2GiB"),
    ],
)
def test_a_bad_request_is_refused_before_anything_is_written(
    tmp_path: Path, more: list[str], word: str
) -> None:
    code, output = run(arguments(tmp_path / "out", *more))
    assert code == 2
    assert word in output
    assert "Traceback" not in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["FASTLAUNCH_ATTEMPT", "FASTLAUNCH_STOP_GRACE_S"])
def test_an_environment_that_means_nothing_is_refused(tmp_path: Path, name: str) -> None:
    code, output = run(arguments(tmp_path / "out"), **{name: "soon"})
    assert code == 2
    assert f"{name} is 'soon'" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("workload", "recipe", "word"),
    [
        ("vit-hug", "fp32", "vit-huge"),
        (f"{TINY}:build", "bf61", "bf16"),
        (f"{TINY}:absent", "fp32", "no function 'absent'"),
        ("./absent.py:build", "fp32", "no file"),
        (f"{TINY}:no_workload", "fp32", "returned str"),
    ],
)
def test_an_unknown_name_names_what_exists(tmp_path: Path, workload: str, recipe: str, word: str) -> None:
    code, output = run(arguments(tmp_path, workload=workload, recipe=recipe))
    assert code == 2
    assert word in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("function", "word"),
    [
        ("fractional_flops", "flops_per_sample is 1500000000.0"),
        ("ending_batches", "its batches have ended"),
        ("no_parameters", "nothing to train"),
        ("loss_of_each_sample", "its loss is a tensor of shape (4,)"),
    ],
)
def test_a_workload_that_cannot_be_trained_says_why_and_leaves_a_record(
    tmp_path: Path, function: str, word: str
) -> None:
    code, output = run(arguments(tmp_path, workload=f"{TINY}:{function}"))
    assert code == 2, output
    assert word in output
    assert "Traceback" not in output
    end = record(tmp_path).end
    assert end is not None
    assert end.status == "failed"
    assert word in (end.message or "")


def test_a_recipe_that_cannot_run_here_says_what_is_missing_and_what_runs(tmp_path: Path) -> None:
    code, output = run(arguments(tmp_path, "--batch-size", "8", recipe="te-fp8", workload="vit-tiny"))
    assert code == 2
    assert "GPU" in output
    assert "bf16" in output
    end = record(tmp_path).end
    assert end is not None
    assert end.status == "failed"


def test_a_failed_check_is_recorded_and_warned_of_and_ends_nothing(tmp_path: Path) -> None:
    code, output = run(arguments(tmp_path, workload=f"{TINY}:mixing"))
    assert code == 0, output
    read = record(tmp_path)
    passed = {check.name: check.passed for check in read.checks}
    assert passed == {
        "equivalence": True,
        "isolation": False,
        "permutation": True,
        "as-trained": True,
    }
    (warning,) = [text for text in read.header["warnings"] if "check" in text]
    assert "isolation" in warning and f"warning: {warning}" in output


def test_a_workload_is_asked_for_batches_in_what_the_recipe_computes_in(tmp_path: Path) -> None:
    argv = arguments(tmp_path, "--eval-every", "10", workload=f"{TINY}:in_bf16", recipe="bf16")
    code, output = run(argv)
    assert code == 0, output


@pytest.mark.parametrize(("batch_size", "parts", "probed"), [(2, 1, 4), (12, 2, 6), (64, 1, 16)])
def test_no_more_samples_are_probed_than_a_step_has(
    tmp_path: Path, batch_size: int, parts: int, probed: int
) -> None:
    argv = arguments(tmp_path / "out", "--batch-size", str(batch_size), workload=f"{TINY}:told_of_batches")
    asked_for = tmp_path / "asked-for"
    code, output = run([*argv, "--set", f"grad_accumulation={parts}"], ASKED_FOR=str(asked_for))
    assert code == 0, output
    assert asked_for.read_text().split() == [str(probed), str(batch_size)]
    assert len(record(tmp_path / "out").checks) == 4


def test_a_batch_that_does_not_divide_into_micro_batches_is_refused(tmp_path: Path) -> None:
    code, output = run(arguments(tmp_path, "--batch-size", "6", "--set", "grad_accumulation=4"))
    assert code == 2
    assert "give --batch-size 8" in output


def test_what_a_workload_does_not_take_is_refused(tmp_path: Path) -> None:
    code, output = run(arguments(tmp_path, "--sequence-length", "8"))
    assert code == 2
    assert "--sequence-length" in output


def test_an_unwritable_output_is_told_before_training(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    code, output = run(arguments(blocker / "out"))
    assert code == 28
    assert "file" in output
    assert "Traceback" not in output


def test_a_folder_that_takes_no_checkpoint_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    code, output = run(arguments(tmp_path, "--checkpoint-every", "10"))
    assert code == 2, output
    assert f"no checkpoint can be written to {tmp_path / 'checkpoints'}: File exists" in output
    assert "leave out --checkpoint-every" in output
    assert record(tmp_path).steps == ()


def test_the_batch_that_fits_trains_as_if_it_had_been_given(tmp_path: Path) -> None:
    found, given = tmp_path / "found", tmp_path / "given"
    code, output = run(arguments(found, "--batch-size", "auto", "--memory-budget", "60kB"))
    assert code == 0, output
    searched = record(found)
    batch_size = searched.header["batch_size_per_gpu"]
    assert batch_size % 8 == 0
    assert searched.phases[0].detail == f"the largest batch that fits is {batch_size}"
    assert f"the largest batch that fits is {batch_size}" in output
    assert run(arguments(given, "--batch-size", str(batch_size)))[0] == 0
    assert [step.loss for step in searched.steps] == [step.loss for step in record(given).steps]


def test_a_disk_that_fills_up_ends_the_run_and_leaves_whole_blocks(tmp_path: Path) -> None:
    code, output = run(arguments(tmp_path, "--steps", "5000"), FILE_SIZE_LIMIT="40000")
    assert code == 28, output
    assert "File too large" in output
    assert "Traceback" not in output
    read = record(tmp_path)
    assert not read.truncated
    assert read.blocks[-1].last_step == read.steps[-1].step


def test_a_run_whose_end_line_does_not_fit_does_not_pass_for_completed(tmp_path: Path) -> None:
    whole, cut = tmp_path / "1", tmp_path / "2"
    assert run(arguments(whole, "--steps", "1"))[0] == 0
    # Half of the end line fits: more than that the times of one step do not differ in digits.
    lines = (whole / "rank-00000-attempt-1.jsonl").read_bytes().splitlines(keepends=True)
    limit = sum(map(len, lines)) - len(lines[-1]) // 2
    code, output = run(arguments(cut, "--steps", "1"), FILE_SIZE_LIMIT=str(limit))
    assert code == 28, output
    assert "could not be finished" in output
    assert record(cut).end is None


def test_a_checkpoint_that_does_not_fit_ends_the_run_and_says_so_in_its_record(tmp_path: Path) -> None:
    argv = arguments(tmp_path, "--steps", "20", "--checkpoint-every", "10")
    code, output = run(argv, FILE_SIZE_LIMIT="8000")
    assert code == 28, output
    end = record(tmp_path).end
    assert end is not None
    assert (end.status, end.num_steps) == ("failed", 10)
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
    assert [s.loss for s in first.steps] != [s.loss for s in second.steps], "each rank has its own data"
    assert output.count("(the model)") == output.count("step 30 of 30") == 1, output


@pytest.mark.slow
def test_two_nodes_train_together(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [
        start_command(
            arguments(tmp_path),
            rendezvous=(
                "--nnodes=2",
                f"--node-rank={rank}",
                "--master-addr=127.0.0.1",
                f"--master-port={port}",
            ),
        )
        for rank in range(2)
    ]
    outputs = [node.communicate(timeout=100)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    headers = [record(tmp_path, rank=rank).header for rank in range(2)]
    assert [(header["world_size"], header["num_nodes"]) for header in headers] == [(2, 2), (2, 2)]


@pytest.mark.slow
def test_a_failing_rank_ends_the_run_with_records_that_say_so(tmp_path: Path) -> None:
    argv = arguments(tmp_path, "--steps", "100000", workload=f"{TINY}:failing_rank")
    code, output = run_command(argv, nproc=2)
    assert code != 0, output
    second = record(tmp_path, rank=1).end
    assert second is not None
    assert second.status == "failed"
    assert "rank 1 had enough" in (second.message or "")
    first = record(tmp_path, rank=0).end
    assert first is not None
    assert first.status in ("failed", "interrupted")


@pytest.mark.slow
def test_a_signal_to_torchrun_interrupts_every_rank_at_the_same_step(tmp_path: Path) -> None:
    argv = arguments(tmp_path, "--steps", "100000", "--checkpoint-every", "100000", workload=f"{TINY}:slow")
    process = start_command(argv, nproc=2)
    wait_for_blocks(tmp_path, 2, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=40)
    ends = [record(tmp_path, rank=rank).end for rank in range(2)]
    assert [end.status for end in ends if end] == ["interrupted", "interrupted"]
    assert len({end.num_steps for end in ends if end}) == 1
    assert len(list((tmp_path / "checkpoints").glob("step-*.pt"))) == 1
