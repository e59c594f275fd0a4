"""Datasets: readers of samples (`DATASETS`) and their partitions over the nodes (`PARTITIONS`)."""

from __future__ import annotations

from decentnode.config.component import Table
from decentnode.data.partition import PARTITIONS

__all__ = ["DATASETS", "PARTITIONS"]

DATASETS = Table({
    "digits": "decentnode.data.digits:Digits",
    "cifar10": "decentnode.data.cifar:Cifar10",
    "cifar100": "decentnode.data.cifar:Cifar100",
    "mnist": "decentnode.data.idx:Idx",
    "idx": "decentnode.data.idx:Idx",
    "femnist": "decentnode.data.leaf:Femnist",
    "celeba": "decentnode.data.leaf:Celeba",
    "shakespeare": "decentnode.data.leaf_text:Shakespeare",
    "reddit": "decentnode.data.reddit:Reddit",
    "movielens": "decentnode.data.movielens:Movielens",
    "amazon_reviews": "decentnode.data.amazon_reviews:AmazonReviews",
    "text": "decentnode.data.text:Text",
    "token_file": "decentnode.data.token_file:TokenFile",
    "parallel_text": "decentnode.data.parallel_text:ParallelText",
    "tiny_imagenet": "decentnode.data.tiny_imagenet:TinyImagenet",
    "image_folder": "decentnode.data.image_folder:ImageFolder",
    "npz": "decentnode.data.npz:Npz",
    "synthetic": "decentnode.data.synthetic:Synthetic",
}, adapt="decentnode.data.torch_data:adapted", libraries={"hf": "decentnode.data.hugging_face:HuggingFace"})
