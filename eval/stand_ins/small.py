"""Stand-ins for the parts of wandb, tomli_w, tokenizers, loguru and tqdm that the scripts use."""

# ruff: noqa: ARG003  # signatures are those of what is stood in for

import json
import sys


def init(*_, **__):
    """wandb: records nothing."""


log = finish = init


def dump(data, file):
    """tomli_w: writes strings, numbers, lists and tables of them."""
    def lines(table, name):
        if name:
            yield f"[{name}]"
        yield from (f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict))
        for key, value in table.items():
            if isinstance(value, dict):
                yield from lines(value, f"{name}.{key}" if name else key)

    file.write("\n".join([*lines(data, ""), ""]).encode())


class Tokenizer:
    """tokenizers: four special tokens, and numbers."""

    SPECIAL = ("[PAD]", "[UNK]", "[SOS]", "[EOS]")

    @classmethod
    def from_file(cls, path):
        return cls()

    def token_to_id(self, token):
        return self.SPECIAL.index(token)

    def get_vocab_size(self):
        return 32


class _Logger:
    """loguru: prints everything to standard output."""

    def remove(self, *_, **__):
        pass

    add = disable = enable = remove

    def info(self, message, *_):
        print(message, file=sys.stdout, flush=True)

    debug = warning = error = success = info


logger = _Logger()


class tqdm:
    def __init__(self, iterable, **_):
        self._iterable = iterable

    def __iter__(self):
        return iter(self._iterable)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def set_postfix(self, *_, **__):
        pass
