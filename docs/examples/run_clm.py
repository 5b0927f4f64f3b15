"""Transformers' run_clm.py in small: a causal language model from scratch, on a file of text.

    fastlaunch submit --local -L bf16=False,True --repeats 3 -- \\
      python run_clm.py --model_type gpt2 --tokenizer_name ./tokenizer --train_file corpus.txt \\
      --do_train --output_dir model --optim adafactor --learning_rate 1e-3 --bf16 {bf16}

It has the options and classes of that script. The line with `fl.` records its steps and its evaluations.
"""

import math
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import fastlaunch_train as fl


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "weights to start from"})
    model_type: str | None = field(default=None, metadata={"help": "a model from scratch, such as gpt2"})
    config_overrides: str | None = field(default=None, metadata={"help": "such as n_embd=10,n_layer=2"})
    tokenizer_name: str | None = None


@dataclass
class DataTrainingArguments:
    train_file: str
    validation_file: str | None = None
    validation_split_percentage: int = 5
    block_size: int | None = None


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or model_args.model_name_or_path)
    if model_args.model_name_or_path:
        config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    else:
        config = CONFIG_MAPPING[model_args.model_type](
            vocab_size=len(tokenizer),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    if model_args.config_overrides:
        config.update_from_string(model_args.config_overrides)
    if model_args.model_name_or_path:
        model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, config=config)
    else:
        model = AutoModelForCausalLM.from_config(config)

    block_size = data_args.block_size or min(tokenizer.model_max_length, 1024)

    def group_texts(path: str) -> list[dict[str, list[int]]]:
        """Tokenise the lines of a file, and cut what they make up into blocks; the rest is dropped."""
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
        tokens = list(chain(*tokenizer(lines)["input_ids"]))
        starts = range(0, len(tokens) - block_size + 1, block_size)
        blocks = [tokens[at : at + block_size] for at in starts]
        return [{"input_ids": block, "labels": block} for block in blocks]

    train = group_texts(data_args.train_file)
    if data_args.validation_file:
        validation = group_texts(data_args.validation_file)
    else:
        num_held_out = max(1, len(train) * data_args.validation_split_percentage // 100)
        train, validation = train[num_held_out:], train[:num_held_out]

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=[fl.transformers_callback()],
    )
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 700))
        trainer.log_metrics("eval", metrics)


if __name__ == "__main__":
    main()
