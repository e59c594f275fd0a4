"""Stand-ins for the parts of torchvision that the scripts use: generated images with the shapes of datasets, transforms
of arrays, models."""

# ruff: noqa: ARG001, ARG002  # signatures are those of what is stood in for

import types

import numpy as np
import torch
from torch import nn

SAMPLES = {True: 2048, False: 512}
"""train -> number of images."""


class _Images(torch.utils.data.Dataset):
    SHAPE, CLASSES = (28, 28, 1), 10

    def __init__(self, root=".", train=True, transform=None, target_transform=None, download=False):
        patterns = np.random.default_rng(0).integers(0, 256, (self.CLASSES, *self.SHAPE))
        draw = np.random.default_rng(1 + train)
        self.targets = draw.integers(0, self.CLASSES, SAMPLES[train])
        noise = draw.integers(0, 256, (SAMPLES[train], *self.SHAPE))
        self.data = ((patterns[self.targets] + 3 * noise) // 4).astype(np.uint8)
        self.transform = transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, number):
        image = self.data[number]
        return self.transform(image) if self.transform else image, int(self.targets[number])


class MNIST(_Images):
    pass


class FashionMNIST(_Images):
    pass


class CIFAR10(_Images):
    SHAPE = (32, 32, 3)


class CIFAR100(CIFAR10):
    CLASSES = 100


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for each in self.transforms:
            image = each(image)
        return image


class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))).float() / 255


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = (torch.tensor(each).view(-1, 1, 1) for each in (mean, std))

    def __call__(self, image):
        return (image - self.mean) / self.std


class RandomHorizontalFlip:
    def __call__(self, image):
        return image[:, ::-1] if torch.rand(()) < 0.5 else image


class RandomCrop:
    def __init__(self, size, padding=0):
        self.size, self.padding = size, padding

    def __call__(self, image):
        pad = self.padding
        image = np.pad(image, ((pad, pad), (pad, pad), (0, 0)))
        top, left = (int(torch.randint(image.shape[axis] - self.size + 1, ())) for axis in (0, 1))
        return image[top : top + self.size, left : left + self.size]


class _Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.bn(self.conv(x)))


def _residual(width, blocks, num_classes):
    return nn.Sequential(nn.Conv2d(3, width, 3, 2, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                         *(_Block(width) for _ in range(blocks)), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(width, num_classes))  # fmt: skip


def resnet18(num_classes=1000, weights=None, pretrained=False):
    """A residual network of two blocks."""
    return _residual(16, 2, num_classes)


def resnet50(num_classes=1000, weights=None, pretrained=False):
    """A residual network of four blocks."""
    return _residual(24, 4, num_classes)


datasets = types.SimpleNamespace(MNIST=MNIST, FashionMNIST=FashionMNIST, CIFAR10=CIFAR10, CIFAR100=CIFAR100)
transforms = types.SimpleNamespace(Compose=Compose, ToTensor=ToTensor, Normalize=Normalize,
                                   RandomHorizontalFlip=RandomHorizontalFlip, RandomCrop=RandomCrop)  # fmt: skip
models = types.SimpleNamespace(resnet18=resnet18, resnet50=resnet50)
