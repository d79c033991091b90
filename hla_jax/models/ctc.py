"""Connectionist temporal classification (CTC): labels from frames that nobody aligned with them.

A path names one of V symbols for each frame: the blank, 0, or a label, 1 to V - 1. It spells the
labels that are left when equal neighbours are merged and then blanks dropped: a, a, blank, a, b
spells a, a, b. The probability of labels is the sum of that of all paths which spell them.

Source: Connectionist Temporal Classification (Graves et al. 2006, ICML), section 3.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Float, Integer

from hla_jax._check import check_sizes, checked, is_known
from hla_jax._types import Array, result_type
from hla_jax.models._values import check_range, checked_lengths

# The logarithm of 0: far below that of any path, and far above float32's lowest number.
_LOG_ZERO = -1e30


def ctc_loss(
    log_probs: Float[Array, "B T V"],
    frame_lengths: Integer[Array, " B"],
    labels: Integer[Array, "B N"],
    label_lengths: Integer[Array, " B"],
) -> tuple[Float[jax.Array, " B"], Bool[jax.Array, " B"]]:
    """Minus the log-probability of each row's labels; 0 and a flag where no path spells them.

    A row is infeasible if it has fewer frames than labels and blanks between equal neighbours, or
    if each path that spells its labels has the probability 0. Its loss is 0, and so is its
    gradient: the mean over feasible rows is `loss.sum() / feasible.sum()`. Padded frames and labels
    change nothing, whatever they hold.

    Takes O(B T (N + V)) time, and memory for the gradient.

    Source: Connectionist Temporal Classification (Graves et al. 2006, ICML), section 4.1; computed
    by `optax.ctc_loss`.

    Args:
      log_probs: [B, T, V], each frame's log-probabilities of the blank, 0, and the labels. They are
        normalised here, so logits will do.
      frame_lengths: [B], integers in 0..T: how many frames of each row count, the first ones.
      labels: [B, N], integers in 1..V-1 where they count.
      label_lengths: [B], integers in 0..N: how many labels of each row count, the first ones.

    Returns:
      The losses [B], at least 0, in float32, or float64 if log_probs is; and [B], whether the row
      is feasible.

    Raises:
      ValueError: an argument has a wrong shape or dtype, or a length or a label that counts is out
        of its range. Inside jit, where values are not known, such a row is infeasible.

    Example:
      >>> import jax.numpy as jnp
      >>> even = jnp.zeros((2, 3, 3))  # of 27 paths, 112 122 012 102 120 spell 1, 2
      >>> labels = jnp.array([[1, 2, 0], [1, 1, 2]])
      >>> loss, feasible = ctc_loss(even, jnp.array([3, 3]), labels, jnp.array([2, 3]))
      >>> print(27 * jnp.exp(-loss[0]), feasible)
      5.0 [ True False]
    """
    log_probs = checked("log_probs", log_probs, None, jnp.floating)
    given, labels = labels, checked("labels", labels, None, jnp.integer)
    if log_probs.ndim != 3 or labels.ndim != 2 or len(log_probs) != len(labels):
        raise ValueError(
            "log_probs and labels must be [B, T, V] and [B, N], "
            f"got {log_probs.shape} and {labels.shape}"
        )
    (B, T, V), N = log_probs.shape, labels.shape[1]
    frame_lengths = checked_lengths("frame_lengths", frame_lengths, B, T)
    label_lengths = checked_lengths("label_lengths", label_lengths, B, N)
    if is_known(label_lengths):
        counts = np.arange(N) < np.asarray(label_lengths)[:, None]
        check_range("labels", given, 1, V - 1, counts, which=" where they count")
    return _loss(log_probs, frame_lengths, labels, label_lengths)


@jax.jit
def _loss(
    log_probs: jax.Array, frame_lengths: jax.Array, labels: jax.Array, label_lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    (B, T, V), N = log_probs.shape, labels.shape[1]
    # Wide enough to be compared with T, N and V.
    frame_lengths, labels, label_lengths = (
        x.astype(result_type(x.dtype, jnp.int32)) for x in (frame_lengths, labels, label_lengths)
    )
    real_frames = jnp.arange(T, dtype=frame_lengths.dtype)[None] < frame_lengths[:, None]
    real_labels = jnp.arange(N, dtype=label_lengths.dtype)[None] < label_lengths[:, None]
    possible = (((labels >= 1) & (labels < V)) | ~real_labels).all(1)
    possible &= (frame_lengths >= 0) & (frame_lengths <= T)
    possible &= (label_lengths >= 0) & (label_lengths <= N)
    if T == 0:  # optax wants a frame, be it a padded one
        log_probs, real_frames = jnp.zeros((B, 1, V)), jnp.zeros((B, 1), bool)
    dtype = result_type(log_probs.dtype, jnp.float32)
    # Numbers above log 0, because optax multiplies what a row does not need by 0.
    kept = jnp.maximum(jnp.where(real_frames[..., None], log_probs, 0).astype(dtype), _LOG_ZERO)
    # Whatever the user has set, for optax promotes.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        loss = optax.ctc_loss(
            kept,
            (~real_frames).astype(dtype),
            jnp.where(real_labels, labels, 0),
            (~real_labels).astype(dtype),
            log_epsilon=_LOG_ZERO,
        )
    feasible = possible & ~(loss >= -_LOG_ZERO / 2)  # what is NaN stays so, and is seen
    # Near certainty, rounding may take the loss below 0.
    return jnp.where(feasible, jnp.maximum(loss, 0), 0).astype(dtype), feasible


def greedy_decode(
    log_probs: Float[Array, "B T V"], lengths: Integer[Array, " B"]
) -> list[list[int]]:
    """The labels that each row's most probable path spells, in O(B T V) time, by NumPy.

    They need not be the most probable labels, for many paths spell the same ones.

    Source: Connectionist Temporal Classification (Graves et al. 2006, ICML), section 3.2, best path
    decoding.

    Args:
      log_probs: [B, T, V], as in `ctc_loss`.
      lengths: [B], integers in 0..T: how many frames of each row count.

    Returns:
      For each row, a list of labels in 1..V-1.

    Raises:
      ValueError: an argument has a wrong shape or dtype, or a length is not in 0..T.

    Example:
      >>> import jax, numpy as np
      >>> path = np.array([[1, 1, 0, 1, 2, 2, 3]])
      >>> print(greedy_decode(jax.nn.one_hot(path, 4), np.array([6])))
      [[1, 1, 2]]
    """
    rows = []
    for frames in _rows(log_probs, lengths):
        path = frames.argmax(-1)
        changed = np.diff(path, prepend=0) != 0
        rows.append(path[changed & (path != 0)].tolist())
    return rows


def beam_decode(
    log_probs: Float[Array, "B T V"], lengths: Integer[Array, " B"], beam_size: int
) -> list[list[int]]:
    """Each row's most probable labels, among those that a prefix beam search meets.

    After each frame, the `beam_size` labellings of highest probability are kept; that of a
    labelling is the sum over the paths that spell it and never left the beam. A beam that holds all
    labellings finds the most probable one. A beam of one is not `greedy_decode`: it sums over the
    paths of its labelling, where that one takes the best path.

    Takes O(B T V beam_size) time, in Python.

    Source: First-Pass Large Vocabulary Continuous Speech Recognition using Bi-Directional Recurrent
    DNNs (Hannun et al. 2014, arXiv 1408.2873), algorithm 1, without a language model.

    Args:
      log_probs: [B, T, V], as in `ctc_loss`.
      lengths: [B], integers in 0..T: how many frames of each row count.
      beam_size: how many labellings are kept, at least 1.

    Returns:
      For each row, a list of labels in 1..V-1.

    Raises:
      ValueError: an argument has a wrong shape or dtype, a length is not in 0..T, or beam_size is
        less than 1.

    Example:
      >>> import numpy as np
      >>> log_probs = np.log(np.array([[[0.6, 0.4], [0.6, 0.4]]]))  # two blanks: 0.36
      >>> lengths = np.array([2])
      >>> print(greedy_decode(log_probs, lengths))
      [[]]
      >>> print(beam_decode(log_probs, lengths, 2))
      [[1]]
    """
    check_sizes(beam_size=beam_size)
    return [_beam_search(frames, beam_size) for frames in _rows(log_probs, lengths)]


def error_rate(
    decoded: Sequence[Sequence[Hashable]], references: Sequence[Sequence[Hashable]]
) -> float:
    """The edits that make the decoded rows the references, per label of these.

    An edit inserts, removes or replaces one label. For phonemes this is the phoneme error rate, for
    words the word error rate; it may be above 1.

    Args:
      decoded: rows of labels, or of anything that compares.
      references: as many rows.

    Returns:
      The sum of the rows' edit distances over the sum of the references' lengths.

    Raises:
      ValueError: the numbers of rows differ, or the references hold no label.

    Example:
      >>> print(error_rate(["kitten", "jax"], ["sitting", "jax"]))
      0.3
    """
    if len(decoded) != len(references):
        raise ValueError(
            f"decoded must have as many rows as references, {len(references)}, got {len(decoded)}"
        )
    total = sum(map(len, references))
    if total == 0:
        raise ValueError("references must hold a label, got none")
    return sum(map(_edit_distance, decoded, references)) / total


def _rows(log_probs: Float[Array, "B T V"], lengths: Integer[Array, " B"]) -> list[np.ndarray]:
    """Each row's frames that count, [T, V] in float64."""
    frames = np.asarray(checked("log_probs", log_probs, None, jnp.floating), np.float64)
    if frames.ndim != 3:
        raise ValueError(f"log_probs must be [B, T, V], got {frames.shape}")
    counts = np.asarray(checked_lengths("lengths", lengths, len(frames), frames.shape[1]))
    return [row[:n] for row, n in zip(frames, counts, strict=True)]


def _beam_search(log_probs: np.ndarray, beam_size: int) -> list[int]:
    # Each labelling's probability, of its paths that end in a blank and of those that do not.
    beam: dict[tuple[int, ...], list[float]] = {(): [1.0, 0.0]}
    for frame in log_probs:
        blank, *emit = np.exp(frame - frame.max()).tolist()
        longer: defaultdict[tuple[int, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for prefix, (closed, open_) in beam.items():
            longer[prefix][0] += (closed + open_) * blank
            for label, p in enumerate(emit, 1):
                if prefix and label == prefix[-1]:
                    longer[prefix][1] += open_ * p
                    longer[(*prefix, label)][1] += closed * p
                else:
                    longer[(*prefix, label)][1] += (closed + open_) * p
        best = sorted(longer, key=lambda prefix: sum(longer[prefix]), reverse=True)[:beam_size]
        scale = sum(longer[best[0]])  # a common factor, so that no number becomes too small
        beam = {prefix: [p / scale for p in longer[prefix]] for prefix in best}
    return list(next(iter(beam)))


def _edit_distance(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    row = list(range(len(b) + 1))  # from what is read of a to each beginning of b
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]
