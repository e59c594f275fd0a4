"""Writes tiny files in the formats of the datasets."""

from __future__ import annotations

import csv
import gzip
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np

from decentnode.config.component import load_class
from decentnode.data import DATASETS
from decentnode.data.base import Dataset

IDX_CODES = {"|u1": 0x08, "|i1": 0x09, "<i2": 0x0B, "<i4": 0x0C, "<f4": 0x0D, "<f8": 0x0E}


def open_dataset(section: dict[str, Any], base_dir: Path = Path()) -> Dataset:
    """Opens the dataset of a data section. base_dir: the folder to which its paths are relative."""
    chosen = load_class(section["name"], DATASETS, "data")
    found: Dataset = chosen(chosen.Config.model_validate(section), base_dir)
    return found


def write_cifar10_python(folder: Path, train: np.ndarray, test: np.ndarray, files: int = 2) -> None:
    """Writes these records as the Python version of CIFAR-10 stores them."""
    folder.mkdir(exist_ok=True)
    parts = zip([f"data_batch_{n}" for n in range(1, files + 1)], np.array_split(train, files), strict=True)
    for name, part in (*parts, ("test_batch", test)):
        content = {"batch_label": name, "labels": part[:, 0].tolist(), "data": part[:, 1:],
                   "filenames": [f"a_{n}.png" for n in range(len(part))]}  # fmt: skip
        (folder / name).write_bytes(python2_pickle(content))


def python2_pickle(content: dict[str, Any]) -> bytes:
    """Returns the pickle, as Python 2 writes it in protocol 2, of a dict of texts, numbers, lists and uint8 arrays."""
    memo = 0

    def memoize() -> bytes:
        nonlocal memo
        memo += 1
        return b"q" + bytes([memo - 1]) if memo <= 256 else b"r" + struct.pack("<I", memo - 1)

    def encode_text(value: bytes) -> bytes:
        length = b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<I", len(value))
        return length + value + memoize()

    def encode_number(value: int) -> bytes:
        return (b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value) if value < 65536
                else b"J" + struct.pack("<i", value))  # fmt: skip

    def encode_array(value: np.ndarray) -> bytes:
        made = b"cnumpy.core.multiarray\n_reconstruct\n" + memoize() + b"cnumpy\nndarray\n" + memoize()
        made += b"K\x00\x85U\x01b\x87R" + memoize()
        made += b"(K\x01" + b"".join(map(encode_number, value.shape)) + b"\x86"
        made += b"cnumpy\ndtype\n" + memoize() + b"U\x02u1K\x00K\x01\x87R" + memoize()
        made += b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        return made + b"\x89T" + struct.pack("<I", value.size) + value.tobytes() + b"tb"

    def encode(value: Any) -> bytes:
        if isinstance(value, np.ndarray):
            return encode_array(value)
        if isinstance(value, list):
            return b"]" + memoize() + b"(" + b"".join(map(encode, value)) + b"e"
        return encode_number(value) if isinstance(value, int) else encode_text(value.encode())

    items = b"".join(encode(key) + encode(value) for key, value in content.items())
    return b"\x80\x02}" + memoize() + b"(" + items + b"u."


def write_cifar100(folder: Path, python: bool = False, count: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """Returns the training records [N, 3074] (coarse label, fine label, pixels) and those of the test."""
    draw = np.random.default_rng(2)
    folder.mkdir(exist_ok=True)
    made = []
    for name in ("train", "test"):
        records = draw.integers(0, 256, (count, 3074), np.uint8)
        records[:, 1] %= 100
        records[:, 0] = records[:, 1] // 5
        content = {"filenames": ["x.png"] * count, "batch_label": f"{name} batch", "data": records[:, 2:],
                   "fine_labels": records[:, 1].tolist(), "coarse_labels": records[:, 0].tolist()}  # fmt: skip
        if python:
            (folder / name).write_bytes(python2_pickle(content))
        else:
            (folder / f"{name}.bin").write_bytes(records.tobytes())
        made.append(records)
    return made[0], made[1]


def write_cifar10(folder: Path, per_file: int = 7, files: int = 2, tests: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Returns all training records [N, 3073] and the test records."""
    draw = np.random.default_rng(0)

    def records(count: int) -> np.ndarray:
        made = draw.integers(0, 256, (count, 3073), np.uint8)
        made[:, 0] %= 10
        return made

    folder.mkdir(exist_ok=True)
    train = [records(per_file) for _ in range(files)]
    for number, part in enumerate(train, 1):
        (folder / f"data_batch_{number}.bin").write_bytes(part.tobytes())
    test = records(tests)
    (folder / "test_batch.bin").write_bytes(test.tobytes())
    return np.concatenate(train), test


def idx_bytes(array: np.ndarray) -> bytes:
    """Returns an array in the IDX format."""
    header = struct.pack(f">HBB{array.ndim}I", 0, IDX_CODES[array.dtype.str], array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_idx(folder: Path, images: np.ndarray, labels: np.ndarray, packed: bool = False) -> None:
    """Writes the samples both as training and as test set."""
    folder.mkdir(exist_ok=True)
    for kind in ("train", "t10k"):
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            content = idx_bytes(array)
            path = folder / f"{kind}-{name}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)


def make_samples(count: int = 11, shape: tuple[int, ...] = (5, 4)) -> tuple[np.ndarray, np.ndarray]:
    """Returns random uint8 inputs [count, *shape] and labels of three classes."""
    draw = np.random.default_rng(1)
    labels = np.arange(count, dtype=np.uint8) % 3
    return draw.integers(0, 256, (count, *shape), np.uint8), labels


def write_npz(path: Path, inputs: np.ndarray, targets: np.ndarray, packed: bool = False, **more: np.ndarray) -> None:
    save = np.savez_compressed if packed else np.savez
    arrays = {"train_inputs": inputs, "train_targets": targets, "test_inputs": inputs[:4], "test_targets": targets[:4]}
    save(path, **(arrays | more))  # type: ignore[arg-type]


def leaf_text(users: dict[str, tuple[list[Any], list[Any]]], indent: int | None = None) -> str:
    """Returns the text of a file of users as LEAF's scripts write it."""
    return json.dumps({
        "users": list(users), "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }, indent=indent)  # fmt: skip


def write_leaf(
    folder: Path, users: dict[str, tuple[list[Any], list[Any]]], test: dict[str, Any], files: int = 2
) -> None:
    """Writes LEAF's folders train and test. users, test: user -> (x, y)."""
    for split, found in (("train", users), ("test", test)):
        (folder / split).mkdir(parents=True, exist_ok=True)
        names = list(found)
        for number in range(min(files, len(names))):
            some = {user: found[user] for user in names[number::files]}
            (folder / split / f"all_data_{number}_keep_0_{split}_9.json").write_text(leaf_text(some))


def write_femnist(folder: Path, users: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pixels [N, 1, 28, 28] and labels of the training set in the order of the files."""
    draw = np.random.default_rng(3)
    made: dict[str, tuple[np.ndarray, list[int]]] = {}
    for user in range(users):
        count = 2 + user
        made[f"f{user:04}_0{user}"] = (draw.integers(0, 256, (count, 784)), draw.integers(0, 62, count).tolist())
    plain = {user: ((x / 255).tolist(), y) for user, (x, y) in made.items()}
    write_leaf(folder, plain, {user: (x[:1], y[:1]) for user, (x, y) in plain.items()})
    order = [*list(made)[::2], *list(made)[1::2]]
    pixels = np.concatenate([made[user][0] for user in order]).astype(np.uint8).reshape(-1, 1, 28, 28)
    return pixels, np.concatenate([made[user][1] for user in order])


def write_image(path: Path, pixels: np.ndarray) -> None:
    """Writes an image. pixels: [height, width, 3], or [height, width] for a gray one."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path, quality=95)


def write_celeba(folder: Path, images: Path) -> None:
    """Writes images of three celebrities; smiling faces are bright."""
    users: dict[str, tuple[list[Any], list[Any]]] = {}
    for user in range(3):
        names, labels = [], []
        for number in range(4):
            name, label = f"{user}{number:05}.jpg", (user + number) % 2
            write_image(images / name, np.full((218, 178, 3), 40 + 180 * label))
            names.append(name)
            labels.append(label)
        users[str(user)] = (names, labels)
    write_leaf(folder, users, {user: (x[:2], y[:2]) for user, (x, y) in users.items()})


def write_tiny_imagenet(folder: Path, classes: int = 3, per_class: int = 4) -> None:
    """Writes images; those of class n have the brightness 40 n, and the last one of a class is gray."""
    names = [f"n0{n:07}" for n in range(classes)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "wnids.txt").write_text("".join(f"{name}\n" for name in names))
    lines = []
    for label, name in enumerate(names):
        for number in range(per_class):
            shape = (64, 64) if number == per_class - 1 else (64, 64, 3)
            write_image(folder / "train" / name / "images" / f"{name}_{number}.JPEG", np.full(shape, 40 * label))
        write_image(folder / "val" / "images" / f"val_{label}.JPEG", np.full((64, 64, 3), 40 * label))
        lines.append(f"val_{label}.JPEG\t{name}\t0\t32\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))


def write_image_folder(folder: Path, classes: int = 3, per_class: int = 4, tests: int = 2, test: str = "val") -> None:
    """Writes JPEG and PNG images, wide and high. Class n has the brightness 60 n + 20, with noise; the last is gray."""
    draw = np.random.default_rng(4)
    for split, count in (("train", per_class), (test, tests)):
        for label in range(classes):
            for number in range(count):
                shape = (20 + 4 * (number % 3), 26 - 3 * number % 11, *([] if number == count - 1 else [3]))
                pixels = np.clip(draw.normal(60 * label + 20, 6, shape), 0, 255)
                name = f"{split}_{number}.{'png' if number % 2 else 'JPEG'}"
                write_image(folder / split / f"n0{label}" / name, pixels)


def write_shakespeare(folder: Path) -> None:
    """Writes the texts of three speakers, each of whom repeats one line."""
    users: dict[str, tuple[list[Any], list[Any]]] = {}
    for user, line in enumerate(("To be, or not to be: ", "Words, words, words. ", "O, that this too too solid\n")):
        text = line * 20
        users[f"PLAY_{user}"] = ([text[n : n + 80] for n in range(30)], [text[n + 80] for n in range(30)])
    write_leaf(folder, users, {user: (x[:7], y[:7]) for user, (x, y) in users.items()})


def write_movielens(folder: Path, users: int = 6, films: int = 12) -> None:
    """Writes ratings in which all users like the films with even numbers and dislike the others."""
    draw = np.random.default_rng(5)
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["userId,movieId,rating,timestamp"]
    for user in range(1, users + 1):
        for film in np.sort(draw.choice(films, films - 2, replace=False)):
            lines.append(f"{user},{10 * film + 3},{4.5 if film % 2 == 0 else 1.0},96498{user}")
    (folder / "ratings.csv").write_text("\n".join(lines) + "\n")


def write_pairs(
    folder: Path, source: list[str], target: list[str], tested: tuple[list[str], list[str]] | None = None
) -> None:
    """Writes train.de and train.en, and test.de.gz and test.en.gz with `tested`, or the first two lines of each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines, test in zip(("de", "en"), (source, target), tested or (source[:2], target[:2]), strict=True):
        (folder / f"train.{name}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        (folder / f"test.{name}.gz").write_bytes(gzip.compress("".join(f"{line}\n" for line in test).encode()))


LINES = ("the cat sat on the mat and slept", "a dog ran after the red ball", "we all like old ships")


def reddit_comments(line: str, repeats: int, length: int = 10) -> tuple[list[Any], list[Any]]:
    """Returns a comment in LEAF's format: padded sequences of words, and the same sequences one word later."""
    words = ["<BOS>", *(line.split() * repeats), "<EOS>"]

    def split_and_pad(some: list[str]) -> list[list[str]]:
        parts = [some[at : at + length] for at in range(0, len(some), length)]
        return [part + ["<PAD>"] * (length - len(part)) for part in parts]

    x, y = split_and_pad(words[:-1]), split_and_pad(words[1:])
    return [x], [{"target_tokens": y, "count_tokens": len(words)}]


def write_reddit(folder: Path, users: int = 4, vocabulary: bool = True) -> list[str]:
    """Writes comments; each user repeats one line. folder: LEAF's data/reddit, with data/train, data/test and vocab.
    Returns the words in the order of their numbers."""
    found: dict[str, tuple[list[Any], list[Any]]] = {}
    for user in range(users):
        line = LINES[user % len(LINES)]
        both = [reddit_comments(line, repeats) for repeats in (3 + user, 1)]
        found[f"user{user}"] = (both[0][0] + both[1][0], both[0][1] + both[1][1])
    write_leaf(folder / "data", found, {user: (x[:1], y[:1]) for user, (x, y) in found.items()})
    words = ["<PAD>", "<UNK>", *sorted({word for line in LINES for word in line.split()} | {"<BOS>", "<EOS>"})]
    if vocabulary:
        (folder / "vocab").mkdir()
        content = {"vocab": {word: number for number, word in enumerate(words)}, "size": 10_000, "unk_symbol": 1,
                   "pad_symbol": 0}  # fmt: skip
        (folder / "vocab" / "reddit_vocab.pck").write_bytes(pickle.dumps(content))
    return words


def write_reviews(folder: Path, users: int = 4, lines: bool = False) -> None:
    """Writes reviews with five stars for lovely things, one for awful ones, three for others: as a CSV file of each
    user in train and test, or all as JSON lines."""
    draw = np.random.default_rng(7)
    things = ["book", "lamp", "kettle", "chair", "clock", "coat"]
    moods = {5: "a lovely, lovely", 1: "what an awful", 3: "it is some"}
    found: dict[str, list[tuple[str, int]]] = {}
    for user in range(users):
        stars = draw.choice([1, 3, 5], 20)
        found[f"A{user}"] = [(f"{moods[each]} {draw.choice(things)}!" + " Really." * int(draw.integers(0, 3)), each)
                             for each in map(int, stars)]  # fmt: skip
    if lines:
        folder.mkdir(parents=True)
        rows = [json.dumps({"reviewerID": user, "overall": float(stars), "reviewText": text})
                for user, each in found.items() for text, stars in each]  # fmt: skip
        (folder / "reviews.jsonl").write_text("\n".join(rows) + "\n")
        return
    for split, part in (("train", slice(15)), ("test", slice(15, 20))):
        (folder / split).mkdir(parents=True)
        for user, each in found.items():
            with open(folder / split / f"{user}.csv", "w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["data_path", "label_name", "label_id"])
                writer.writerows((text, stars, stars - 1) for text, stars in each[part])
