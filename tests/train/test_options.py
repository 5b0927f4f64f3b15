"""The entrypoint's command line, as a value."""

from pathlib import Path

import pytest

from fastlaunch_train.recipes.recipes import RECIPES
from fastlaunch_train.run.options import Options, parse_options

REQUIRED = ["--workload", "vit-tiny", "--recipe", "bf16", "--batch-size", "8", "--output", "o"]


def parse(text: str) -> Options:
    return parse_options([*REQUIRED, *text.split()])


def test_defaults() -> None:
    options = parse("--steps 5")
    assert vars(options) == {
        "workload": "vit-tiny",
        "recipe": RECIPES["bf16"],
        "batch_size": 8,
        "memory_budget": 2**30,
        "steps": 5,
        "epochs": None,
        "output": Path("o"),
        "seed": 0,
        "data": "synthetic",
        "num_workers": None,
        "checkpoint_every": 0,
        "resume": False,
        "eval_every": 0,
        "model": None,
        "tokenizer": None,
        "sequence_length": None,
    }


def test_every_option_has_its_field() -> None:
    options = parse(
        "--epochs 3 --eval-every 50 --model m --tokenizer t --sequence-length 64 --data file:a.txt --resume"
        " --batch-size auto --set optimizer_impl=fused --set precision=fp16"
    )
    assert (options.steps, options.epochs, options.eval_every) == (None, 3, 50)
    assert (options.model, options.tokenizer, options.sequence_length) == ("m", "t", 64)
    assert (options.data, options.resume, options.batch_size) == ("file:a.txt", True, None)
    assert options.recipe.label == "bf16 optimizer_impl=fused precision=fp16"


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
    assert parse_options([*REQUIRED, "--steps", "5", "--memory-budget", text]).memory_budget == expected


@pytest.mark.parametrize(
    "more",
    [
        *("", "--steps 5 --epochs 1"),
        *("--steps 0", "--steps 5 --batch-size -8", "--steps 5 --seed -1", "--steps 5 --num-workers x"),
        *("--steps 5 --checkpoint-every -2", "--steps 5 --data folder:", "--steps 5 --data disk"),
        *("--steps 5 --sequence-length 1", "--steps 5 --memory-budget 0", "--steps 5 --memory-budget -1GiB"),
        *(f"--steps 5 --seed {2**63}", "--steps 5 --nonsense 1"),
    ],
)
def test_a_bad_value_exits_2_with_one_line(more: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        parse(more)
    assert exited.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert "--help" in printed
