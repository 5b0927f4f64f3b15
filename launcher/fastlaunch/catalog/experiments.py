"""The five published experiments, each as a list of runs that anyone can repeat: data, and nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass

#: Reviews of IMDB's training split in the published experiment, and samples of a step on one GPU.
_REVIEWS, _REVIEWS_PER_STEP = 35_000, 12


@dataclass(frozen=True, kw_only=True)
class ExperimentVariant:
    """One row of an experiment."""

    workload: str
    recipe: str
    overrides: tuple[str, ...] = ()
    # Per GPU, or `auto`; None for the workload's own.
    batch_size: int | str | None = None
    # Ranks; None for all GPUs of the machine.
    num_gpus: int | None = None
    # Steps between evaluations, 0 for none.
    eval_every: int = 0


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A published experiment."""

    name: str
    description: str
    # Who published it, and how it was done there.
    source: str
    variants: tuple[ExperimentVariant, ...]
    # The length of every run, in steps or epochs; the other is None. Epochs are of your own data: synthetic
    # data has no end, and a run on it is of the usual steps.
    steps: int | None = None
    epochs: int | None = None
    # The data source that its runs read, unless another is given.
    data: str = "synthetic"

    @property
    def length(self) -> str:
        """`200 steps`, or `3 epochs`, of each run."""
        return f"{self.epochs} epochs" if self.steps is None else f"{self.steps:,} steps"


def _vit(recipe: str, batch_size: int) -> ExperimentVariant:
    return ExperimentVariant(workload="vit-huge", recipe=recipe, batch_size=batch_size)


def _clm(recipe: str, *overrides: str) -> ExperimentVariant:
    return ExperimentVariant(
        workload="gpt2-xsmall", recipe=recipe, overrides=overrides, batch_size=4, num_gpus=1
    )


def _imdb(recipe: str, *overrides: str, num_gpus: int = 1) -> ExperimentVariant:
    """Return a variant evaluated after every epoch, to tell the best epoch from the last."""
    return ExperimentVariant(
        workload="distilbert-imdb",
        recipe=recipe,
        overrides=overrides,
        batch_size=_REVIEWS_PER_STEP,
        num_gpus=num_gpus,
        eval_every=-(-_REVIEWS // (_REVIEWS_PER_STEP * num_gpus)),
    )


def _gelu(recipe: str, *overrides: str) -> ExperimentVariant:
    return ExperimentVariant(workload="gelu", recipe=recipe, overrides=overrides, num_gpus=1)


def _ort(workload: str, *shared: str) -> tuple[ExperimentVariant, ...]:
    return tuple(
        ExperimentVariant(workload=workload, recipe=recipe, overrides=(*overrides, *shared))
        for recipe, overrides in (
            ("fp16", ()),
            ("ort", ()),
            ("zero1", ("precision=fp16",)),
            ("ort-zero1", ()),
        )
    )


_FP32 = "precision=fp32"
_FP16 = "precision=fp16"

EXPERIMENTS: Mapping[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            name="fp8",
            description="ViT-Huge in bf16, with Transformer Engine's blocks, and in FP8",
            source="article on FP8 for PyTorch training, November 2023: p4d.24xlarge against p5.48xlarge",
            variants=(
                _vit("bf16", 64),
                # As the article wrote them: not equivalent, which the runs themselves say.
                _vit("te-article", 64),
                _vit("te-article", 128),
                _vit("te-article-fp8", 128),
                _vit("te-bf16", 64),
                _vit("te-bf16", 128),
                _vit("te-fp8", 128),
            ),
            steps=200,
            data="loader",
        ),
        Experiment(
            name="compile-modes",
            description="a small GPT-2 fine-tuned, eager and with torch.compile's modes",
            source="comparison of torch.compile's modes: rinna/japanese-gpt2-xsmall by run_clm.py",
            variants=(
                _clm("fp32"),
                _clm("compile-model", _FP32),
                _clm("compile-reduce-overhead", _FP32),
                _clm("compile-max-autotune", _FP32),
                _clm("bf16"),
                # The published runs were the Transformers Trainer's.
                _clm("transformers", _FP32),
            ),
            epochs=5,
        ),
        Experiment(
            name="ort",
            description="fine-tuning by ONNX Runtime's ORTModule, alone and with DeepSpeed",
            source="figures for ORTModule (torch-ort): Hugging Face fine-tuning on Azure ND A100 v4",
            # Hugging Face's optimizer: DeepSpeed shards none that needs rows and columns, as adafactor does.
            variants=(
                *_ort("gpt2-xsmall", "optimizer=adamw", "learning_rate=5e-5"),
                *_ort("distilbert-imdb"),
            ),
            steps=200,
        ),
        Experiment(
            name="distilbert",
            description="DistilBERT on IMDB: plain, by Lightning, in fp16, compiled, and on four GPUs",
            source="post on training DistilBERT on IMDB faster: A100, 35,000 reviews, batch 12 per GPU",
            variants=(
                _imdb("fp32"),
                _imdb("lightning", _FP32),
                _imdb("lightning", _FP16),
                _imdb("lightning", _FP16, "compile_mode=default", "compile_scope=model"),
                _imdb("lightning", _FP16, num_gpus=4),
                _imdb("zero2", _FP16, num_gpus=4),
                _imdb("fsdp2", _FP16, num_gpus=4),
            ),
            epochs=3,
        ),
        Experiment(
            name="fusion",
            description="GELU written out, and its operations fused in three ways",
            source="figure for fusing pointwise operations: GELU written with erf, by torch.jit.script",
            variants=(
                _gelu("fp32"),
                *(_gelu(recipe, _FP32) for recipe in ("jit-script", "compile", "library")),
                *(_gelu(recipe) for recipe in ("bf16", "jit-script", "compile", "library")),
            ),
            steps=200,
        ),
    )
}
