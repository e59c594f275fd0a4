"""The keys and names in decentralizepy's config files, and their equivalents here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KEYS: dict[str, tuple[str, ...]] = {
    "OPTIMIZER_PARAMS": ("optimizer_package", "optimizer_class"),
    "TRAIN_PARAMS": ("training_package", "training_class", "rounds", "full_epochs", "batch_size", "shuffle",
                     "loss_package", "loss_class", "loss"),
    "COMMUNICATION": ("comm_package", "comm_class", "addresses_filepath", "offset", "recv_timeout"),
    "NODE": ("graph_package", "graph_class", "graph_degree", "timeout"),
}  # fmt: skip
"""The keys of a section that do not depend on a class named in it."""

OF_EVERY_DATASET = ("dataset_package", "dataset_class", "model_class", "train_dir", "test_dir", "sizes", "random_seed",
                    "only_local", "test_batch_size")  # fmt: skip
VALIDATION = ("validation_source", "validation_size")


@dataclass(frozen=True)
class DatasetNames:
    """A dataset's name here, its models here by decentralizepy's names, and the keys that only this dataset has."""

    name: str
    models: dict[str, Any]
    keys: tuple[str, ...] = ()


DATASETS: dict[str, DatasetNames] = {
    "CIFAR10": DatasetNames("cifar10", {"LeNet": "gn_lenet", "CNN": "cnn", "ResNet8": {"name": "resnet", "depth": 8}},
                             ("partition_niid", "alpha", "shards", *VALIDATION)),
    "Femnist": DatasetNames("femnist", {"LogisticRegression": "logistic", "CNN": "femnist_cnn", "RNET": "rnet"},
                             VALIDATION),
    "Celeba": DatasetNames("celeba", {"CNN": "celeba_cnn"}, ("images_dir",)),
    "Shakespeare": DatasetNames("shakespeare", {"LSTM": "shakespeare_lstm"}),
    "Reddit": DatasetNames("reddit", {"RNN": "reddit_rnn"}),
    "AmazonReview": DatasetNames("amazon_reviews", {
        "BERT": {"name": "hf:bert-base-uncased", "pretrained": True},
        "MobileBERT": {"name": "hf:google/mobilebert-uncased", "pretrained": True},
    }, ("tokenizer",)),
    "MovieLens": DatasetNames("movielens", {"MatrixFactorization": "matrix_factorization"}),
}  # fmt: skip

OF_EVERY_SHARING = ("sharing_package", "sharing_class", "compress", "compression_package", "compression_class",
                    "float_precision")  # fmt: skip
TOP_K = ("alpha", "dict_ordered", "save_shared", "metadata_cap", "accumulation", "save_accumulated",
         "accumulate_averaging_changes")  # fmt: skip
IN_BASIS = (*TOP_K, "change_based_selection")
WAVELET = ("wavelet", "level")
SHARINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Sharing": ("full", ()),
    "PlainAverageSharing": ("full", ()),
    "PartialModel": ("topk", TOP_K),
    "SubSampling": ("subsample", ("alpha", "dict_ordered", "save_shared", "metadata_cap", "pickle", "layerwise")),
    "FFT": ("fft", IN_BASIS),
    "Wavelet": ("wavelet", (*IN_BASIS, *WAVELET)),
    "JWINS": ("jwins", (*IN_BASIS, *WAVELET, "alpha_list")),
    "Choco": ("choco", ("step_size", "alpha", "dict_ordered")),
}
CODECS: dict[str, tuple[Any, str]] = {
    "Elias": (None, "indices are always coded here"),
    "EliasFpzip": (None, "indices are always coded here; values go as they are, where fpzip saved a few percent"),
    "EliasFpzipLossy": ({"name": "truncate", "bits": 16}, "values in 16 bits, instead of fpzip's precision"),
    "Quantization": ("float16", "values in 16 bits, as in decentralizepy, but in IEEE half precision"),
    "EliasQuantization": ("float16", "values in 16 bits, as in decentralizepy, but in IEEE half precision"),
    "Lz4Wrapper": ("lz4", "needs the extra codecs"),
}
LOSSES = {"CrossEntropyLoss": "cross_entropy", "NLLLoss": "nll", "MSELoss": "mse", "L1Loss": "l1",
          "cross_entropy": "cross_entropy", "nll_loss": "nll", "mse_loss": "mse"}  # fmt: skip
TOKENIZERS = {"BERT": "bert-base-uncased", "MobileBERT": "google/mobilebert-uncased"}
USUAL_LOSS = {"movielens": "mse"}
"""Datasets whose task uses another loss than the cross entropy by default."""
