"""The entrypoint's command line, as a value."""

from pathlib import Path

import pytest

from fastlaunch_train.run.options import DEFAULT_MEMORY_BUDGET, parse_options

REQUIRED = [
    "--workload",
    "vit-tiny",
    "--recipe",
    "bf16",
    "--batch-size",
    "8",
    "--steps",
    "5",
    "--output",
    "o",
]


def test_defaults() -> None:
    options = parse_options(REQUIRED)
    assert options.batch_size == 8
    assert options.output == Path("o")
    assert (options.seed, options.data, options.num_workers) == (0, "synthetic", None)
    assert (options.checkpoint_every, options.resume) == (0, False)
    assert options.memory_budget == DEFAULT_MEMORY_BUDGET


def test_what_of_a_workload_can_be_asked_for() -> None:
    options = parse_options(
        [*REQUIRED, "--model", "m", "--tokenizer", "t", "--sequence-length", "64", "--data", "file:a b.txt"]
    )
    assert (options.model, options.tokenizer, options.sequence_length) == ("m", "t", 64)
    assert options.data == "file:a b.txt"
    assert (parse_options(REQUIRED).model, parse_options(REQUIRED).eval_every) == (None, 0)


def test_epochs_stand_for_steps() -> None:
    argv = [*REQUIRED[: REQUIRED.index("--steps")], *REQUIRED[REQUIRED.index("--output") :]]
    options = parse_options([*argv, "--epochs", "3", "--eval-every", "50"])
    assert (options.steps, options.epochs, options.eval_every) == (None, 3, 50)


@pytest.mark.parametrize("both", [True, False])
def test_either_steps_or_epochs_are_given(both: bool, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*REQUIRED, "--epochs", "1"] if both else [*REQUIRED[:6], "--output", "o"]
    with pytest.raises(SystemExit) as exited:
        parse_options(argv)
    assert exited.value.code == 2
    assert "--steps or --epochs" in capsys.readouterr().err


def test_overrides_resolve_the_recipe() -> None:
    options = parse_options([*REQUIRED, "--set", "optimizer_impl=fused", "--set", "precision=fp16"])
    assert options.recipe.label == "bf16 optimizer_impl=fused precision=fp16"


def test_an_automatic_batch_size() -> None:
    assert parse_options([*REQUIRED, "--batch-size", "auto"]).batch_size is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GiB", 2 * 2**30),
        ("1.5gb", 1_500_000_000),
        ("512MiB", 512 * 2**20),
        ("4096", 4096),
        ("10 KB", 10_000),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_options([*REQUIRED, "--memory-budget", text]).memory_budget == expected


@pytest.mark.parametrize(
    "more",
    [
        ["--steps", "0"],
        ["--batch-size", "-8"],
        ["--seed", "-1"],
        ["--num-workers", "x"],
        ["--checkpoint-every", "-2"],
        ["--data", "folder:"],
        ["--data", "file:"],
        ["--eval-every", "-1"],
        ["--sequence-length", "1"],
        ["--memory-budget", "0"],
        ["--memory-budget", "-1GiB"],
        ["--nonsense", "1"],
    ],
)
def test_a_bad_value_exits_2_with_one_line(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        parse_options([*REQUIRED, *more])
    assert exited.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert "--help" in told
