"""Causal language models: the published configuration, any model of a folder, and that they learn."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from data_requests import CPU, request
from entrypoint import arguments, record, run

from fastlaunch_train.data import corpus
from fastlaunch_train.data.hub import import_transformers
from fastlaunch_train.models.attention import attention_backend
from fastlaunch_train.models.precision import setup_precision
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.workloads.contract import Batch, ModelOptions, Workload, load_workload
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
def neo(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small GPT-Neo, its weights, and a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("neo")
    torch.manual_seed(5)
    config = transformers.GPTNeoConfig(**NEO)
    transformers.GPTNeoForCausalLM(config).half().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["?", *set(TEXT.split())])}, "?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return folder


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
    precision = setup_precision(resolve_recipe("fp32"), CPU)
    model = tiny.build_model().eval()
    seen: list[Any] = []

    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return tiny.loss(model, batch)

    for block in transformer_blocks(model):
        block.register_forward_pre_hook(
            lambda module, args, options: seen.extend([*args, *options.values()]), with_kwargs=True
        )
    batch = next(tiny.batches(request()))
    assert attention_backend(model, batch, precision, loss) == "flash_cpu"
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


def test_a_model_of_another_kind_is_refused(transformers: Any, tmp_path: Path) -> None:
    for kind, message in (
        ("DistilBert", "distilbert"),
        ("ViT", "vit"),
    ):
        folder = tmp_path / kind
        getattr(transformers, f"{kind}Config")().save_pretrained(folder)
        with pytest.raises(WorkloadError, match=message) as caught:
            load_workload(f"hf-clm:{folder}")
        assert caught.value.hint


def test_a_model_whose_tokens_see_those_that_follow_is_refused(transformers: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    for is_decoder in (False, True):
        config = transformers.BertConfig(**sizes, vocab_size=64, is_decoder=is_decoder)
        transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
        for name, options in (
            (f"hf-clm:{tmp_path}", ModelOptions()),
            ("gpt2-tiny", ModelOptions(model=str(tmp_path))),
        ):
            workload = load_workload(name, options)
            if is_decoder:
                workload.build_model()
                continue
            with pytest.raises(WorkloadError, match="bert model") as caught:
                workload.build_model()
            assert "is_decoder" in (caught.value.hint or "")


def test_weights_and_configurations_that_are_broken_are_named(transformers: Any, tmp_path: Path) -> None:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 300, "n_positions": 64}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    for cut in (5, 100, len(whole) // 2):
        weights.write_bytes(whole[:cut])
        with pytest.raises(WorkloadError, match="holds no model that can be loaded"):
            load_workload("gpt2-tiny", ModelOptions(model=str(tmp_path))).build_model()
    weights.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(WorkloadError, match="holds no model that can be loaded"):
        load_workload("gpt2-tiny", ModelOptions(model=str(tmp_path))).build_model()
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"n_head": 2', '"n_head": 3'))
    with pytest.raises(WorkloadError, match=r"no gpt2 model can be built: .* divisible") as caught:
        load_workload(f"hf-clm:{tmp_path}")
    assert "config.json" in (caught.value.hint or "")


@pytest.mark.parametrize("workload", ["gpt2-tiny", "distilbert-tiny"])
def test_options_that_cannot_be_met_are_refused_when_the_workload_is_built(
    workload: str, tmp_path: Path
) -> None:
    for options, words in (
        (ModelOptions(sequence_length=139), "128 positions"),
        (ModelOptions(model=str(tmp_path)), "no model that can be loaded"),
        (ModelOptions(model=str(tmp_path / "no")), "no model folder"),
        (ModelOptions(tokenizer=str(tmp_path)), "no tokenizer"),
    ):
        with pytest.raises(WorkloadError, match=words):
            load_workload(workload, options)


def test_a_model_that_is_not_here_is_named_offline(tmp_path: Path) -> None:
    argv = arguments(tmp_path / "out", workload="hf-clm:EleutherAI/gpt-neo-2.7B")
    exit_code, output = run(argv, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert exit_code == 2
    assert "model EleutherAI/gpt-neo-2.7B cannot be loaded" in output
    assert "Traceback" not in output


def test_gpt2_tiny_learns_the_language_as_far_as_it_goes(tmp_path: Path) -> None:
    argv = arguments(tmp_path, "--steps", "200", "--eval-every", "100", workload="gpt2-tiny")
    exit_code, output = run(argv)
    assert exit_code == 0, output
    losses = [found.loss for found in record(tmp_path).evals]
    assert all(loss is not None for loss in losses)
    assert losses == sorted(losses, reverse=True)
    floor = corpus.language(256).entropy(64)
    assert floor < losses[-1] < floor + 0.6
    assert losses[0] < 0.5 * math.log(256)


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
    from tokenizers import Tokenizer, normalizers

    (tmp_path / "text.txt").write_text(TEXT)

    def identity(folder: Path | None) -> str | None:
        workload = load_workload(
            f"hf-clm:{neo}", ModelOptions(tokenizer=folder and str(folder), sequence_length=8)
        )
        assert workload.data_identity is not None
        assert workload.data_identity("synthetic") == corpus.SYNTHETIC
        return workload.data_identity(f"file:{tmp_path / 'text.txt'}").tokenizer

    shutil.copytree(neo, tmp_path / "copy")
    known = identity(neo)
    assert known is not None
    assert known.startswith("hub ")
    assert identity(tmp_path / "copy") == known
    words = Tokenizer.from_file(str(neo / "tokenizer.json"))
    words.normalizer = normalizers.Lowercase()
    for number, (tokenizer, padding) in enumerate(
        ((words, "?"), (Tokenizer.from_file(str(neo / "tokenizer.json")), "mat"))
    ):
        folder = tmp_path / str(number)
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="?", pad_token=padding
        ).save_pretrained(folder)
        assert identity(folder) != known
