"""A tiny Llama with a tokenizer for chats, as a model is published: a folder that Transformers reads."""

from pathlib import Path
from typing import Any

from fastlaunch_train.data.hub import import_peft, import_transformers

_TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<eos>"
#: Rows of each form that `--data` takes in JSON Lines.
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "two and two?"}, {"role": "assistant", "content": "four"}]},
    {"text": "a text of its own, without anybody who speaks"},
    {"prompt": "the capital of France? ", "completion": "Paris"},
]


def publish(folder: Path, *, seed: int = 0, dtype: Any = None) -> Path:
    """Write the model and its tokenizer, a token for each byte."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    transformers = import_transformers("hf-lora:MODEL")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", chat_template=_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **sizes)
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def loaded_adapters(base: Path, adapters: Path) -> dict[str, Any]:
    """The adapters' weights as PEFT loads them beside the model in `base`."""
    peft = import_peft("hf-lora:MODEL")
    model = import_transformers("hf-lora:MODEL").AutoModelForCausalLM.from_pretrained(base)
    tuned = peft.PeftModel.from_pretrained(model, str(adapters))
    return {name: value for name, value in tuned.named_parameters() if "lora_B" in name}
