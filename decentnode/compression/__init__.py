"""Compression of tensors: codecs of values by name, the coding of indices, and the selection of entries to send."""

LOSSY: dict[str, str] = {
    "float16": "decentnode.compression.casts:Float16",
    "bfloat16": "decentnode.compression.casts:BFloat16",
    "truncate": "decentnode.compression.casts:Truncate",
    "int8": "decentnode.compression.blocks:Int8",
    "int4": "decentnode.compression.blocks:Int4",
    "qsgd": "decentnode.compression.blocks:QSGD",
    "sign": "decentnode.compression.blocks:Sign",
}
LOSSLESS: dict[str, str] = {
    "zlib": "decentnode.compression.lossless:Zlib",
    "zstd": "decentnode.compression.lossless:Zstd",
    "lz4": "decentnode.compression.lossless:Lz4",
}
CODECS: dict[str, str] = LOSSY | LOSSLESS
