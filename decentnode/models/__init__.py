"""Models, made by name and initialized as torch does with the seed that the caller sets."""

from __future__ import annotations

from decentnode.config.component import Table

MODELS = Table({
    "mlp": "decentnode.models.mlp:Mlp",
    "logistic": "decentnode.models.logistic:Logistic",
    "gn_lenet": "decentnode.models.gn_lenet:GnLenet",
    "cnn": "decentnode.models.cnn:Cnn",
    "lenet": "decentnode.models.lenet:Lenet",
    "resnet": "decentnode.models.resnet:Resnet",
    "wide_resnet": "decentnode.models.wide_resnet:WideResnet",
    "densenet": "decentnode.models.densenet:Densenet",
    "pyramidnet": "decentnode.models.pyramidnet:Pyramidnet",
    "vgg": "decentnode.models.vgg:Vgg",
    "femnist_cnn": "decentnode.models.femnist_cnn:FemnistCnn",
    "rnet": "decentnode.models.rnet:Rnet",
    "celeba_cnn": "decentnode.models.celeba_cnn:CelebaCnn",
    "gpt": "decentnode.models.gpt:Gpt",
    "transformer": "decentnode.models.transformer:Transformer",
    "lstm": "decentnode.models.lstm:Lstm",
    "shakespeare_lstm": "decentnode.models.shakespeare_lstm:ShakespeareLstm",
    "reddit_rnn": "decentnode.models.reddit_rnn:RedditRnn",
    "matrix_factorization": "decentnode.models.matrix_factorization:MatrixFactorization",
}, adapt="decentnode.models.own:adapted", libraries={
    "hf": "decentnode.models.hugging_face:HuggingFace",
    "timm": "decentnode.models.vision:Timm",
    "torchvision": "decentnode.models.vision:Torchvision",
})
