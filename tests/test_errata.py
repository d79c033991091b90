"""The mistakes of arXiv 2510.27258, each shown by numbers: those of docs/errata.md.

All use one head of width 1, where a sequence is a list of numbers; unless a test says otherwise
q = k = v = 1 and every decay is 1/2.
"""

from functools import reduce
from itertools import product

import numpy as np
import pytest

from hla_jax import monoids


@pytest.fixture(autouse=True)
def in_float64(x64):
    """Numbers here are exact or have 15 digits."""


def ones(n, decay=1.0):
    return [(np.ones(1), np.ones(1), np.ones(1), np.log(decay)) for _ in range(n)]


def lifted(m, tokens):
    return [m.lift(*token) for token in tokens]


def from_left(combine, a, b, c):
    return combine(combine(a, b), c)


def from_right(combine, a, b, c):
    return combine(a, combine(b, c))


def sum_over(pairs, decay):
    """The sum over pairs or triples of tokens 1, 2, 3 of their decays up to token 3, multiplied."""
    return sum(decay ** sum(3 - i for i in pair) for pair in pairs)


PAIRS = list(product((1, 2, 3), repeat=2))
TRIPLES = list(product((1, 2, 3), repeat=3))


def largest_twice(triple):
    return sorted(triple)[1] == max(triple)


def published_hla2(a, b):
    """Section 4.2: G decays with rho."""
    G = b.rho * a.G + b.G + b.rho * b.S @ a.C
    return monoids.HLA2Paper().combine(a, b)._replace(G=G)


def published_ahla(a, b):
    """Section 6.2: R decays."""
    return monoids.AHLA().combine(a, b)._replace(R=b.rho * a.R + b.R)


def published_hla3(a, b):
    """Section 7, "the same carry-scaling": A's members times rho_B, then the rule without decay."""
    carried = type(a)(*(b.rho * member for member in a))
    combined = monoids.HLA3("published").combine(carried, b._replace(rho=1.0))
    return combined._replace(rho=a.rho * b.rho)


def test_1_the_decayed_second_order_scan_is_not_associative():
    m = monoids.HLA2Paper()
    tokens = lifted(m, ones(3, decay=0.5))
    assert from_left(published_hla2, *tokens).G == 1.0
    assert from_right(published_hla2, *tokens).G == 0.875

    removed = sum_over([(i, j) for i, j in PAIRS if i > j], decay=0.5)
    assert from_left(m.combine, *tokens).G == from_right(m.combine, *tokens).G == removed == 0.875


def test_2_the_decayed_second_order_recurrence_is_neither_the_scan_nor_the_masked_sum():
    def run(update, decay=0.5, n=3):
        S = C = G = 0.0
        for _ in range(n):
            G = update(decay, G, C)
            S, C = decay * S + 1, decay * C + 1
        return S * C - G, G

    published = run(lambda g, G, C: g * G + C)
    assert published == (1.0625, 2.0)
    scanned = run(lambda g, G, C: g * G + g * C)  # the paper's scan, folded from the left
    assert scanned == (2.0625, 1.0)

    right = run(lambda g, G, C: g**2 * G + g * C)
    kept = sum_over([(i, j) for i, j in PAIRS if i <= j], decay=0.5)
    assert right == (kept, 0.875) == (2.1875, 0.875)


def test_2_which_pairs_of_tokens_each_update_leaves():
    """q = 1, k and v are unit vectors: rows are i, columns j, of the weights left on i > j."""

    def left(update, decay=0.5, n=3):
        S, C, G = np.zeros((n, n)), np.zeros((n, n)), np.zeros((n, n))
        for k in np.eye(n):
            G = update(decay, G, np.outer(k, k @ C))
            S, C = decay * S + np.outer(k, k), decay * C + np.outer(np.ones(n), k)
        return np.tril(S @ C - G, -1)

    published = left(lambda g, G, new: g * G + new)
    np.testing.assert_array_equal(published, [[0, 0, 0], [-0.375, 0, 0], [-0.25, -0.5, 0]])
    scanned = left(lambda g, G, new: g * G + g * new)
    np.testing.assert_array_equal(scanned, [[0, 0, 0], [-0.125, 0, 0], [0, 0, 0]])
    right = left(lambda g, G, new: g**2 * G + g * new)
    np.testing.assert_array_equal(right, np.zeros((3, 3)))


def test_3_the_decayed_ahla_scan_is_wrong_where_the_right_operand_has_several_tokens():
    m = monoids.AHLA()
    tokens = lifted(m, ones(3, decay=0.5))
    assert from_left(published_ahla, *tokens).E == 2.75  # the paper's own recurrence
    assert from_right(published_ahla, *tokens).E == 2.625

    right = sum(0.5 ** (3 - j) for i, j in PAIRS if j <= i)
    assert from_left(m.combine, *tokens).E == from_right(m.combine, *tokens).E == right == 2.75


def third_order(update, q, k, v, decay=1.0):
    """S N P - G1 - G2 - G3 with the update of the three G from the S, N, P before the token."""
    S = N = P = G = 0.0
    for q_t, k_t, v_t in zip(q, k, v, strict=True):
        new = k_t**2 * N * P + S * q_t**2 * P + S * N * k_t * v_t
        G = update(decay, G, new)
        S, N, P = decay * S + k_t**2, decay * N + q_t**2, decay * P + k_t * v_t
    return q[-1] * (S * N * P - G)


def test_4_the_published_third_order_operator_is_not_the_masked_product():
    q, k, v = np.array([1.0, 2.0]), np.ones(2), np.ones(2)
    tokens = [(q[t : t + 1], k[t : t + 1], v[t : t + 1], np.log(1.0)) for t in range(2)]

    def output(m):
        return m.read(reduce(m.combine, lifted(m, tokens)), *tokens[-1]).item()

    W = np.tril(np.outer(q, k))
    masked = (np.tril(W @ W.T) @ W @ v)[-1]
    published = third_order(lambda g, G, new: G + new, q, k, v)
    assert (masked, published) == (34.0, 28.0)
    assert output(monoids.HLA3("masked")) == masked
    assert output(monoids.HLA3("published")) == published

    terms = {t: 2.0 * q[t[1] - 1] ** 2 for t in TRIPLES if max(t) <= 2}  # t = (i, u, j)
    kept = {t: x for t, x in terms.items() if t[0] <= t[1] >= t[2]}
    by_paper = {t: x for t, x in terms.items() if largest_twice(t)}
    assert (sum(kept.values()), sum(by_paper.values())) == (34.0, 28.0)
    assert {t: kept[t] for t in kept.keys() - by_paper} == {(1, 2, 1): 8.0}
    assert {t: by_paper[t] for t in by_paper.keys() - kept} == {(2, 1, 2): 2.0}


def test_5_the_decayed_third_order_recurrence_and_scan_follow_no_product_of_weights():
    three = np.ones((3, 3))
    published = third_order(lambda g, G, new: g * G + new, *three, decay=0.5)
    assert published == -2.890625
    right = third_order(lambda g, G, new: g**3 * G + g**2 * new, *three, decay=0.5)
    assert right == sum_over(filter(largest_twice, TRIPLES), decay=0.5) == 3.578125

    m = monoids.HLA3("published")
    tokens = lifted(m, ones(3, decay=0.5))
    assert from_left(published_hla3, *tokens).F == 4.75
    assert from_right(published_hla3, *tokens).F == 4.375
    assert from_left(m.combine, *tokens).F == from_right(m.combine, *tokens).F == right


def carry_and_token(m):
    """What the figures combine: the element of the chunk of tokens 1 and 2, and that of token 3."""
    a, b, c = lifted(m, ones(3))
    return m.combine(a, b), c


def test_6_figure_1c_lacks_the_cross_term():
    carry, token = carry_and_token(monoids.HLA2())
    figure = carry.F + token.F
    assert figure == 4.0
    right = sum_over([(i, j) for i, j in PAIRS if i <= j], decay=1.0)
    assert figure + carry.S @ token.C == right == 6.0


def test_7_figure_2c_leaves_out_the_token_itself():
    carry, token = carry_and_token(monoids.AHLA())
    before, through = np.zeros((1, 1)), token.R  # the chunk's R over tokens < 3, and <= 3
    assert carry.E + token.E + before @ carry.P == 4.0
    right = sum_over([(i, j) for i, j in PAIRS if j <= i], decay=1.0)
    assert carry.E + token.E + through @ carry.P == right == 6.0
