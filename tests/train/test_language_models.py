"""Hugging Face's models: the published configurations, any model of a folder, and that they learn."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from data_requests import CPU, request
from entrypoint import arguments, ended, trained
from torch.utils._python_dispatch import TorchDispatchMode

from fastlaunch_train.data import corpus
from fastlaunch_train.data.hub import import_transformers
from fastlaunch_train.models.attention import attention_backend
from fastlaunch_train.models.precision import setup_precision
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.workloads.contract import ModelOptions, Workload, load_workload
from fastlaunch_train.workloads.language_models import transformer_blocks
from fastlaunch_train.workloads.registry import WORKLOADS, WorkloadError

# Importing transformers' models takes seconds.
pytestmark = pytest.mark.full

TEXT = "the cat sat on the mat and the dog sat on the log\n" * 40


@pytest.fixture(scope="module")
def transformers() -> Any:
    return import_transformers("a test")


@pytest.fixture(scope="module")
def tiny() -> Workload:
    return load_workload("gpt2-tiny")


@pytest.fixture(scope="module")
def distilbert() -> Workload:
    return load_workload("distilbert-tiny")


@pytest.fixture(scope="module")
def neo(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small GPT-Neo, its weights, and a tokenizer of whole words."""
    folder = tmp_path_factory.mktemp("neo")
    torch.manual_seed(5)
    config = transformers.GPTNeoConfig(**NEO)
    transformers.GPTNeoForCausalLM(config).half().save_pretrained(folder)
    save_tokenizer(transformers, folder, words_of(["?", *sorted(set(TEXT.split()))]))
    return folder


def words_of(vocabulary: list[str]) -> Any:
    """A tokenizer of these whole words, of which the first stands for all others."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, vocabulary[0]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return words


def save_tokenizer(transformers: Any, folder: Path, words: Any, **more: str) -> None:
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", **more).save_pretrained(
        folder
    )


NEO = {
    "hidden_size": 32,
    "num_layers": 4,
    "attention_types": [[["global", "local"], 2]],
    "num_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 48,
    "window_size": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def test_gpt2_xsmall_is_the_published_model() -> None:
    workload = load_workload("gpt2-xsmall")
    torch.manual_seed(0)
    model = workload.build_model()
    # Embeddings of 32,000 tokens and 1024 positions, six blocks of width 512 and 2304 within, one norm.
    block = 512 * 1536 + 1536 + 512 * 512 + 512 + 2 * 512 * 2304 + 2304 + 512 + 4 * 512
    num_parameters = sum(p.numel() for p in model.parameters())
    assert num_parameters == (32000 + 1024) * 512 + 6 * block + 1024
    assert num_parameters == WORKLOADS["gpt2-xsmall"].num_parameters
    assert workload.blocks is not None
    assert len(workload.blocks(model)) == 6
    assert (workload.optimizer, workload.learning_rate) == ("adafactor", 1e-3)
    assert WORKLOADS["gpt2-xsmall"].batch_size == 4
    assert workload.sequence_length == workload.tokens_per_sample == 1024
    # Six operations for each weight in a product and token, and attention's two products of T x T, times 3.
    weights = 6 * (512 * 1536 + 512 * 512 + 2 * 512 * 2304) + 32000 * 512
    assert workload.flops_per_sample == 6 * weights * 1024 + 12 * 6 * 512 * 1024**2
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    # An untrained model guesses evenly.
    short = load_workload("gpt2-xsmall", ModelOptions(sequence_length=16))
    with torch.no_grad():
        loss = short.loss(model.eval(), next(short.batches(request())))
    assert float(loss) == pytest.approx(math.log(32000), abs=0.5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", ["GPT2", "GPTNeo", "Llama", "Mistral"])
def test_models_are_run_as_transformers_runs_them(transformers: Any, kind: str, tmp_path: Path) -> None:
    """Loss of transformers' own model on labels; blocks found, compiled and checkpointed one by one."""
    small = {"hidden_size": 32, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    layers = {"num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 48}
    values = {
        "GPT2": {"n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 48, **small},
        "GPTNeo": NEO,
        "Llama": small | layers | {"max_position_embeddings": 48},
        # Its window is shorter than the sequences: a mask that is plainly causal would be wrong.
        "Mistral": small | layers | {"sliding_window": 4, "num_key_value_heads": 1},
    }
    config = getattr(transformers, f"{kind}Config")(**values[kind])
    torch.manual_seed(3)
    own = transformers.AutoModelForCausalLM.from_config(config).eval()
    own.save_pretrained(tmp_path)
    options = ModelOptions(model=str(tmp_path), sequence_length=32)
    workload = load_workload("hf-clm:whatever", options)
    model = workload.build_model().eval()
    batch = next(workload.batches(request()))
    loss = workload.loss(model, batch)
    theirs = own(input_ids=batch["tokens"], labels=batch["tokens"], use_cache=False).loss
    assert float(loss.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)
    assert workload.blocks is not None
    blocks = workload.blocks(model)
    assert blocks is transformer_blocks(model)
    assert len(blocks) == 4
    assert workload.flops_per_sample is not None
    loss.backward()
    gradient = next(model.parameters()).grad
    for index, block in enumerate(blocks):
        blocks[index] = _Checkpointed(block)
        block.compile(backend="eager")
    model.zero_grad()
    again = workload.loss(model, batch)
    again.backward()
    assert float(again.detach()) == pytest.approx(float(loss.detach()), rel=1e-5)
    torch.testing.assert_close(next(model.parameters()).grad, gradient)


class _Checkpointed(torch.nn.Module):
    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(self.block, *arguments, use_reentrant=False, **options)


def test_a_full_sequence_needs_no_mask(tiny: Workload) -> None:
    """Evaluated, as dropout keeps the CPU from its flash kernel: with a mask there would be none on a GPU."""
    model = tiny.build_model().eval()
    seen: list[Any] = []
    for block in transformer_blocks(model) or ():
        block.register_forward_pre_hook(
            lambda module, args, options: seen.extend([*args, *options.values()]), with_kwargs=True
        )
    precision = setup_precision(resolve_recipe("fp32"), CPU)
    assert attention_backend(model, next(tiny.batches(request())), precision, tiny.loss) == "flash_cpu"
    assert not [value for value in seen if isinstance(value, torch.Tensor) and value.dim() == 4]


def test_each_position_sees_what_is_before_it_alone(tiny: Workload) -> None:
    torch.manual_seed(0)
    model = tiny.build_model().eval()
    batch = next(tiny.batches(request()))
    changed = {"tokens": batch["tokens"].clone(), "labels": batch["labels"]}
    changed["tokens"][1, 40] += 1
    assert tiny.outputs is not None
    with torch.no_grad():
        before, after = tiny.outputs(model, batch), tiny.outputs(model, changed)
    assert before.shape[:2] == (4, 64)
    differs = (before != after).any(-1)
    assert not differs[[0, 2, 3]].any()
    assert not differs[1, :40].any()
    assert differs[1, 40:].all()


def test_scores_add_up_to_the_loss_whatever_the_batch(tiny: Workload) -> None:
    torch.manual_seed(0)
    model = tiny.build_model().eval()
    assert tiny.held_out is not None
    assert tiny.score is not None
    means = []
    for batch_size, world_size in ((64, 1), (10, 3)):
        with torch.no_grad():
            scores = [
                tiny.score(model, batch)
                for rank in range(world_size)
                for batch in tiny.held_out(
                    request(batch_size=batch_size, rank=rank, world_size=world_size), "validation"
                )
            ]
        weight = sum(float(score.weight) for score in scores)
        assert weight == corpus.NUM_HELD_OUT * 63
        assert sum(int(score.num_samples) for score in scores if score.num_samples is not None) == 64
        means.append(sum(float(score.loss_sum) for score in scores) / weight)
    assert means[0] == pytest.approx(means[1], rel=1e-5)


def test_a_models_own_tokenizer_reads_a_file(neo: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    workload = load_workload("gpt2-xsmall", ModelOptions(model=str(neo), sequence_length=13))
    batch = next(workload.batches(request(f"file:{path}")))
    # Thirteen words a line, a sequence each: all are the same.
    assert batch["tokens"].shape == (4, 13)
    assert len({tuple(text) for text in batch["tokens"].tolist()}) == 1
    assert workload.samples_per_epoch is not None
    assert workload.samples_per_epoch(f"file:{path}") == 38
    as_bytes = load_workload("gpt2-tiny", ModelOptions(sequence_length=13))
    found = next(as_bytes.batches(request(f"file:{path}")))["tokens"]
    assert all(bytes(text) in TEXT.encode() for text in found.tolist())
    given = load_workload("gpt2-tiny", ModelOptions(sequence_length=13, tokenizer=str(neo)))
    assert torch.equal(next(given.batches(request(f"file:{path}")))["tokens"], batch["tokens"])


def test_weights_are_random_unless_a_model_is_asked_for(transformers: Any, neo: Path) -> None:
    published = transformers.GPTNeoForCausalLM.from_pretrained(neo).state_dict()
    torch.manual_seed(7)
    random = load_workload(f"hf-clm:{neo}").build_model().state_dict()
    loaded = load_workload(f"hf-clm:{neo}", ModelOptions(model=str(neo))).build_model().state_dict()
    assert {name.removeprefix("model.") for name in loaded} == published.keys()
    for name, weight in loaded.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, published[name.removeprefix("model.")].float())
    name = "model.transformer.wte.weight"
    assert not torch.equal(random[name], loaded[name])


@pytest.mark.parametrize(
    ("workload", "kind", "word"),
    [
        ("hf-clm", "DistilBert", "distilbert"),
        ("hf-clm", "ViT", "vit"),
        ("distilbert-tiny", "GPT2", "padding"),
        ("distilbert-tiny", "T5", "padding"),
    ],
)
def test_a_model_of_another_kind_is_refused(
    transformers: Any, tmp_path: Path, workload: str, kind: str, word: str
) -> None:
    getattr(transformers, f"{kind}Config")().save_pretrained(tmp_path)
    options = ModelOptions() if workload == "hf-clm" else ModelOptions(model=str(tmp_path))
    with pytest.raises(WorkloadError, match=word) as caught:
        load_workload(f"hf-clm:{tmp_path}" if workload == "hf-clm" else workload, options)
    assert caught.value.hint


def test_a_model_whose_tokens_see_those_that_follow_is_refused(transformers: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    for is_decoder in (True, False):
        config = transformers.BertConfig(**sizes, vocab_size=64, is_decoder=is_decoder)
        transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
        workload = load_workload(f"hf-clm:{tmp_path}")
        if is_decoder:
            workload.build_model()
    for refused in (workload, load_workload("gpt2-tiny", ModelOptions(model=str(tmp_path)))):
        with pytest.raises(WorkloadError, match="bert model") as caught:
            refused.build_model()
        assert "is_decoder" in (caught.value.hint or "")


def test_weights_and_configurations_that_are_broken_are_named(transformers: Any, tmp_path: Path) -> None:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 300, "n_positions": 64}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    for name, content in (
        *((weights.name, whole[:cut]) for cut in (5, 100, len(whole) // 2)),
        ("pytorch_model.bin", b"no pickle"),
    ):
        weights.unlink()
        weights = tmp_path / name
        weights.write_bytes(content)
        with pytest.raises(WorkloadError, match="holds no model that can be loaded"):
            load_workload("gpt2-tiny", ModelOptions(model=str(tmp_path))).build_model()
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"n_head": 2', '"n_head": 3'))
    with pytest.raises(WorkloadError, match="divisible") as caught:
        load_workload(f"hf-clm:{tmp_path}")
    assert "config.json" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (ModelOptions(sequence_length=139), "128 positions"),
        (ModelOptions(model="."), "no model that can be loaded"),
        (ModelOptions(tokenizer="."), "no tokenizer"),
    ],
)
def test_options_that_cannot_be_met_are_refused_when_the_workload_is_built(
    options: ModelOptions, word: str
) -> None:
    with pytest.raises(WorkloadError, match=word):
        load_workload("distilbert-tiny", options)


def test_a_model_that_is_not_here_is_named_offline(tmp_path: Path) -> None:
    argv = arguments(tmp_path / "out", workload="hf-clm:EleutherAI/gpt-neo-2.7B")
    output = ended(2, argv, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert "model EleutherAI/gpt-neo-2.7B cannot be loaded" in output
    assert "Traceback" not in output


def test_gpt2_tiny_learns_the_language_as_far_as_it_goes(tmp_path: Path) -> None:
    found = trained(tmp_path, "--steps", "200", "--eval-every", "100", workload="gpt2-tiny")
    first, last = [each.loss for each in found.evals]
    floor = corpus.language(256).entropy(64)
    assert first is not None and last is not None
    assert floor < last < floor + 0.6
    assert last < first < 0.5 * math.log(256)


def test_a_published_model_is_known_by_what_it_is_and_not_by_its_name(
    transformers: Any, neo: Path, tmp_path: Path
) -> None:
    def identity(options: ModelOptions, name: str = "gpt2-tiny") -> Mapping[str, str | None]:
        workload = load_workload(name, options)
        assert workload.model_identity is not None
        return workload.model_identity()

    shutil.copytree(neo, tmp_path / "copy")
    known = identity(ModelOptions(model=str(neo)))
    assert all(known.values())
    assert identity(ModelOptions(model=str(tmp_path / "copy"))) == known
    assert identity(ModelOptions(), f"hf-clm:{neo}") == {"config": known["config"], "weights": None}
    weights = next((tmp_path / "copy").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    changed = identity(ModelOptions(model=str(tmp_path / "copy")))
    assert changed["config"] == known["config"]
    assert changed["weights"] != known["weights"]
    transformers.GPTNeoConfig(**NEO | {"window_size": 8}).save_pretrained(tmp_path / "copy")
    assert identity(ModelOptions(model=str(tmp_path / "copy")))["config"] != known["config"]
    # The others' names say what they are.
    assert load_workload("gpt2-tiny").model_identity is None


def test_the_tokenizer_of_a_text_is_known_by_what_it_makes_of_it(
    transformers: Any, neo: Path, tmp_path: Path
) -> None:
    from tokenizers import normalizers

    (tmp_path / "text.txt").write_text(TEXT)

    def identity(folder: Path) -> str | None:
        options = ModelOptions(tokenizer=str(folder), sequence_length=8)
        workload = load_workload(f"hf-clm:{neo}", options)
        assert workload.data_identity is not None
        assert workload.data_identity("synthetic") == corpus.SYNTHETIC
        return workload.data_identity(f"file:{tmp_path / 'text.txt'}").tokenizer

    known = identity(neo)
    assert known is not None and known.startswith("hub ")
    assert identity(Path(shutil.copytree(neo, tmp_path / "copy"))) == known
    vocabulary = ["?", *sorted(set(TEXT.split()))]
    lower = words_of(vocabulary)
    lower.normalizer = normalizers.Lowercase()
    save_tokenizer(transformers, tmp_path / "lower", lower, pad_token="?")
    save_tokenizer(transformers, tmp_path / "padded", words_of(vocabulary), pad_token="mat")
    assert known not in (identity(tmp_path / "lower"), identity(tmp_path / "padded"))


class _Operators(TorchDispatchMode):
    """Collects the names of the operators that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


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
    batch = next(workload.batches(request(batch_size=12)))
    with torch.no_grad():
        theirs = own(input_ids=batch["tokens"], attention_mask=batch["mask"], labels=batch["labels"]).loss
        loss = workload.loss(model, batch)
        assert float(loss) == pytest.approx(float(theirs), rel=1e-5)
        for block in transformer_blocks(model) or ():
            block.compile(backend="eager")
        assert float(workload.loss(model, batch)) == pytest.approx(float(theirs), rel=1e-5)


def test_padding_means_nothing(distilbert: Workload) -> None:
    torch.manual_seed(0)
    model = distilbert.build_model().eval()
    batch = next(distilbert.batches(request(batch_size=12)))
    changed = batch | {"tokens": torch.where(batch["mask"] == 1, batch["tokens"], 7)}
    assert not torch.equal(changed["tokens"], batch["tokens"])
    assert distilbert.outputs is not None
    assert distilbert.count is not None
    with torch.no_grad():
        torch.testing.assert_close(distilbert.outputs(model, changed), distilbert.outputs(model, batch))
    count = distilbert.count(batch)
    assert count.num_tokens == 12 * 64
    assert int(count.num_padding) == int((batch["mask"] == 0).sum())
    assert 0.2 < int(count.num_padding) / count.num_tokens < 0.8


@pytest.mark.parametrize("name", ["distilbert-tiny", "gpt2-tiny"])
def test_a_step_reads_no_value_that_the_device_computes(name: str) -> None:
    """On a GPU each such read would wait until all that is queued is done."""
    workload = load_workload(name)
    model = workload.build_model()
    batch = next(workload.batches(request(batch_size=12)))
    with _Operators() as operators:
        workload.loss(model, batch).backward()
        assert workload.count is None or workload.count(batch).num_tokens
    assert "_log_softmax_backward_data" in operators.names
    assert "_local_scalar_dense" not in operators.names


def test_reviews_of_a_file_are_split_and_scored(distilbert: Workload, csv_file: Path) -> None:
    source = f"file:{csv_file}"
    assert distilbert.samples_per_epoch is not None
    assert distilbert.held_out is not None
    assert distilbert.score is not None
    assert distilbert.samples_per_epoch(source) == 140
    model = distilbert.build_model().eval()
    for split, number in (("validation", 20), ("test", 40)):
        with torch.no_grad():
            scores = [
                distilbert.score(model, batch)
                for batch in distilbert.held_out(request(source, batch_size=12), split)
            ]
        assert sum(int(score.weight) for score in scores) == number
        assert len(scores) == -(-number // 12)
        assert all(
            0 <= int(score.metric_sum) <= int(score.weight)
            for score in scores
            if score.metric_sum is not None
        )
    batch = next(distilbert.batches(request(source, batch_size=12)))
    # A start, "film", its number, "was", the word, a comma, "very" and an end.
    assert set(batch["mask"].sum(1).tolist()) == {8}


def test_distilbert_tiny_tells_good_from_bad_far_above_chance(tmp_path: Path) -> None:
    more = ("--steps", "150", "--eval-every", "150", "--batch-size", "12")
    found = trained(tmp_path, *more, workload="distilbert-tiny")
    assert [(each.split, each.weights, each.num_samples) for each in found.evals] == [
        ("validation", "current", 1000),
        ("test", "current", 2000),
        ("test", "best", 2000),
    ]
    for each in found.evals:
        assert each.metric == "accuracy"
        # A standard error is 0.014 of 1000 reviews; a tenth of the labels is wrong.
        assert 0.68 < (each.metric_value or 0) < 0.9
        assert each.loss is not None and each.loss < 0.9 * math.log(2)
    padding = sum(step.num_padding for step in found.steps) / sum(step.num_tokens for step in found.steps)
    assert padding == pytest.approx(0.5, abs=0.06)
