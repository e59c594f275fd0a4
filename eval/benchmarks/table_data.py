"""Small generated files in the formats of LEAF's datasets and of MovieLens, with something to learn in them.

They replace the real files if these are not available: learning from them shows that reader, model and task work
together, not what the real data would give. `write(folder, scale)` creates folder/femnist, celeba, movielens and
reddit, and shakespeare from the text of real plays if that is given.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""LEAF's 62 classes of FEMNIST, in its order."""
Samples = tuple[list[object], list[object]]


Users = Iterator[tuple[str, Samples]]


def write_users(folder: Path, users: Iterable[tuple[str, Samples]]) -> None:
    """Writes folder/data.json in LEAF's format: the samples of each user."""
    found = dict(users)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.json").write_text(json.dumps({
        "users": list(found), "num_samples": [len(ys) for _, ys in found.values()],
        "user_data": {name: {"x": xs, "y": ys} for name, (xs, ys) in found.items()},
    }))  # fmt: skip


def divide(folder: Path, users: Users, test_every: int = 5) -> None:
    """Writes folder/train and folder/test: every fifth sample of each user is for testing."""
    found = list(users)
    for part, tested in (("train", False), ("test", True)):
        write_users(folder / part, ((name, tuple(  # type: ignore[misc]
            [value for n, value in enumerate(values) if (n % test_every == test_every - 1) == tested]
            for values in samples)) for name, samples in found))  # fmt: skip


def femnist(folder: Path, writers: int, copies: int) -> None:
    """Every writer draws every character `copies` times, with a font, slant, size and pressure of their own, and
    noise."""
    from matplotlib import get_data_path

    rng = np.random.default_rng(0)
    fonts = [Path(get_data_path()) / "fonts" / "ttf" / f"DejaVu{name}.ttf"
             for name in ("Sans", "Serif", "SansMono", "Sans-Bold", "Serif-Bold", "Sans-Oblique")]  # fmt: skip

    def users() -> Users:
        for writer in range(writers):
            font = ImageFont.truetype(str(fonts[writer % len(fonts)]), int(rng.integers(36, 48)))
            slant, pressure = rng.uniform(-0.35, 0.35), rng.uniform(0.6, 1.0)
            drawn: list[tuple[object, int]] = []
            for label, character in enumerate(CHARACTERS):
                sheet = Image.new("L", (84, 84), 0)
                ImageDraw.Draw(sheet).text((42, 42), character, 255, font, anchor="mm")
                for _ in range(copies):
                    turn, lean = math.radians(rng.normal(0, 6)), slant + rng.normal(0, 0.06)
                    dx, dy = rng.normal(0, 3, 2)
                    cos, sin = math.cos(turn), math.sin(turn)
                    moved = sheet.transform((84, 84), Image.Transform.AFFINE, (
                        cos, sin + lean, 42 - cos * (42 + dx) - (sin + lean) * (42 + dy),
                        -sin, cos, 42 + sin * (42 + dx) - cos * (42 + dy),
                    ), Image.Resampling.BILINEAR).resize((28, 28), Image.Resampling.BOX)  # fmt: skip
                    ink = np.asarray(moved, dtype=np.float64) / 255 * pressure + np.abs(rng.normal(0, 0.04, (28, 28)))
                    levels = np.round(255 * (1 - ink.clip(0, 1))) / 255  # LEAF's values are bytes over 255; white is 1
                    drawn.append((levels.ravel().tolist(), label))
            order = rng.permutation(len(drawn))
            yield f"f{writer:04}_00", ([drawn[n][0] for n in order], [drawn[n][1] for n in order])

    divide(folder, users())


def celeba(folder: Path, people: int, photos: int) -> None:
    """Drawn faces: skin and hair differ by person, background and position by photo; half of the faces smile."""
    rng = np.random.default_rng(1)
    images = folder / "img_align_celeba"
    images.mkdir(parents=True, exist_ok=True)

    def users() -> Users:
        for person in range(people):
            skin, hair = rng.integers(180, 240, 3), rng.integers(0, 120, 3)
            names, labels = [], []
            for photo in range(photos):
                smiles = bool(rng.integers(2))
                name = f"{person * photos + photo + 1:06}.jpg"
                _face(rng, tuple(map(int, skin)), tuple(map(int, hair)), smiles).save(images / name, quality=85)
                names.append(name)
                labels.append(int(smiles))
            yield str(person + 1), (list(names), list(labels))

    divide(folder, users())


def _face(rng: np.random.Generator, skin: tuple[int, ...], hair: tuple[int, ...], smiles: bool) -> Image.Image:
    image = Image.new("RGB", (178, 218), tuple(map(int, rng.integers(160, 256, 3))))
    draw = ImageDraw.Draw(image)
    x, y = 89 + int(rng.normal(0, 5)), 120 + int(rng.normal(0, 5))
    draw.ellipse((x - 56, y - 82, x + 56, y + 60), fill=hair)
    draw.ellipse((x - 46, y - 60, x + 46, y + 66), fill=skin)
    for side in (-18, 18):
        draw.ellipse((x + side - 6, y - 18, x + side + 6, y - 10), fill=(20, 20, 20))
    width, curve = int(rng.integers(22, 32)), int(rng.integers(14, 22))
    if smiles:
        draw.arc((x - width, y + 30 - curve, x + width, y + 30 + curve), 15, 165, fill=(150, 30, 40), width=9)
    else:
        draw.line((x - width, y + 34, x + width, y + 34 + int(rng.normal(0, 2))), fill=(150, 30, 40), width=9)
    noisy = np.asarray(image, dtype=np.float64) + rng.normal(0, 8, (218, 178, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def movielens(folder: Path, users: int, films: int) -> None:
    """Ratings with tastes in three dimensions, a mean per user and per film, in half stars from .5 to 5."""
    rng = np.random.default_rng(2)
    tastes, kinds = rng.normal(0, 0.6, (users, 3)), rng.normal(0, 0.6, (films, 3))
    kindness, quality = rng.normal(0, 0.4, users), rng.normal(0, 0.5, films)
    lines = ["userId,movieId,rating,timestamp"]
    for user in range(users):
        for film in np.sort(rng.choice(films, int(rng.integers(20, films // 2)), replace=False)):
            liked = 3.5 + kindness[user] + quality[film] + tastes[user] @ kinds[film] + rng.normal(0, 0.3)
            lines.append(f"{user + 1},{film + 1},{min(max(round(2 * liked) / 2, 0.5), 5)},{964982703 + int(film)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ratings.csv").write_text("\n".join(lines) + "\n")


def shakespeare(folder: Path, plays: Path, speakers: int, characters: int) -> None:
    """The speakers with the longest text, `characters` of each: a sample is 80 characters and the one that follows."""
    said: dict[str, list[str]] = {}
    for paragraph in plays.read_text().split("\n\n"):
        name, colon, text = paragraph.partition(":\n")
        if colon and "\n" not in name:
            said.setdefault(name, []).append(" ".join(text.split()))
    loudest = sorted(said, key=lambda name: -sum(map(len, said[name])))[:speakers]

    def part(first: float, last: float, step: int) -> Users:
        for name in loudest:
            text = " ".join(said[name])[:characters]
            # Test windows are later in the text than training windows, so that they do not overlap
            places = range(int(first * len(text)), int(last * len(text)) - 80, step)
            yield name, ([text[n : n + 80] for n in places], [text[n + 80] for n in places])

    write_users(folder / "train", part(0, 0.8, 2))
    write_users(folder / "test", part(0.8, 1, 1))


def reddit(folder: Path, users: int, comments: int, words: int = 200) -> None:
    """Comments in LEAF's sequences of ten words: each word has three frequent successors, and users have topics."""
    rng = np.random.default_rng(3)
    names = [f"{first}{last}" for first in "bdfgklmnprst" for last in ("a", "e", "ie", "o", "u", "an", "er", "is")]
    vocabulary = [first + last for first in names for last in names[::7]][:words]
    followers = rng.integers(0, words, (words, 3))

    def comment(topic: int) -> list[str]:
        said, word = ["<BOS>"], int(rng.integers(topic, topic + words // 4)) % words
        for _ in range(int(rng.integers(8, 30))):
            said.append(vocabulary[word])
            word = int(followers[word, rng.integers(3)] if rng.random() < 0.9 else rng.integers(words))
        return [*said, "<EOS>"]

    def cut(some: list[str]) -> list[list[str]]:
        padded = some + ["<PAD>"] * (-len(some) % 10)
        return [padded[at : at + 10] for at in range(0, len(padded), 10)]

    def everybody() -> Users:
        for user in range(users):
            said = [comment(int(rng.integers(words))) for _ in range(comments)]
            yield f"user{user}", ([cut(each[:-1]) for each in said],
                                  [{"target_tokens": cut(each[1:])} for each in said])  # fmt: skip

    divide(folder, everybody())


def write(folder: Path, plays: Path | None = None, scale: float = 1) -> None:
    """Creates all datasets; existing ones stay. scale: of the numbers of users and samples, which remain large enough
    for the configs of configs/tables."""

    def count(number: int, least: int) -> int:
        return max(round(scale * number), least)

    makers: dict[str, Callable[[Path], None]] = {
        "femnist": lambda where: femnist(where, count(32, 16), count(3, 1)),
        "celeba": lambda where: celeba(where, count(40, 8), count(25, 10)),
        "reddit": lambda where: reddit(where, count(32, 16), count(60, 10)),
        "movielens": lambda where: movielens(where, count(100, 60), count(200, 120)),
    }
    if plays is not None:
        makers["shakespeare"] = lambda where: shakespeare(where, plays, 16, count(6000, 1200))
    for name, make in makers.items():
        if not (folder / name).exists():
            partial = folder / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            partial.rename(folder / name)
