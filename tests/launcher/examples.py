"""The scripts of docs/examples, with data so small that each trains on a CPU in seconds."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from fastlaunch.ledger.ledger import Run
from fastlaunch.measure.outcome import read_records

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

#: Stands before torchvision on the path of a script: its wheel is for CUDA, and these tests' torch is not.
TORCHVISION = """
import os, sys
from fastlaunch_train.data.cpu_torchvision import prepare_torchvision

prepare_torchvision()
here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if path != here]
del sys.modules["torchvision"]
import torchvision
"""


@dataclass(frozen=True, kw_only=True)
class Example:
    """An example's command, and what its record has to say.

    samples: of each step of a rank. evals: the step before each. has_losses: whether its steps have them.
    leaves: a file in its output.
    """

    program: str
    arguments: str
    samples: tuple[int, ...]
    evals: tuple[int, ...]
    num_ranks: int = 1
    has_losses: bool = True
    leaves: str | None = None

    @property
    def command(self) -> tuple[str, ...]:
        """What `python` runs."""
        return (self.program, *self.arguments.split())


BY_NAME = {
    example.program.partition(".")[0]: example
    for example in (
        Example(
            program="nanogpt.py",
            arguments="--size tiny --sequence 16 --rows 64 --batch 2 --accumulate 2 --steps 31"
            " --eval-every 20 --amp bf16 --fused-adamw on --device cpu",
            samples=(4,) * 30,
            evals=(19, 30),
            num_ranks=2,
        ),
        # An epoch of 12 batches in steps of five.
        Example(
            program="timm_train.py",
            arguments="--data-dir images --model test_resnet --img-size 32 --num-classes 2 -b 2 -j 1"
            " --epochs 8 --grad-accum-steps 5 --opt adamw --lr 1e-3 --amp --amp-dtype bfloat16 --device cpu"
            " --output $FASTLAUNCH_OUTPUT",
            samples=(10, 10, 4) * 8,
            evals=tuple(range(3, 25, 3)),
            has_losses=False,
            leaves="timm_train/summary.csv",
        ),
        # As the first experiment: adafactor, 1e-3, five epochs of batches of 4.
        Example(
            program="run_clm.py",
            arguments="--model_type gpt2 --config_overrides n_embd=16,n_layer=2,n_head=2,n_positions=32"
            " --tokenizer_name tokenizer --train_file corpus.txt --validation_split_percentage 15"
            " --block_size 16 --do_train --do_eval --eval_strategy epoch --optim adafactor"
            " --learning_rate 1e-3 --num_train_epochs 5 --per_device_train_batch_size 4 "
            " --output_dir $FASTLAUNCH_OUTPUT/model --report_to none --use_cpu",
            samples=(4,) * 60,
            evals=(12, 24, 36, 48, 60, 60),
            has_losses=False,
            leaves="model/config.json",
        ),
        # An epoch of 10 batches in steps of three.
        Example(
            program="lightning_module.py",
            arguments="--accelerator cpu --devices 1 --batch-size 8 --width 8 --max-epochs 6"
            " --limit-train-batches 10 --accumulate-grad-batches 3",
            samples=(24, 24, 24, 8) * 6,
            evals=tuple(range(4, 25, 4)),
        ),
        # 28 batches a rank and epoch, in steps of five.
        Example(
            program="accelerate_loop.py",
            arguments="--cpu --gradient_accumulation_steps 5 --num_train_epochs 4",
            samples=(160, 160, 160, 160, 160, 96) * 4,
            evals=(6, 12, 18, 24),
            leaves="model.safetensors",
            num_ranks=2,
        ),
    )
}


def furnish(folder: Path, program: str) -> None:
    """Copy an example there, and make the data that it reads."""
    from PIL import Image
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(exist_ok=True)
    shutil.copy(EXAMPLES / program, folder)
    (folder / "torchvision.py").write_text(TORCHVISION)
    if program == "timm_train.py":
        for split, number in (("train", 12), ("validation", 4)):
            for at, color in enumerate(("red", "blue")):
                images = folder / "images" / split / color
                images.mkdir(parents=True)
                for image in range(number):
                    Image.new("RGB", (40, 40), color).rotate(at).save(images / f"{image}.png")
    if program == "run_clm.py":
        line = "the cat sat on the mat and the dog lay on the rug by the door"
        words = Tokenizer(
            models.WordLevel({word: at for at, word in enumerate(sorted(set(line.split())))}, "the")
        )
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        (folder / "tokenizer").mkdir()
        words.save(str(folder / "tokenizer" / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "the"}
        (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "corpus.txt").write_text(f"{line}\n" * 56)


def assert_measured(run: Run, example: Example) -> None:
    """Assert that the run's records say what the example does, and that they make a row."""
    assert run.summary is not None and run.directory is not None
    assert (run.workload, run.summary.problems) == (example.program, ())
    records, _ = read_records(run.directory.glob("rank-*.jsonl"))
    assert len(records) == run.summary.setup.num_gpus == example.num_ranks
    for record in records:
        assert tuple(step.num_samples for step in record.steps) == example.samples
        assert {step.loss is not None for step in record.steps} == {example.has_losses}
        assert tuple(line.step for line in record.evals) == example.evals
        assert all(line.loss is not None for line in record.evals)
    assert example.leaves is None or (run.directory / "output" / example.leaves).exists()
    timing = run.summary.timing
    assert timing.step_time_s is not None and timing.samples_per_step is not None
    assert timing.samples_per_step <= max(example.samples) * example.num_ranks


def without_fastlaunch(text: str) -> str:
    """A script without the lines that record it."""
    bare = text.replace("import fastlaunch_train as fl\n", "")
    bare = re.sub(r"fl\.steps\((\w+)(, [^()]*)?\)", r"\1", bare)
    bare = re.sub(r"^ *fl\.evaluate\(.*\)\n", "", bare, flags=re.MULTILINE)
    assert "fl." not in bare.partition('"""\n')[2]
    return bare
