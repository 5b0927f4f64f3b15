"""The entrypoint's command line, as a value."""

from pathlib import Path

import pytest

from fastlaunch_train.recipes.recipes import RECIPES
from fastlaunch_train.run.options import Options, parse_options

REQUIRED = ["--workload", "vit-tiny", "--recipe", "bf16", "--batch-size", "8", "--output", "o"]


def parse(text: str) -> Options:
    return parse_options([*REQUIRED, *text.split()])


def test_every_option_has_its_field() -> None:
    options = parse("--steps 5")
    assert (options.recipe, options.output, options.batch_size) == (RECIPES["bf16"], Path("o"), 8)
    assert (options.seed, options.data, options.num_workers) == (0, "synthetic", None)
    assert (options.checkpoint_every, options.eval_every, options.resume) == (0, 0, False)
    assert options.fit == ()
    options = parse(
        "--epochs 3 --eval-every 50 --model m --tokenizer t --sequence-length 64 --data file:a.txt --resume"
        " --batch-size auto --set optimizer_impl=fused --set precision=fp16 --fit fp32"
    )
    assert options.fit == (RECIPES["fp32"],)
    (fused,) = parse_options([*REQUIRED, "--steps", "5", "--fit", "bf16 optimizer_impl=fused"]).fit
    assert fused.label == "bf16 optimizer_impl=fused"
    assert (options.steps, options.epochs, options.eval_every) == (None, 3, 50)
    assert (options.model, options.tokenizer, options.sequence_length) == ("m", "t", 64)
    assert (options.data, options.resume, options.batch_size) == ("file:a.txt", True, None)
    assert options.recipe.label == "bf16 optimizer_impl=fused precision=fp16"


@pytest.mark.parametrize(
    "more",
    [
        *("", "--steps 5 --epochs 1"),
        *("--steps 0", "--steps 5 --batch-size -8", "--steps 5 --seed -1", "--steps 5 --num-workers x"),
        *("--steps 5 --checkpoint-every -2", "--steps 5 --data folder:", "--steps 5 --data disk"),
        *("--steps 5 --sequence-length 1"),
        *(f"--steps 5 --seed {2**63}", "--steps 5 --nonsense 1"),
    ],
)
def test_a_bad_value_exits_2_with_one_line(more: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        parse(more)
    assert exited.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
