"""LoRA and full fine-tuning: shapes, operations, packed documents, what is saved, and what is refused."""

import gzip
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from entrypoint import arguments, ended, losses, record, trained
from published_model import ROWS, publish
from tiny_hub import MODEL, TinyHub
from torch import nn

from fastlaunch.measure.summarize import summarize
from fastlaunch_train.data.documents import pack, read_documents
from fastlaunch_train.data.hub import import_peft, import_transformers, weight_downloads
from fastlaunch_train.data.tokens import ByteTokens, HubTokens
from fastlaunch_train.distributed.parallel import Process
from fastlaunch_train.loop.checkpoint import check_model_space
from fastlaunch_train.models.conversion import check_conversion, convert_model
from fastlaunch_train.models.flops import build_on_meta
from fastlaunch_train.models.frozen import frozen_linears
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.records.rows import RowError, is_rows_file, read_bytes, read_rows
from fastlaunch_train.workloads.contract import NO_LABEL, Batch, ModelOptions, Workload, load_workload
from fastlaunch_train.workloads.registry import WorkloadError, function_arguments

LORA, SFT = "hf-lora:llama-tiny", "hf-sft:llama-tiny"
#: torch's compiler adds nothing to what these recipes compute, and takes a minute of a CPU's time.
EAGER = ("--set", "compile_backend=eager")


def built(name: str = LORA, seed: int = 0, **given: Any) -> tuple[Workload, nn.Module]:
    workload = load_workload(name, ModelOptions(sequence_length=64), given)
    torch.manual_seed(seed)
    return workload, workload.build_model()


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        # The numbers of the models' cards and of safetensors' index on the hub.
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_shapes_have_the_parameters_that_are_published(shape: str, parameters: int) -> None:
    model = build_on_meta(load_workload(f"hf-sft:{shape}", ModelOptions(sequence_length=64)).build_model)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_frozen_weights_count_four_operations_a_token_and_trained_ones_six() -> None:
    length, layers, width = 64, 2, 128
    for name in (LORA, SFT):
        workload, model = built(name)
        frozen = sum(layer.weight.numel() for layer in frozen_linears(model, workload))
        adapters = [value for value in model.parameters() if value.requires_grad]
        head = 256 * width
        attention = 12 * layers * width * length
        if name == LORA:
            # The first block's layers pass no gradient on, as nothing below them is trained; with adapters
            # beside them, they do not need one.
            whole = 4 * (frozen + head) + 6 * sum(value.numel() for value in adapters) + attention
        else:
            products = sum(
                module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)
            )
            whole = 6 * products + attention
        counted = workload.flops_per_sample
        assert counted is not None
        assert abs(counted / length - whole) < 0.06 * whole


@pytest.mark.parametrize(
    ("kind", "layers", "num_counted"),
    [("hf-lora", 6, 5), ("hf-sft", 6, 5), ("hf-lora", 3, 3), ("hf-clm", 6, 5)],
)
def test_blocks_that_are_equal_are_counted_once(
    tmp_path: Path,
    kind: str,
    layers: int,
    num_counted: int,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    transformers = import_transformers(LORA)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 128}
    transformers.LlamaConfig(num_hidden_layers=layers, **sizes).save_pretrained(tmp_path)
    names: list[str] = []
    hook = nn.modules.module.register_module_forward_pre_hook(
        lambda module, inputs: names.append(type(module).__name__)
    )
    request.addfinalizer(hook.remove)

    def count() -> tuple[int | None, int]:
        names.clear()
        workload = load_workload(f"{kind}:{tmp_path}", ModelOptions(sequence_length=32))
        return workload.flops_per_sample, names.count("LlamaDecoderLayer")

    flops, num_blocks = count()
    assert num_blocks == num_counted
    monkeypatch.setattr("fastlaunch_train.models.flops._structure", id)
    assert count() == (flops, layers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf-lora:llama-2-7b", "hf-lora:qwen3-8b", "hf-sft:llama-3.2-3b"])
def test_large_models_count_as_if_each_block_were_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = load_workload(name).flops_per_sample
    monkeypatch.setattr("fastlaunch_train.models.flops._structure", id)
    assert load_workload(name).flops_per_sample == counted is not None


def test_only_adapters_are_trained_and_they_are_fp32() -> None:
    workload, model = built(rank=8, targets="q_proj,v_proj")
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert len(named) == 2 * 2 * 2
    assert all("lora_" in name and value.dtype == torch.float32 for name, value in named.items())
    assert {value.dtype for value in model.parameters() if not value.requires_grad} == {torch.bfloat16}
    assert all(8 in value.shape for value in named.values())
    convert_model(model, workload, resolve_recipe("fp32"))
    assert {value.dtype for value in model.parameters()} == {torch.float32}


def test_adapters_change_nothing_at_the_start() -> None:
    workload, model = built()
    torch.manual_seed(0)
    bare = load_workload(SFT, ModelOptions(sequence_length=64)).build_model()
    batch = {"tokens": torch.arange(64)[None], "labels": torch.arange(64)[None]}
    convert_model(model, workload, resolve_recipe("fp32"))
    layers = dict(bare.named_modules())
    for name, module in model.named_modules():
        if name.endswith("base_layer"):
            layers[name.removesuffix(".base_layer")].load_state_dict(module.state_dict())
    for name in ("model.model.embed_tokens", "model.lm_head"):
        layers[name].load_state_dict(dict(model.named_modules())[name].state_dict())
    torch.testing.assert_close(workload.loss(model, batch), workload.loss(bare, batch))


@pytest.mark.parametrize(
    ("workload", "recipe", "more"),
    [
        (LORA, "fp32", ()),
        (LORA, "bf16", ()),
        (LORA, "ao-fp8", EAGER),
        (LORA, "fp8-frozen", EAGER),
        (LORA, "nf4", EAGER),
        ("hf-lora:qwen3-tiny", "bf16", ()),
        (SFT, "bf16", ()),
        (SFT, "compile", (*EAGER, "--set", "parameter_dtype=bf16-master")),
    ],
)
def test_recipes_compute_what_fp32_does_and_learn(
    tmp_path: Path, workload: str, recipe: str, more: tuple[str, ...]
) -> None:
    run = trained(tmp_path, *more, "--eval-every", "30", "--steps", "30", workload=workload, recipe=recipe)
    assert {check.name for check in run.checks} >= {"equivalence", "gradients", "as-trained"}
    assert all(check.passed for check in run.checks), run.checks
    seen = [step.loss for step in run.steps if step.loss is not None]
    assert sum(seen[-5:]) < sum(seen[:5])
    assert run.evals[-1].num_samples == 64


def test_the_quantised_base_is_another_model_and_says_so() -> None:
    assert not resolve_recipe("nf4").is_equivalent
    assert resolve_recipe("fp8-frozen").is_equivalent
    workload, model = built()
    before = {name: layer.weight.float() for name, layer in model.named_modules() if _is_frozen(layer)}
    convert_model(model, workload, resolve_recipe("nf4"))
    rounded = dict(model.named_modules())
    errors = [
        float((rounded[name].weight.get_original_weight().float() - weight).norm() / weight.norm())
        for name, weight in before.items()
        if hasattr(rounded[name].weight, "get_original_weight")
    ]
    assert len(errors) == 2 * 5, "key and value are too small"
    assert all(0.05 < error < 0.15 for error in errors)


def _is_frozen(layer: nn.Module) -> bool:
    return (
        isinstance(layer, nn.Linear) and not layer.weight.requires_grad and layer.out_features != 256 * 1000
    )


def test_recipes_for_frozen_weights_refuse_a_model_without() -> None:
    workload, model = built(SFT)
    with pytest.raises(RecipeError, match="trains all its Linear layers"):
        check_conversion(model, workload, resolve_recipe("nf4"))
    with pytest.raises(RecipeError, match="replaces no function of workload"):
        tiny = load_workload("vit-tiny")
        check_conversion(tiny.build_model(), tiny, resolve_recipe("liger"))


def test_a_native_model_has_nothing_of_liger_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger replaces classes and functions of Transformers' modules, by which the reference computes, too."""
    workload, model = built()
    modeling_llama: Any = sys.modules[type(model.model).__module__]
    names = ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP")
    written = [getattr(modeling_llama, name) for name in names]

    def apply(*, model: nn.Module, **_: Any) -> None:
        for name in names:
            setattr(modeling_llama, name, type(name, (nn.Identity,), {}))

    liger = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": apply})
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", liger)
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    assert workload.use_kernels is not None
    for _ in range(2):
        workload.use_kernels(model, "liger")
        assert modeling_llama.LlamaMLP not in written
    built()
    assert [getattr(modeling_llama, name) for name in names] == written


def packed_batch(lengths: list[int], length: int) -> tuple[Batch, list[torch.Tensor]]:
    texts = [torch.randint(1, 256, (size,), dtype=torch.int32) for size in lengths]
    sequences = pack([(text, text) for text in texts], length, 0)
    assert sequences.labels is not None and sequences.positions is not None
    batch = {
        "tokens": sequences.tokens.long(),
        "labels": sequences.labels.long(),
        "positions": sequences.positions.long(),
    }
    return batch, texts


def token_losses(model: Any, batch: Batch) -> dict[tuple[int, ...], torch.Tensor]:
    """The logits' rows of each document, by its tokens."""
    with torch.no_grad():
        logits = model(batch["tokens"], None, batch.get("positions"))[0]
    rows: dict[tuple[int, ...], torch.Tensor] = {}
    for tokens, positions, row in zip(batch["tokens"], batch["positions"], logits, strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(tokens)]
        for start, end in pairwise(starts):
            rows[tuple(tokens[start:end].tolist())] = row[start:end]
    return rows


def test_packed_documents_do_not_see_each_other() -> None:
    torch.manual_seed(1)
    workload, model = built("hf-lora:llama-tiny")
    convert_model(model, workload, resolve_recipe("fp32"))
    batch, texts = packed_batch([30, 20, 14], 64)
    together = token_losses(model, batch)
    order = torch.cat([torch.arange(30, 50), torch.arange(50, 64), torch.arange(30)])
    moved = token_losses(model, {name: value[:, order] for name, value in batch.items()})
    assert together.keys() == moved.keys() == {tuple(text.tolist()) for text in texts}
    for text in texts:
        key = tuple(text.tolist())
        alone = {"tokens": text[None].long(), "positions": torch.arange(len(text))[None]}
        torch.testing.assert_close(together[key], token_losses(model, alone)[key], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(moved[key], together[key], atol=1e-5, rtol=1e-4)


def test_packing_holds_each_document_whole_and_predicts_none_across() -> None:
    batch, texts = packed_batch([40, 30, 30, 20, 64, 10], 64)
    rows = batch["tokens"].tolist()
    assert len(rows) == 4
    starts = batch["positions"] == 0
    assert (batch["labels"][starts] == NO_LABEL).all()
    counted = int((batch["labels"] != NO_LABEL).sum())
    assert counted == sum(len(text) - 1 for text in texts)
    # No two sequences could have been one: 40 + 20 and 30 + 30 and 64, and 10 beside one of them or alone.
    filled = [int((row != 0).sum()) for row in batch["tokens"]]
    assert sum(filled) == 194 and max(filled) == 64


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_completions_alone_are_predicted(tmp_path: Path) -> None:
    rows = [{"prompt": "two and two? ", "completion": "four"}] * 2
    text = read_documents(str(write_rows(tmp_path / "a.jsonl", rows)), ByteTokens(), 64)
    labels = text.splits["train"].labels
    assert labels is not None
    assert bytes(labels[0][labels[0] != NO_LABEL].tolist()) == b"four\0"
    whole = read_documents(str(write_rows(tmp_path / "b.jsonl", [{"text": "abc"}] * 2)), ByteTokens(), 64)
    assert whole.splits["train"].labels is not None
    assert whole.splits["train"].lengths is not None and whole.splits["train"].lengths.tolist() == [4]


def test_a_chat_is_written_by_the_tokenizers_template(tmp_path: Path) -> None:
    class Template:
        """What Transformers' tokenizers have, with a byte for a token."""

        pad_token_id, eos_token_id = 0, 1
        chat_template = "..."

        def __len__(self) -> int:
            return 256

        def get_vocab(self) -> dict[str, int]:
            return {chr(i): i for i in range(256)}

        def apply_chat_template(
            self,
            messages: list[dict[str, str]],
            *,
            tools: list[Any] | None,
            add_generation_prompt: bool,
            tokenize: bool,
        ) -> str:
            assert not tokenize
            if messages[0]["role"] == "tool":
                raise ValueError("no such role")
            turns = "".join(f"<{message['role']}>{message['content']}" for message in messages)
            return f"^{tools or ''}{turns}{'<assistant>' if add_generation_prompt else ''}"

        def __call__(self, text: Any, **_: Any) -> dict[str, Any]:
            if isinstance(text, str):
                return {"input_ids": list(text.encode())}
            return {"input_ids": [[2, *part.encode()] for part in text]}

    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    for row, written, predicted in (
        ({"messages": chat}, b"^<user>hi<assistant>ho", b"<user>hi<assistant>ho"),
        ({"messages": chat, "tools": [1]}, b"^[1]<user>hi<assistant>ho", b"[1]<user>hi<assistant>ho"),
        ({"prompt": chat[:1], "completion": chat[1:]}, b"^<user>hi<assistant>ho", b"ho"),
        # One start, though the tokenizer puts one before each text.
        ({"prompt": "hi ", "completion": "ho"}, b"\2hi ho\1", b"ho\1"),
        ({"text": "hi"}, b"\2hi\1", b"hi\1"),
    ):
        text = read_documents(
            str(write_rows(tmp_path / "a.jsonl", [row] * 2)), HubTokens(Template()), 64
        ).splits["train"]
        assert text.lengths is not None and text.labels is not None
        assert bytes(text.tokens[0][: int(text.lengths[0])].tolist()) == written
        assert bytes(text.labels[0][text.labels[0] != NO_LABEL].tolist()) == predicted
    with pytest.raises(WorkloadError, match="line 1: the chat template refuses it: no such role"):
        path = write_rows(tmp_path / "b.jsonl", [{"messages": [{"role": "tool", "content": "x"}]}])
        read_documents(str(path), HubTokens(Template()), 64)
    in_bytes = read_documents(str(write_rows(path, [{"messages": chat}] * 2)), ByteTokens(), 128)
    written = bytes(in_bytes.splits["train"].tokens[0].tolist()).rstrip(b"\0")
    assert written == b"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: it is not JSON"),
        ("[1]", "line 2: it is no JSON object"),
        ("{}", "line 2: it is empty"),
        ('{"body": "x"}', "line 2: it has none of these, but 'body'"),
        ('{"text": 3}', "line 2: its text is no string"),
        ('{"messages": [{"content": "x"}]}', "line 2: its messages are no list of messages"),
        ('{"messages": []}', "line 2: its messages are empty"),
        ('{"prompt": "x", "completion": [{"role": "user", "content": "x"}]}', "line 2: one of prompt and"),
        ('{"text": "\\ud83d"}', r'line 2: it has half a character, "\\ud83d"'),
    ],
)
def test_a_line_of_another_form_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "abc"}}\n{line}\n')
    with pytest.raises(WorkloadError, match=message):
        read_documents(str(path), ByteTokens(), 64)


def test_rows_are_known_by_what_a_file_holds(tmp_path: Path) -> None:
    rows = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()
    for name, data, is_rows in (
        ("a.txt", rows, True),
        ("a.jsonl.gz", gzip.compress(rows), True),
        ("a.bin", gzip.compress(rows), True),
        ("b.txt", b'{"text": not JSON, but code}\n', False),
        ("b.jsonl", b"", True),
    ):
        (tmp_path / name).write_bytes(data)
        assert is_rows_file(tmp_path / name) == is_rows
    packed = tmp_path / "a.jsonl.gz"
    assert len(list(read_rows(packed, read_bytes(packed)))) == len(ROWS)
    with pytest.raises(RowError, match="is a JSON array"):
        list(read_rows(Path("a.json"), json.dumps(ROWS).encode()))
    with pytest.raises(WorkloadError, match="has nothing to predict"):
        read_documents(str(write_rows(tmp_path / "c.jsonl", [{"text": ""}] * 3)), ByteTokens(), 64)
    long = write_rows(tmp_path / "d.jsonl", [{"prompt": "a" * 100, "completion": "b"}] * 3)
    with pytest.raises(WorkloadError, match="has nothing to predict") as refused:
        read_documents(str(long), ByteTokens(), 64)
    assert "give a longer --sequence-length" in refused.value.hint


def test_documents_train_and_padding_is_counted(tmp_path: Path) -> None:
    rows = [{"text": "abcdefgh " * size} for size in (3, 5, 8, 2, 9, 4)] * 6
    data = write_rows(tmp_path / "a.jsonl", rows)
    run = trained(
        tmp_path / "o", "--data", f"file:{data}", "--eval-every", "20", workload=LORA, recipe="bf16"
    )
    assert all(0 < step.num_padding < step.num_tokens for step in run.steps)
    assert run.evals[-1].loss is not None


def test_a_checkpoint_holds_the_adapters_alone_and_goes_on_the_same(tmp_path: Path) -> None:
    every = ("--checkpoint-every", "4", "--steps", "8")
    trained(tmp_path / "whole", *every, workload=LORA, recipe="bf16")
    saved = torch.load(tmp_path / "whole/checkpoints/step-00000008.pt", weights_only=True)
    assert saved["model"] and all("lora_" in name for name in saved["model"])
    trained(tmp_path / "parts", "--checkpoint-every", "4", "--steps", "4", workload=LORA, recipe="bf16")
    ended(0, arguments(tmp_path / "parts", *every, "--resume", workload=LORA, recipe="bf16"))
    assert losses(tmp_path / "parts", attempt=2) == losses(tmp_path / "whole")[4:]
    assert record(tmp_path / "parts", attempt=2).header["first_step"] == 5


# Transformers warns of a name that PEFT still uses.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_was_trained_is_loaded_by_its_library(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trained(tmp_path / "lora", workload=LORA, recipe="fp32")
    adapters = load_file(tmp_path / "lora/model/adapter_model.safetensors")
    _, tuned = built(SFT)
    inner: Any = tuned.model  # type: ignore[attr-defined]
    loaded: Any = import_peft(LORA).PeftModel.from_pretrained(inner, str(tmp_path / "lora/model"))
    state = dict(loaded.named_parameters())
    assert len(adapters) == 2 * 7 * 2
    for name, value in adapters.items():
        kind = name.replace(".weight", ".default.weight")
        torch.testing.assert_close(state[kind].float(), value)
    trained(tmp_path / "sft", "--checkpoint-every", "20", workload=SFT, recipe="fp32")
    again: Any = import_transformers(SFT).AutoModelForCausalLM.from_pretrained(
        tmp_path / "sft/model", dtype="auto"
    )
    weights = torch.load(tmp_path / "sft/checkpoints/step-00000020.pt", weights_only=True)["model"]
    assert again.dtype == torch.bfloat16
    for name, value in again.named_parameters():
        torch.testing.assert_close(value.detach(), weights[f"model.{name}"].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_all_weights_are_kept_as_they_were_published_if_data_are_given(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    from safetensors.torch import load_file

    base, data = publish(tmp_path / "base", dtype=dtype), write_rows(tmp_path / "a.jsonl", ROWS * 8)
    given = {"workload": f"hf-sft:{base}", "recipe": "fp32"}
    trained(tmp_path / "speed", **given)
    assert not (tmp_path / "speed/model").exists()
    trained(tmp_path / "o", "--data", f"file:{data}", **given)
    saved = load_file(tmp_path / "o/model/model.safetensors")
    assert {value.dtype for value in saved.values()} == {dtype}
    assert json.loads((tmp_path / "o/model/config.json").read_text())["dtype"] == str(dtype)[6:]
    # The folder alone is enough to write text.
    tokenizer: Any = import_transformers(SFT).AutoTokenizer.from_pretrained(tmp_path / "o/model")
    assert (tokenizer.eos_token, len(tokenizer)) == ("<eos>", 258) and tokenizer.chat_template


def test_a_model_that_the_disk_has_no_room_for_is_not_trained(tmp_path: Path) -> None:
    alone = Process(rank=0, local_rank=0, world_size=1, num_nodes=1, device=torch.device("cpu"))
    with torch.device("meta"):
        large = nn.Linear(2**25, 2**25)
    with pytest.raises(OSError, match=r"the model takes 4194304.12 GiB at the end"):
        check_model_space(alone, tmp_path, large)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[TinyHub]:
    hub = TinyHub(publish(tmp_path / "published"), token="hf_known")
    yield hub
    hub.close()


def test_weights_are_fetched_once_as_a_phase_by_whoever_has_the_token(tmp_path: Path, hub: TinyHub) -> None:
    data = write_rows(tmp_path / "train.jsonl", ROWS * 9)
    known = {"HF_ENDPOINT": hub.url, "FASTLAUNCH_HUB": str(tmp_path / "hub"), "HOME": str(tmp_path)}

    def argv(name: str, model: str = MODEL) -> list[str]:
        text = ("--data", f"file:{data}", "--sequence-length", "64")
        return arguments(tmp_path / name, *text, workload=f"hf-lora:{model}", recipe="bf16")

    assert "is gated, and no HF_TOKEN is given" in ended(2, argv("none"), **known)
    assert "the hub has no model org/none, or it is private" in ended(2, argv("gone", "org/none"), **known)
    for name in ("first", "second"):
        assert "HTTP Request" not in ended(0, argv(name), **known, HF_TOKEN="hf_known")
    phases = [phase for phase in record(tmp_path / "first").phases if phase.name == "fetch"]
    assert [phase.detail for phase in phases] == [f"{number} of 1 files, 0.0 of 0.0 GiB" for number in (0, 1)]
    assert summarize([record(tmp_path / "first")]).startup.fetch_s == sum(each.seconds for each in phases)
    assert phases[1].seconds > 0
    assert not [phase for phase in record(tmp_path / "second").phases if phase.name == "fetch"]
    assert hub.served.count("model.safetensors") == 1


def test_weights_that_the_disk_has_no_room_for_are_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    files = [SimpleNamespace(rfilename=name, size=2**60) for name in ("README.md", *shards)]
    info = SimpleNamespace(sha="c0" * 20, siblings=files)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: info)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(
        WorkloadError, match=r"the weights of org/large have 2147483648.0 GiB, and .* are free"
    ):
        list(weight_downloads("org/large", "hf-lora:org/large"))
    assert list(weight_downloads(str(tmp_path), "hf-lora:x")) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["rank=0"], "rank is 0"),
        (["alpha=-1"], "alpha is -1"),
        (["dropout=1"], "dropout is 1"),
        (["rank=abc"], "rank is 'abc'"),
        (["targets="], "targets is None"),
        (["targets=q_proj,nothing"], "no layer is called nothing, one of LoRA's targets"),
    ],
)
def test_arguments_that_lora_does_not_take_are_refused(given: list[str], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        built(**function_arguments(LORA, given))


@pytest.mark.parametrize(
    ("architecture", "model_type", "message"),
    [
        ("BertForMaskedLM", "bert", "those of a BertForMaskedLM, which does not write text"),
        ("LlamaForSequenceClassification", "llama", "those of a LlamaForSequenceClassification"),
        ("T5ForConditionalGeneration", "t5", "a t5 model is no causal language model$"),
    ],
)
def test_models_that_write_no_text_are_refused(
    tmp_path: Path, architecture: str, model_type: str, message: str
) -> None:
    config = {"architectures": [architecture], "model_type": model_type, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WorkloadError, match=message):
        built(f"hf-sft:{tmp_path}")


def test_experts_of_a_mixture_get_adapters(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    mixture = import_transformers(LORA).MixtralConfig(
        **sizes, num_key_value_heads=1, num_local_experts=2, vocab_size=256, max_position_embeddings=128
    )
    import_transformers(LORA).MixtralForCausalLM(mixture).save_pretrained(tmp_path / "base")
    trained(tmp_path / "o", workload=f"hf-lora:{tmp_path / 'base'}", recipe="fp32")
    assert any("experts" in name for name in load_file(tmp_path / "o/model/adapter_model.safetensors"))


def test_arguments_of_another_workload_are_refused() -> None:
    with pytest.raises(WorkloadError, match="takes no --set-workload depth"):
        function_arguments(LORA, ["depth=3"])
    with pytest.raises(WorkloadError, match="no layer is called foo"):
        function_arguments("hf-lora:llama-3.1-8b", ["targets=q_proj,foo"])
    with pytest.raises(WorkloadError, match="takes no --set-workload rank"):
        function_arguments(SFT, ["rank=3"])


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    with pytest.raises(WorkloadError, match="4096 positions"):
        load_workload("hf-lora:llama-2-7b", ModelOptions(sequence_length=8192))
