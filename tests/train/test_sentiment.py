"""DistilBERT on reviews: the published configuration, its data, and that it learns."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import data_requests
import pytest
import torch
from entrypoint import arguments, record, run
from torch.utils._python_dispatch import TorchDispatchMode

from fastlaunch_train.data.hub import import_transformers
from fastlaunch_train.models.attention import attention_backend
from fastlaunch_train.models.precision import setup_precision
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.workloads.contract import ModelOptions, Workload, load_workload
from fastlaunch_train.workloads.language_models import transformer_blocks
from fastlaunch_train.workloads.registry import WORKLOADS, WorkloadError

# Importing transformers' models takes seconds.
pytestmark = pytest.mark.full

CPU = data_requests.CPU
#: Of batches of twelve, as in the experiment.
request = partial(data_requests.request, batch_size=12)


class _Operators(TorchDispatchMode):
    """Collects the names of the operators that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def transformers() -> Any:
    return import_transformers("a test")


@pytest.fixture(scope="module")
def tiny() -> Workload:
    return load_workload("distilbert-tiny")


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    path = tmp_path / "reviews.csv"
    rows = [
        f'"film {i} was {("bad", "good")[i % 2]}, very",{("negative", "positive")[i % 2]}' for i in range(200)
    ]
    path.write_text("\n".join(["review,sentiment", *rows]))
    return path


def test_distilbert_imdb_is_the_published_model(transformers: Any) -> None:
    workload = load_workload("distilbert-imdb")
    torch.manual_seed(0)
    model = workload.build_model()
    own = transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig())
    sizes = {name: weight.shape for name, weight in own.state_dict().items()}
    assert {name.removeprefix("model."): weight.shape for name, weight in model.state_dict().items()} == sizes
    num_parameters = sum(p.numel() for p in model.parameters())
    assert num_parameters == WORKLOADS["distilbert-imdb"].num_parameters
    assert workload.blocks is not None
    assert len(workload.blocks(model)) == 6
    assert (workload.optimizer, workload.learning_rate) == ("adamw", 5e-5)
    assert WORKLOADS["distilbert-imdb"].batch_size == 12
    assert workload.sequence_length == 512
    # Of the blocks for each token, of attention, and of the classifier's two layers for the first alone.
    weights = 6 * (4 * 768**2 + 2 * 768 * 3072)
    attention = 12 * 6 * 768 * 512**2
    assert workload.flops_per_sample == 6 * weights * 512 + attention + 6 * (768**2 + 2 * 768)


def test_the_model_is_run_as_transformers_runs_it(transformers: Any, tmp_path: Path) -> None:
    """Loss of transformers' own model on the same mask; blocks compiled one by one."""
    config = transformers.DistilBertConfig(
        dim=32, hidden_dim=64, n_layers=3, n_heads=2, vocab_size=512, max_position_embeddings=48
    )
    torch.manual_seed(3)
    own = transformers.DistilBertForSequenceClassification(config).eval()
    own.save_pretrained(tmp_path)
    workload = load_workload("distilbert-imdb", ModelOptions(model=str(tmp_path)))
    assert workload.sequence_length == 48
    model = workload.build_model().eval()
    batch = next(workload.batches(request()))
    with torch.no_grad():
        theirs = own(input_ids=batch["tokens"], attention_mask=batch["mask"], labels=batch["labels"]).loss
        loss = workload.loss(model, batch)
        assert float(loss) == pytest.approx(float(theirs), rel=1e-5)
        for block in transformer_blocks(model):
            block.compile(backend="eager")
        assert float(workload.loss(model, batch)) == pytest.approx(float(theirs), rel=1e-5)


def test_padding_means_nothing(tiny: Workload) -> None:
    torch.manual_seed(0)
    model = tiny.build_model().eval()
    batch = next(tiny.batches(request()))
    changed = batch | {"tokens": torch.where(batch["mask"] == 1, batch["tokens"], 7)}
    assert not torch.equal(changed["tokens"], batch["tokens"])
    assert tiny.outputs is not None
    assert tiny.count is not None
    with torch.no_grad():
        torch.testing.assert_close(tiny.outputs(model, changed), tiny.outputs(model, batch))
    count = tiny.count(batch)
    assert count.num_tokens == 12 * 64
    assert int(count.num_padding) == int((batch["mask"] == 0).sum())
    assert 0.2 < int(count.num_padding) / count.num_tokens < 0.8


@pytest.mark.parametrize("name", ["distilbert-tiny", "gpt2-tiny"])
def test_a_step_reads_no_value_that_the_device_computes(name: str) -> None:
    """On a GPU each such read would wait until all that is queued is done."""
    workload = load_workload(name)
    model = workload.build_model()
    batch = next(workload.batches(request()))
    with _Operators() as operators:
        workload.loss(model, batch).backward()
        assert workload.count is None or workload.count(batch).num_tokens
    assert "_log_softmax_backward_data" in operators.names
    assert "_local_scalar_dense" not in operators.names


def test_attention_is_torchs(tiny: Workload) -> None:
    precision = setup_precision(resolve_recipe("fp32"), CPU)
    batch = next(tiny.batches(request()))
    assert attention_backend(tiny.build_model().eval(), batch, precision, tiny.loss) == "flash_cpu"


def test_reviews_of_a_file_are_split_and_scored(tiny: Workload, csv_file: Path) -> None:
    source = f"file:{csv_file}"
    assert tiny.samples_per_epoch is not None
    assert tiny.held_out is not None
    assert tiny.score is not None
    assert tiny.samples_per_epoch(source) == 140
    model = tiny.build_model().eval()
    for split, number in (("validation", 20), ("test", 40)):
        with torch.no_grad():
            scores = [tiny.score(model, batch) for batch in tiny.held_out(request(source), split)]
        assert sum(int(score.weight) for score in scores) == number
        assert len(scores) == -(-number // 12)
        assert all(
            0 <= int(score.metric_sum) <= int(score.weight)
            for score in scores
            if score.metric_sum is not None
        )
    batch = next(tiny.batches(request(source)))
    # A start, "film", its number, "was", the word, a comma, "very" and an end.
    assert set(batch["mask"].sum(1).tolist()) == {8}


def test_a_tokenizer_is_taken_from_a_folder(transformers: Any, csv_file: Path, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "film", "was", "good", "bad", "very", ","])
    )
    folder = tmp_path / "tokenizer"
    transformers.DistilBertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(folder)
    workload = load_workload("distilbert-tiny", ModelOptions(tokenizer=str(folder), sequence_length=10))
    batch = next(workload.batches(request(f"file:{csv_file}")))
    for text, label in zip(batch["tokens"].tolist(), batch["labels"].tolist(), strict=True):
        assert text == [2, 5, 1, 6, (8, 7)[label], 10, 9, 3, 0, 0]


def test_reviews_of_which_a_tokenizer_makes_nothing_train_and_score(
    transformers: Any, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"?": 0, "good": 1, "bad": 2}, "?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    rows = ['"",positive', '" \t ",negative', "good,positive", "bad,negative"] * 10
    (tmp_path / "reviews.csv").write_text("\n".join(["review,sentiment", *rows]))
    workload = load_workload("distilbert-tiny", ModelOptions(tokenizer=str(tmp_path)))
    batch = next(workload.batches(request(f"file:{tmp_path / 'reviews.csv'}")))
    assert set(batch["mask"].sum(1).tolist()) == {1}
    model = workload.build_model()
    workload.loss(model, batch).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert workload.score is not None
    assert workload.held_out is not None
    with torch.no_grad():
        for held_out in workload.held_out(request(f"file:{tmp_path / 'reviews.csv'}"), "test"):
            assert workload.score(model.eval(), held_out).loss_sum.isfinite()


def test_a_model_that_cannot_tell_padding_is_refused(transformers: Any, tmp_path: Path) -> None:
    for kind in ("GPT2", "T5"):
        folder = tmp_path / kind
        getattr(transformers, f"{kind}Config")().save_pretrained(folder)
        with pytest.raises(WorkloadError, match="padding"):
            load_workload("distilbert-tiny", ModelOptions(model=str(folder)))


def test_distilbert_tiny_tells_good_from_bad_far_above_chance(tmp_path: Path) -> None:
    argv = arguments(tmp_path, "--steps", "150", "--eval-every", "150", workload="distilbert-tiny")
    exit_code, output = run([*argv, "--batch-size", "12"])
    assert exit_code == 0, output
    found = record(tmp_path)
    assert [(each.split, each.weights, each.num_samples) for each in found.evals] == [
        ("validation", "current", 1000),
        ("test", "current", 2000),
        ("test", "best", 2000),
    ]
    for each in found.evals:
        assert each.metric == "accuracy"
        assert each.metric_value is not None
        # A standard error is 0.014 of 1000 reviews; a tenth of the labels is wrong.
        assert 0.68 < each.metric_value < 0.9
        assert each.loss is not None
        assert each.loss < 0.9 * math.log(2)
    padding = sum(step.num_padding for step in found.steps) / sum(step.num_tokens for step in found.steps)
    assert padding == pytest.approx(0.5, abs=0.06)
