"""CTC against the definition: all paths, one by one."""

from functools import partial
from itertools import groupby, product

import jax
import numpy as np
import pytest
from helpers import rms_error

from hla_jax.models.ctc import beam_decode, ctc_loss, error_rate, greedy_decode

B, T, N, V = 7, 4, 3, 3
rng = np.random.default_rng(0)
LOGITS = (2 * rng.standard_normal((B, T, V))).astype(np.float32)
FRAMES = np.array([4, 4, 3, 2, 3, 0, 0])
LABELS = np.array([[1, 2, 1], [1, 1, 2], [1, 1, 2], [2, 2, 2], [1, 0, 0], [0, 0, 0], [2, 0, 0]])
LENGTHS = np.array([3, 3, 3, 2, 0, 0, 1])
FEASIBLE = [True, True, False, False, True, True, False]

jitted = jax.jit(ctc_loss)
value_and_gradient = jax.jit(
    jax.value_and_grad(
        lambda *arrays: (lambda l, f: (l.sum(), (l, f)))(*ctc_loss(*arrays)), 0, True
    )
)


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def spelled(path):
    return tuple(symbol for symbol, _ in groupby(path) if symbol != 0)


def labellings(logits):
    """The probability of each labelling: a sum over paths."""
    log_probs, sums = log_softmax(logits), {}
    for path in product(range(V), repeat=len(logits)):
        p = np.exp(sum(log_probs[t, symbol] for t, symbol in enumerate(path)))
        sums[spelled(path)] = sums.get(spelled(path), 0) + p
    return sums


def naive_loss(logits, b):
    p = labellings(logits[: FRAMES[b]]).get(tuple(LABELS[b, : LENGTHS[b]].tolist()))
    return 0.0 if p is None else -np.log(p)


def naive_gradient(eps=1e-5):
    gradient = np.zeros(LOGITS.shape)
    for b, t, v in np.ndindex(LOGITS.shape):
        up, down = LOGITS[b].astype(np.float64), LOGITS[b].astype(np.float64)
        up[t, v] += eps
        down[t, v] -= eps
        gradient[b, t, v] = (naive_loss(up, b) - naive_loss(down, b)) / (2 * eps)
    return gradient


def test_the_loss_and_its_gradient_are_those_of_all_paths_whatever_padding_holds():
    want = [naive_loss(LOGITS[b], b) for b in range(B)]
    padded = np.where(np.arange(T)[:, None] < FRAMES[:, None, None], LOGITS, np.nan)
    labels = np.where(np.arange(N) < LENGTHS[:, None], LABELS, -7)
    (_, (loss, feasible)), gradient = value_and_gradient(padded, FRAMES, labels, LENGTHS)
    assert feasible.tolist() == FEASIBLE
    assert rms_error(loss, want) < 1e-5
    assert rms_error(gradient, naive_gradient()) < 1e-5
    assert not np.asarray(loss)[~np.array(FEASIBLE)].any()
    assert not np.asarray(gradient)[~np.array(FEASIBLE)].any()


def test_a_near_certain_alignment_costs_nothing_rather_than_less():
    logits = np.array([[[0, 17], [0, 17]]], np.float32)
    loss, feasible = jitted(logits, np.array([2]), np.array([[1]]), np.array([1]))
    assert feasible[0]
    assert 0 <= loss[0] < 1e-6


def test_log_probabilities_of_minus_infinity_are_paths_that_do_not_exist():
    with np.errstate(divide="ignore"):
        log_probs = np.log([[[0.5, 0.5, 0], [0, 1, 0]]] * 2, dtype=np.float32)
    loss, feasible = jitted(log_probs, np.array([2, 2]), np.array([[1], [2]]), np.array([1, 1]))
    assert feasible.tolist() == [True, False]
    assert loss.tolist() == [0, 0]


def test_a_loss_that_is_not_a_number_is_not_hidden():
    frames = LOGITS.copy()
    frames[0, 0] = frames[3, 3] = np.nan  # row 3 has two frames
    loss, feasible = jitted(frames, FRAMES, LABELS, LENGTHS)
    assert feasible.tolist() == FEASIBLE
    assert np.isnan(loss).tolist() == [True] + [False] * 6


@pytest.mark.parametrize(("T", "N"), [(0, 2), (3, 0), (0, 0)])
def test_no_frames_spell_no_labels(T, N):
    lengths = np.array([T]), np.array([N])
    loss, feasible = jitted(np.zeros((1, T, V)), lengths[0], np.ones((1, N), int), lengths[1])
    assert feasible.tolist() == [N == 0]
    np.testing.assert_allclose(loss, T * np.log(3) if N == 0 else 0, rtol=1e-6)


def test_the_loss_is_in_float32_or_float64(x64):
    for dtype, want in [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]:
        log_probs = jax.ShapeDtypeStruct((B, T, V), dtype)
        assert jax.eval_shape(ctc_loss, log_probs, FRAMES, LABELS, LENGTHS)[0].dtype == want
    loss, _ = jitted(LOGITS.astype(np.float64), FRAMES, LABELS, LENGTHS)
    assert rms_error(loss, [naive_loss(LOGITS[b], b) for b in range(B)]) < 1e-12


def test_greedy_decoding_spells_the_best_path_of_the_frames_that_count():
    want = [list(spelled(LOGITS[b, : FRAMES[b]].argmax(-1).tolist())) for b in range(B)]
    assert greedy_decode(LOGITS, FRAMES) == want


def test_a_beam_of_all_labellings_finds_the_most_probable():
    flat = LOGITS / 4
    sums = [labellings(flat[b, : FRAMES[b]]) for b in range(B)]
    want = [list(max(p, key=p.get)) for p in sums]
    padded = np.where(np.arange(T)[:, None] < FRAMES[:, None, None], flat, np.nan)
    assert beam_decode(padded, FRAMES, beam_size=V**T) == want
    assert greedy_decode(padded, FRAMES) != want


def test_a_narrow_beam_merges_the_paths_of_a_labelling():
    """The best path is two blanks, 0.16, where 01, 10 and 11 have 0.4025 together."""
    log_probs = np.log([[[0.4, 0.35, 0.25], [0.4, 0.35, 0.25]]])
    assert greedy_decode(log_probs, np.array([2])) == [[]]
    assert beam_decode(log_probs, np.array([2]), beam_size=2) == [[1]]


def test_a_long_row_does_not_underflow():
    log_probs = np.full((1, 3000, 3), -50.0)
    log_probs[0, ::2, 0] = log_probs[0, 1::4, 1] = log_probs[0, 3::4, 2] = -40.0
    assert beam_decode(log_probs, np.array([3000]), beam_size=2) == [[1, 2] * 750]


@pytest.mark.parametrize(
    ("decoded", "references", "want"),
    [
        ([[1, 2, 3]], [[1, 2, 3]], 0),
        ([[]], [[1, 2]], 1),
        ([[1, 2, 3, 4]], [[2, 3]], 1),
        ([[1, 3, 2]], [[1, 2, 2]], 1 / 3),
        ([[2, 3, 1], [1]], [[1, 2, 3], []], 1),
        ([["AH", "B"]], [["B"]], 1),
    ],
)
def test_the_error_rate_counts_edits_over_all_reference_labels(decoded, references, want):
    assert error_rate(decoded, references) == pytest.approx(want)


def test_wrong_arguments_are_named(no_type_checks):
    good = dict(log_probs=LOGITS, frame_lengths=FRAMES, labels=LABELS, label_lengths=LENGTHS)
    for message, wrong in {
        "log_probs must be floating": dict(log_probs=LOGITS.astype(int)),
        r"log_probs and labels must be .* got \(4, 3\)": dict(log_probs=LOGITS[0]),
        "frame_lengths must be integer of shape": dict(frame_lengths=FRAMES[1:]),
        "label_lengths must be integer of shape": dict(label_lengths=LENGTHS * 1.0),
        r"labels must be in 1\.\.2 where they count, got 3": dict(labels=LABELS + 1),
        r"labels must be in 1\.\.2 .* got 4294967297": dict(labels=LABELS + 2**32),
        r"frame_lengths must be in 0\.\.4, got 9": dict(frame_lengths=np.full(B, 9)),
        r"frame_lengths must be in 0\.\.4, got -1": dict(frame_lengths=FRAMES - 1),
        r"label_lengths must be in 0\.\.3, got 4": dict(label_lengths=LENGTHS + 1),
        r"label_lengths must be in 0\.\.3, got -1": dict(label_lengths=LENGTHS - 1),
    }.items():
        with pytest.raises(ValueError, match=message):
            ctc_loss(**good | wrong)
    with pytest.raises(ValueError, match=r"log_probs must be \[B, T, V\]"):
        greedy_decode(LOGITS[0], FRAMES)
    with pytest.raises(ValueError, match="lengths must be integer of shape"):
        greedy_decode(LOGITS, FRAMES[1:])
    for length in (-1, T + 1):
        for decode in (greedy_decode, partial(beam_decode, beam_size=2)):
            with pytest.raises(ValueError, match=rf"lengths must be in 0\.\.4, got {length}"):
                decode(LOGITS, np.full(B, length))
    with pytest.raises(ValueError, match="beam_size must be an integer at least 1"):
        beam_decode(LOGITS, FRAMES, 0)
    with pytest.raises(ValueError, match="as many rows as references, 2, got 1"):
        error_rate([[1]], [[1], [2]])
    with pytest.raises(ValueError, match="references must hold a label"):
        error_rate([[1]], [[]])


def test_a_label_that_is_not_one_makes_its_row_infeasible_inside_jit():
    (_, (loss, feasible)), _ = value_and_gradient(LOGITS, FRAMES, LABELS + 1, LENGTHS)
    assert feasible.tolist() == [False, False, False, False, True, True, False]
    assert np.isfinite(loss).all()


@pytest.mark.parametrize("name", ["frame_lengths", "label_lengths"])
def test_a_length_that_is_not_one_makes_its_row_infeasible_inside_jit(name):
    lengths = dict(frame_lengths=FRAMES, label_lengths=LENGTHS)
    lengths[name] = np.where(np.arange(B) % 2, lengths[name], [-1, 0, 9, 0, 9, 0, -1])
    (_, (loss, feasible)), gradient = value_and_gradient(
        LOGITS, lengths["frame_lengths"], LABELS, lengths["label_lengths"]
    )
    assert feasible.tolist() == [f and b % 2 == 1 for b, f in enumerate(FEASIBLE)]
    assert not np.asarray(loss)[::2].any()
    assert not np.asarray(gradient)[::2].any()


def test_small_integers_are_not_compared_as_such():
    """300 symbols and frames are more than 8 bits hold."""
    arrays = np.zeros((1, 300, 300), np.float32), [200], [[1, 255]], [2]
    want, _ = jitted(*(np.asarray(a) for a in arrays))
    got, feasible = jitted(arrays[0], *(np.asarray(a, np.uint8) for a in arrays[1:]))
    assert feasible[0]
    assert got == want
