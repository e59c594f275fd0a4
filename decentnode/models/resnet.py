"""Residual nets of basic and of bottleneck blocks: those of He et al. for CIFAR and ImageNet, and decentralizepy's."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from decentnode.config.component import ADDED, Config
from decentnode.models.base import Model, ModelConfig, image_shape, outputs_of
from decentnode.models.norms import Norm, he_normal, make_norm
from decentnode.samples import DataSpec

SHAPES: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
    8: ((128, 256, 512), (1, 1, 1)),
    18: ((64, 128, 256, 512), (2, 2, 2, 2)),
    34: ((64, 128, 256, 512), (3, 4, 6, 3)),
    50: ((64, 128, 256, 512), (3, 4, 6, 3)),
    101: ((64, 128, 256, 512), (3, 4, 23, 3)),
    152: ((64, 128, 256, 512), (3, 8, 36, 3)),
    **{6 * n + 2: ((16, 32, 64), (n, n, n)) for n in (3, 5, 7, 9, 18)},
}
"""By depth, the widths and the numbers of blocks of the stages; every stage but the first halves the image."""
BOTTLENECKS = (50, 101, 152)
"""The depths whose blocks are bottlenecks."""
EXPANSION = 4
"""A bottleneck's outputs have this many times its width as channels."""


class ResnetConfig(ModelConfig):
    name: str = "resnet"
    depth: Literal[8, 18, 20, 32, 34, 44, 50, 56, 101, 110, 152] = 20
    """20, 32, 44, 56, 110: three stages of 16, 32 and 64 channels, for CIFAR (He et al., section 4.2): 269,722
    parameters at 20, 853,018 at 56. 18, 34: four stages of 64 to 512, 11,173,962 at 18. 8: three stages of 128, 256 and
    512 with one block each, decentralizepy's ResNet8 without the layers that it does not use, 4,911,754 of its
    4,932,344. Counts are those of 3x32x32 and 10 classes. 50, 101, 152: four stages of bottlenecks with 256 to 2048
    channels, 25,557,032, 44,549,160 and 60,192,808 parameters for ImageNet's 1000 classes; a stage halves the image in
    its first 3x3 convolution, as torchvision's do, and not in the 1x1 one before it, as the paper's."""
    norm: Norm = "batch"
    """group has no running statistics and is not harmed if nodes hold few classes (Hsieh et al. 2020, arXiv
    1910.00189); both have the same number of parameters."""
    groups: int = Field(2, ge=1)
    """Groups of norm: group."""
    widths: tuple[PositiveInt, ...] | None = None
    """Channels of the stages, instead of the depth's; of bottlenecks those of their 3x3 convolutions, a fourth of
    their outputs."""
    stem: Literal["small", "large"] = "small"
    """small: one 3x3 convolution, for images up to 64x64. large: a 7x7 convolution and max pooling, which divide each
    side by four, for ImageNet; the default at depths 50, 101 and 152."""
    shortcut: Literal["auto", "pad", "projection"] = "auto"
    """Around a block that changes the shape. pad: every other pixel and zeros for the new channels (option A of He et
    al.). projection: a 1x1 convolution. auto: pad for the nets of 16, 32 and 64 channels, projection for others."""
    zero_init: Annotated[bool, ADDED] = False
    """Whether the last norm of every block starts with a scale of zero, so that the block starts as its shortcut alone
    (Goyal et al. 2017, arXiv 1706.02677, section 5.1)."""
    features: int | None = Field(None, ge=1)
    """Side of the grid to which the last images are averaged. Default: 2 at depth 8, as in decentralizepy; 1, the
    average of the whole image, at others."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _stem_of_the_depth(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("depth") in BOTTLENECKS and "stem" not in given:
            return {**given, "stem": "large"}
        return given

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> ResnetConfig:
        stages = len(SHAPES[self.depth][0])
        if self.widths is not None and len(self.widths) != stages:
            raise ValueError(f"must have {stages} widths at depth {self.depth}, got {len(self.widths)}")
        if self.zero_init and self.norm == "none":
            raise ValueError("must have a norm with zero_init, which sets the scale of a norm, got norm: none")
        return self


class Resnet(Model):
    """Images of any size from 4x4 on (He et al. 2016, arXiv 1512.03385)."""

    Config: ClassVar[type[Config]] = ResnetConfig

    def __init__(self, config: ResnetConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        channels, _, _ = image_shape(self.config.name, data, 4)
        return he_normal(ResnetModule(self.config, channels, outputs_of(self.config.name, data)))


class ResnetModule(nn.Sequential):
    """The stem, stages of blocks, average pooling, and one linear layer."""

    def __init__(self, config: ResnetConfig, channels: int, num_classes: int) -> None:
        widths, counts = SHAPES[config.depth]
        pads_with_zeros = config.shortcut == "pad" or (config.shortcut == "auto" and widths[0] == 16)
        widths = config.widths or widths
        bottlenecks = config.depth in BOTTLENECKS
        kernel, stride = (3, 1) if config.stem == "small" else (7, 2)
        layers: list[nn.Module] = [
            nn.Conv2d(channels, widths[0], kernel, stride, kernel // 2, bias=False),
            make_norm(config.norm, widths[0], config.groups), nn.ReLU(),
        ]
        if config.stem == "large":
            layers.append(nn.MaxPool2d(3, 2, 1))
        inputs = widths[0]
        for stage, (width, count) in enumerate(zip(widths, counts, strict=True)):
            for block in range(count):
                made = Bottleneck if bottlenecks else BasicBlock
                layers.append(made(inputs, width, 2 if stage and not block else 1, config, pads_with_zeros))
                inputs = EXPANSION * width if bottlenecks else width
        side = config.features or (2 if config.depth == 8 else 1)
        layers += [nn.AdaptiveAvgPool2d(side), nn.Flatten(), nn.Linear(inputs * side * side, num_classes)]
        super().__init__(*layers)


class BasicBlock(nn.Module):
    """x -> relu(shortcut(x) + two 3x3 convolutions of x)."""

    def __init__(self, inputs: int, outputs: int, stride: int, config: ResnetConfig, pads_with_zeros: bool) -> None:
        """pads_with_zeros: whether the shortcut pads with zeros instead of having parameters."""
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = make_norm(config.norm, outputs, config.groups)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = make_norm(config.norm, outputs, config.groups, zero=config.zero_init)
        self.shortcut = _shortcut(inputs, outputs, stride, config, pads_with_zeros)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """x -> relu(shortcut(x) + a 1x1, a 3x3 and a 1x1 convolution of x). The first convolution reduces the channels to
    `width`, the last expands them again to EXPANSION * width."""

    def __init__(self, inputs: int, width: int, stride: int, config: ResnetConfig, pads_with_zeros: bool) -> None:
        """pads_with_zeros: whether the shortcut pads with zeros instead of having parameters."""
        super().__init__()
        outputs = EXPANSION * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = make_norm(config.norm, width, config.groups)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = make_norm(config.norm, width, config.groups)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = make_norm(config.norm, outputs, config.groups, zero=config.zero_init)
        self.shortcut = _shortcut(inputs, outputs, stride, config, pads_with_zeros)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.conv1(x)))
        inner = functional.relu(self.norm2(self.conv2(inner)))
        return functional.relu(self.norm3(self.conv3(inner)) + self.shortcut(x))


def _shortcut(inputs: int, outputs: int, stride: int, config: ResnetConfig, pads_with_zeros: bool) -> nn.Module:
    """Returns the module whose output is added to a block's convolutions: the identity if they keep the shape."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    if pads_with_zeros:
        return PaddedShortcut(stride, outputs - inputs)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride, bias=False), make_norm(config.norm, outputs, config.groups)
    )


class PaddedShortcut(nn.Module):
    """Every stride-th pixel; the new channels are zeros, half of them before and half after the old ones."""

    def __init__(self, stride: int, more: int) -> None:
        super().__init__()
        self.stride, self.before, self.behind = stride, more // 2, more - more // 2

    def forward(self, x: Tensor) -> Tensor:
        return functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.behind))
