"""Stand-in for the parts of nvidia.dali that the scripts use: a pipeline of generated images, in the script's crop
size."""

# ruff: noqa: ARG002  # signatures are those of what is stood in for

import enum
import types as _types

import numpy as np
import torch

SAMPLES = 512
CLASSES = 10


class _Operation:
    def __init__(self, **options):
        self.options = options


class File(_Operation):
    pass


class Image(_Operation):
    pass


class RandomResizedCrop(_Operation):
    pass


class Resize(_Operation):
    pass


class CropMirrorNormalize(_Operation):
    pass


class CoinFlip(_Operation):
    pass


class DALIInterpType(enum.Enum):
    INTERP_CUBIC = INTERP_LINEAR = INTERP_TRIANGULAR = 0


class DALIImageType(enum.Enum):
    RGB = 0


class DALIDataType(enum.Enum):
    FLOAT = 0


class LastBatchPolicy(enum.Enum):
    DROP = 0
    PARTIAL = 1


class Pipeline:
    def __init__(self, batch_size, num_threads=1, device_id=0, **_):
        self.batch_size = batch_size

    def build(self):
        """Does nothing: there is no graph."""

    def epoch_size(self, reader):
        return SAMPLES


class DALIClassificationIterator:
    """Batches of this rank's share: the mean of an image's first channel reveals its class."""

    def __init__(self, pipe, reader_name, last_batch_policy):
        reader, size = pipe.input.options, pipe.cmnp.options["crop"]
        mine = range(reader["shard_id"], SAMPLES, reader["num_shards"])
        draw = np.random.default_rng(len(reader))
        labels = draw.integers(0, CLASSES, SAMPLES)
        noise = draw.standard_normal((SAMPLES, 3, *size), np.float32)
        noise[:, 0] += (labels - CLASSES / 2)[:, None, None] / 2
        self._images, self._labels = torch.from_numpy(noise)[mine], torch.from_numpy(labels)[mine].view(-1, 1)
        self._batch, self._drop = pipe.batch_size, last_batch_policy is LastBatchPolicy.DROP

    def __iter__(self):
        order = torch.randperm(len(self._images))
        for part in order.split(self._batch):
            if len(part) == self._batch or not self._drop:
                yield [{"data": self._images[part], "label": self._labels[part]}]

    def reset(self):
        """Does nothing: every pass starts from the beginning."""


types = _types.SimpleNamespace(DALIInterpType=DALIInterpType, DALIImageType=DALIImageType, DALIDataType=DALIDataType)
