"""Image classification: the vision transformers `vit-huge`, `vit-tiny` and `vit-wide`, and any timm model."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import nn

from fastlaunch_train.data.cpu_torchvision import prepare_torchvision
from fastlaunch_train.data.images import (
    ImageShape,
    held_out_images,
    image_batches,
    images_identity,
    images_per_epoch,
)
from fastlaunch_train.models.flops import build_on_meta, training_flops_per_sample
from fastlaunch_train.workloads.contract import Batch, Score, Workload
from fastlaunch_train.workloads.registry import WORKLOADS, WorkloadError, workload_info

#: Number of classes of a timm model that was published without a classifier.
IMAGENET_CLASSES = 1000

_HUGE = {"embed_dim": 1280, "depth": 32, "num_heads": 16}
_TINY = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4, "num_classes": 10}
_WIDE = {**_TINY, "patch_size": 8, "embed_dim": 256, "depth": 2}
_SMALL: Mapping[str, Mapping[str, int]] = {"vit-tiny": _TINY, "vit-wide": _WIDE}
_HUGE_SHAPE = ImageShape(size=224, num_classes=1000)
_SMALL_SHAPE = ImageShape(size=32, num_classes=10)


def build(name: str) -> Workload:
    """Build `vit-huge`, `vit-tiny`, `vit-wide` or `timm:MODEL`.

    Raises WorkloadError, naming the nearest, if timm has no such model.
    """
    if name == "vit-huge":
        flops = WORKLOADS[name].flops_per_sample
        return _workload(name, partial(_vision_transformer, **_HUGE), _HUGE_SHAPE, flops_per_sample=flops)
    if name in _SMALL:
        build_model = partial(_vision_transformer, **_SMALL[name])
        flops = _count(build_model, _SMALL_SHAPE)
        return _workload(name, build_model, _SMALL_SHAPE, flops_per_sample=flops)
    assert name.startswith("timm:")
    return _timm_workload(name)


def classification_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross entropy of images (batch, channels, height, width) and classes (batch,)."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def classification_score(model: nn.Module, batch: Batch) -> Score:
    """Return the sums of cross entropy and right answers over the images that have a label."""
    images, labels = batch
    return Score.of_classes(model(images).float(), labels)


def class_scores(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return logits (batch, classes) of the batch's images."""
    scores: torch.Tensor = model(batch[0])
    return scores


def _workload(
    name: str,
    build_model: Callable[[], nn.Module],
    shape: ImageShape,
    *,
    has_blocks: bool = True,
    flops_per_sample: int | None,
) -> Workload:
    return Workload(
        name=name,
        sample_unit="images",
        build_model=build_model,
        batches=partial(image_batches, shape),
        loss=classification_loss,
        outputs=class_scores,
        held_out=partial(held_out_images, shape),
        score=classification_score,
        metric="accuracy",
        samples_per_epoch=partial(images_per_epoch, shape),
        data_identity=partial(images_identity, shape),
        blocks=_blocks if has_blocks else None,
        flops_per_sample=flops_per_sample,
        optimizer=workload_info(name).optimizer,
        # vit-huge has the values of the FP8 experiment of November 2023.
        learning_rate=1e-3,
        momentum=0.9,
    )


def _timm_workload(name: str) -> Workload:
    prepare_torchvision()
    import timm

    model_name = name.removeprefix("timm:")
    known = timm.list_models()
    if not timm.is_model(model_name):
        near = get_close_matches(model_name.partition(".")[0], known, n=3, cutoff=0.5)
        raise WorkloadError(
            f"unknown workload {name!r}: timm {timm.__version__} has no model {model_name!r}",
            f"did you mean {' or '.join(f'timm:{model}' for model in near)}?"
            if near
            else f"timm has {len(known)} models: python -c 'import timm; print(timm.list_models())'",
        )
    try:
        published = timm.get_pretrained_cfg(model_name)
    except RuntimeError:
        tags = timm.list_pretrained(f"{model_name.partition('.')[0]}.*")
        raise WorkloadError(
            f"unknown workload {name!r}: the model has no such variant",
            f"known: {', '.join(f'timm:{tag}' for tag in tags)}",
        ) from None
    if published is None:
        raise WorkloadError(f"workload {name!r}: timm does not say which images the model takes", None)
    channels, height, width = published.input_size
    if channels != 3 or height != width:
        raise WorkloadError(
            f"workload {name!r} takes images of {channels} x {height} x {width}",
            "give a model for square images of three channels",
        )
    num_classes = published.num_classes or IMAGENET_CLASSES
    shape = ImageShape(
        size=height, num_classes=num_classes, mean=tuple(published.mean), std=tuple(published.std)
    )
    build_model = partial(timm.create_model, model_name, pretrained=False, num_classes=num_classes)
    return _workload(
        name,
        build_model,
        shape,
        has_blocks=_has_blocks(build_on_meta(build_model)),
        flops_per_sample=_count(build_model, shape),
    )


def _vision_transformer(**arguments: Any) -> nn.Module:
    prepare_torchvision()
    from timm.models.vision_transformer import VisionTransformer

    model: nn.Module = VisionTransformer(**arguments)
    return model


def _blocks(model: nn.Module) -> nn.ModuleList | nn.Sequential:
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList | nn.Sequential)
    return blocks


def _has_blocks(model: nn.Module) -> bool:
    blocks = getattr(model, "blocks", None)
    return isinstance(blocks, nn.ModuleList | nn.Sequential) and all(
        isinstance(getattr(block, "attn", None), nn.Module) for block in blocks
    )


def _count(build_model: Callable[[], nn.Module], shape: ImageShape) -> int | None:
    try:
        return training_flops_per_sample(build_model, (3, shape.size, shape.size))
    except (RuntimeError, NotImplementedError):
        # A few architectures cannot run without data; we do not guess their FLOPs.
        return None
