"""ORTModule where it works, under the oldest torch that the training package knows: its losses are eager's.

The environment takes what containers/ort-requirements.txt pins. Making it takes minutes, most of them a
download's and a compiler's; it stays in .build.
"""

import fcntl
import hashlib
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastlaunch.measure.record_files import RankRecord, read_record

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "train" / "fastlaunch_train"
REQUIREMENTS = ROOT / "containers" / "ort-requirements.txt"
TORCH = "2.3.1"


#: Models in the shape of the workloads' own, without dropout: ONNX Runtime draws other numbers for it.
MAKE_MODELS = """
import sys, torch, transformers as t
torch.manual_seed(0)
none = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
config = t.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=128, vocab_size=int(sys.argv[2]), **none)
t.GPT2LMHeadModel(config).save_pretrained(sys.argv[1] + "/gpt2-tiny")
none = dict(dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0)
sizes = dict(dim=64, n_layers=2, n_heads=4, hidden_dim=128, max_position_embeddings=128)
config = t.DistilBertConfig(vocab_size=int(sys.argv[2]), **sizes, **none)
t.DistilBertForSequenceClassification(config).save_pretrained(sys.argv[1] + "/distilbert-tiny")
"""


def run_quietly(argv: list[str], **env: str) -> None:
    done = subprocess.run(
        argv, capture_output=True, text=True, env={**os.environ, **env}, timeout=1000, check=False
    )
    assert done.returncode == 0, f"{argv}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.fixture(scope="module")
def ort_python() -> Path:
    """The interpreter of an environment with ORTModule, made if it is not there yet."""
    build = ROOT / ".build"
    build.mkdir(exist_ok=True)
    environment, stamp = build / "ort", build / "ort" / "made-of"
    made_of = TORCH + hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    with (build / "ort.lock").open("w") as lock:
        # Other workers may want it at the same time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != made_of:
            shutil.rmtree(environment, ignore_errors=True)
            make_environment(environment)
            stamp.write_text(made_of)
    return environment / "bin" / "python"


def make_environment(environment: Path) -> None:
    run_quietly([sys.executable, "-m", "venv", str(environment)])
    python = str(environment / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run_quietly([*pip, f"torch=={TORCH}", "-r", str(REQUIREMENTS), "onnxruntime-training-cpu==1.19.2"])
    run_quietly([*pip, "--no-deps", "torch-ort==1.19.2"])
    run_quietly([python, "-m", "torch_ort.configure"])


@pytest.fixture(scope="module")
def models(ort_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model for each of the small language workloads, without dropout."""
    from fastlaunch_train.data.tokens import ByteTokens

    folder = tmp_path_factory.mktemp("models")
    run_quietly([str(ort_python), "-c", MAKE_MODELS, str(folder), str(ByteTokens.vocabulary)])
    return folder


def train(python: Path, output: Path, workload: str, *more: str, steps: int = 12) -> RankRecord:
    """The record of a run of the entrypoint under `python`, with nothing of this environment in sight."""
    argv = [
        *(str(python), "-m", "fastlaunch_train", "--workload", workload, "--output", str(output)),
        *("--batch-size", "4", "--steps", str(steps), *more),
    ]
    run_quietly(argv, PYTHONPATH=str(ROOT / "train"), OMP_NUM_THREADS="1", TRANSFORMERS_OFFLINE="1")
    return read_record(output / "rank-00000-attempt-1.jsonl")


def losses(record: RankRecord) -> list[float]:
    assert record.end is not None and record.end.status == "completed"
    # Of the steps, and of the held-out data after step 6 and 12: the model trains on after an evaluation.
    found = [step.loss for step in record.steps] + [eval.loss for eval in record.evals]
    assert all(loss is not None and math.isfinite(loss) for loss in found)
    return [loss for loss in found if loss is not None]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_module_imports_under_the_oldest_torch(ort_python: Path) -> None:
    modules = [
        ".".join(path.relative_to(ROOT / "train").with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
        # The backward pass of attention is written in a newer Triton, and imported where that is there.
        if path.name not in ("__main__.py", "__init__.py", "attention_backward.py")
    ]
    assert "fastlaunch_train.run.session" in modules
    script = "import torch, importlib; assert torch.__version__.startswith('2.3.1')\n" + "\n".join(
        f"importlib.import_module({module!r})" for module in sorted(modules)
    )
    run_quietly([str(ort_python), "-c", script], PYTHONPATH=str(ROOT / "train"))


@pytest.fixture(scope="module", params=["gpt2-tiny", "distilbert-tiny"])
def pair(
    request: pytest.FixtureRequest, ort_python: Path, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RankRecord, RankRecord]]:
    """Records of a run by torch and of one by ORTModule, of the same model on the same data."""
    folder = tmp_path_factory.mktemp("runs")
    same = ("--model", str(models / request.param), "--eval-every", "6")
    by_torch = train(ort_python, folder / "torch", request.param, "--recipe", "fp32", *same)
    by_ort = train(
        ort_python, folder / "ort", request.param, "--recipe", "ort", "--set", "precision=fp32", *same
    )
    yield by_torch, by_ort


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_ort_trains_as_torch_does(pair: tuple[RankRecord, RankRecord]) -> None:
    by_torch, by_ort = pair
    assert by_ort.header["versions"]["torch"].startswith(TORCH)
    assert by_ort.header["recipe"]["engine"] == "ort"
    expected = losses(by_torch)
    assert len(expected) == 12 + len(by_torch.evals) > 12
    assert expected[11] != expected[0]
    # Sums in another order: 1e-7 in the first step, ten times that after a dozen of them.
    assert losses(by_ort) == pytest.approx(expected, rel=2e-6)
    # The export to ONNX is no step.
    assert "compile" in {phase.name for phase in by_ort.phases}
