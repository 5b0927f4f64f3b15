"""The patch embedding as one matrix product, which a convolution of patches that do not overlap is.

cuDNN's convolution of 16 x 16 patches and its weight gradient take longer.
"""

import torch
from torch import nn
from torch.nn import functional


class PatchProduct(nn.Conv2d):
    """A convolution whose stride is its kernel's size, by the same parameters."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return (samples, width, rows, columns) of images (samples, channels, height, width)."""
        samples, channels, height, width = images.shape
        down, across = self.kernel_size
        rows, columns = height // down, width // across
        images = images[:, :, : rows * down, : columns * across]
        patches = images.reshape(samples, channels, rows, down, columns, across).permute(0, 2, 4, 1, 3, 5)
        patches = patches.reshape(samples * rows * columns, channels * down * across)
        embedded = functional.linear(patches, self.weight.flatten(1), self.bias)
        return embedded.view(samples, rows, columns, -1).permute(0, 3, 1, 2)


def patches_by_product(model: nn.Module) -> None:
    """Turn the patch embedding of a timm ViT into a product, in place; one of another form stays."""
    conv = getattr(getattr(model, "patch_embed", None), "proj", None)
    if (
        type(conv) is nn.Conv2d
        and conv.stride == conv.kernel_size
        and conv.groups == 1
        and set(conv.padding) <= {0}
        and set(conv.dilation) == {1}
    ):
        conv.__class__ = PatchProduct
