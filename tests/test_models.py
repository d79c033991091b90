"""The language model learns, and `generate` writes what stepping through it by hand would."""

import importlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import rms_error

from hla_jax import nn
from hla_jax.attention import patterns
from hla_jax.models import TransformerLM, generate, sample

V = 8
KEY = jax.random.key(0)


def make(mixer="hla2", **more):
    sizes = dict(num_layers=1, num_heads=2, features=16, mlp_features=32)
    return TransformerLM(V, mixer=mixer, rngs=nnx.Rngs(0), **sizes | more)


def random_tokens(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(V, size=shape), jnp.int32)


@nnx.jit
def call(model, tokens, state=None, mask=None):
    return model(tokens, state, mask)


@pytest.mark.parametrize(
    "mixer",
    [
        "hla2",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("linear", "ahla", "hla3", "softmax")),
    ],
)
def test_every_mixer_learns_to_repeat_what_it_has_seen(mixer):
    """Rows repeat 4 random tokens. Unigram loss is log 8 = 2.08 nats, the best about 0.42."""
    graph, params = nnx.split(make(mixer, features=32))
    optimiser = optax.adamw(1e-2)

    def step(carry, key):
        params, state = carry
        tokens = jnp.tile(jax.random.randint(key, (16, 4), 0, V), (1, 4))

        def loss(params):
            logits, _ = nnx.merge(graph, params)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        change, state = optimiser.update(gradient, state, params)
        return (optax.apply_updates(params, change), state), value

    @jax.jit
    def train(params):
        keys = jax.random.split(jax.random.key(0), 200)
        return jax.lax.scan(step, (params, optimiser.init(params)), keys)[1]

    losses = np.asarray(train(params))
    assert np.isfinite(losses).all()
    assert losses[-10:].mean() < 1.2


def test_padding_may_hold_any_token_and_changes_no_logits():
    model, tokens = make(), random_tokens(1, 5)
    mask = jnp.array([[0, 1, 1, 0, 1, 1, 1, 0]], bool)
    padded = jnp.full(mask.shape, -1000).at[mask].set(tokens[0])
    logits, state = call(model, padded, None, mask)
    want, last = call(model, tokens)
    assert np.isfinite(logits).all()
    assert rms_error(logits[mask], want[0]) < 1e-5
    jax.tree.map(lambda a, b: rms_error(a, b) < 1e-5 or pytest.fail(f"{a} != {b}"), state, last)


@pytest.mark.parametrize("token", [-1, 8])
def test_a_token_that_does_not_exist_is_an_error_and_in_jit_a_nan(token, no_type_checks):
    model, mask = make(), jnp.array([[True, True, False]])
    wrong, masked = jnp.array([[1, token, 2]]), jnp.array([[1, 2, token]])
    with pytest.raises(ValueError, match=r"tokens must be in 0\.\.7 where unmasked"):
        model(wrong, mask=mask)
    logits, _ = call(model, wrong, None, mask)
    assert np.isnan(logits[0, 1]).all()
    assert np.isfinite(model(masked, mask=mask)[0]).all()
    small = np.array([[1, 2, 3]], np.uint8)
    np.testing.assert_array_equal(call(model, small)[0], call(model, small.astype(int))[0])


def greedy(model, prompt, n):
    """Each token by a whole forward pass over a row padded on the right."""
    row, out = list(prompt), []
    for _ in range(n):
        tokens = jnp.array([row + [0] * (16 - len(row))])
        out.append(int(call(model, tokens)[0][0, len(row) - 1].argmax()))
        row.append(out[-1])
    return out


@pytest.mark.parametrize("mixer", ["hla2", "softmax"])
def test_ragged_prompts_are_continued_as_if_alone(mixer):
    model = make(mixer)
    prompts = [[1, 2, 3, 4, 5], [6, 7], [3]]
    batch = jnp.array([[1, 2, 3, 4, 5], [0, 6, 0, 7, 0], [3, 0, 0, 0, 0]])
    mask = jnp.array([[1, 1, 1, 1, 1], [0, 1, 0, 1, 0], [1, 0, 0, 0, 0]], bool)
    got = generate(model, batch, prompt_mask=mask, max_new_tokens=6, temperature=0)
    assert got.tolist() == [greedy(model, prompt, 6) for prompt in prompts]


def test_prompts_of_a_bucket_share_one_compilation():
    model = make()
    compiled = importlib.import_module("hla_jax.models.generate")._generate
    compiled.clear_cache()
    for T, temperature in ((1, 0.5), (5, 0.0), (16, 2.0)):
        generate(
            model,
            random_tokens(1, T),
            max_new_tokens=2,
            key=jax.random.key(T),
            temperature=temperature,
        )
    assert compiled._cache_size() == 1


def test_a_single_token_is_generated_without_jit_as_with_it():
    model, prompt = make(), random_tokens(2, 3)
    options = dict(max_new_tokens=1, temperature=0)
    with jax.disable_jit():
        plain = generate(model, prompt, **options)
    np.testing.assert_array_equal(plain, generate(model, prompt, **options))


def test_the_row_is_filled_once_it_has_stopped():
    model, prompt = make(), random_tokens(4, 3)
    options = dict(max_new_tokens=12, key=jax.random.key(0), temperature=3.0)
    free = np.asarray(generate(model, prompt, **options))
    stopped = np.asarray(generate(model, prompt, stop_token=5, **options))
    ends = [list(row).index(5) if 5 in row else 12 for row in free]
    assert min(ends) < 11
    for row, want, end in zip(stopped, free, ends, strict=True):
        assert (row[:end] == want[:end]).all()
        assert (row[end:] == 5).all()


class TestSample:
    logits = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.3]))

    def frequencies(self, **options):
        draw = jax.vmap(lambda key: sample(self.logits, key, **options))
        tokens = draw(jax.random.split(jax.random.key(0), 4000))
        return np.bincount(tokens, minlength=4) / 4000

    @pytest.mark.parametrize(
        ("options", "want"),
        [
            (dict(), [0.1, 0.4, 0.2, 0.3]),
            (dict(temperature=0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
            (dict(temperature=0.0), [0, 1, 0, 0]),
            (dict(top_k=2), [0, 4 / 7, 0, 3 / 7]),
            (dict(top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9]),
            (dict(top_p=1e-6), [0, 1, 0, 0]),
            (dict(top_k=3, top_p=0.5), [0, 4 / 7, 0, 3 / 7]),
        ],
    )
    def test_frequencies_are_the_chosen_probabilities(self, options, want):
        np.testing.assert_allclose(self.frequencies(**options), want, atol=0.03)

    def test_each_row_has_its_own_temperature_and_p(self):
        rows = np.random.default_rng(0).normal(size=(2, 3, 6)) / 4
        rows[0, 1, 2] = rows[1, :, 5] = -np.inf
        temperature = np.array([[0.5, 1, 2], [0, 0.3, 1]])
        top_p = np.array([[0.3, 0.6, 0.9], [1, 1, 0.5]])
        options = dict(temperature=temperature, top_p=jnp.asarray(top_p))
        draw = jax.jit(jax.vmap(lambda key: sample(jnp.asarray(rows), key, **options)))
        drawn = np.asarray(draw(jax.random.split(KEY, 400)))
        for b in np.ndindex(2, 3):
            assert {*drawn[:, *b].tolist()} == naive_choice(rows[b], temperature[b], top_p[b]), b

    @pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-30, np.float32(1e-38)])
    def test_a_tiny_temperature_takes_the_most_likely_token(self, temperature):
        rows = jnp.array([[1.0, 1.5, 2.0, -3.0], [300, 100, 200, -jnp.inf], [-7, -5, -6, -8]])
        draw = jax.vmap(lambda key: sample(rows, key, temperature=temperature))
        assert {*map(tuple, draw(jax.random.split(KEY, 50)).tolist())} == {(2, 0, 1)}

    def test_extremes(self):
        """A token of -inf is never chosen, one of inf always; a p of 1 leaves no token out."""
        rows = jnp.array([[0.0, -jnp.inf], [0.0, jnp.inf]])
        draw = jax.vmap(partial(sample, rows, temperature=jnp.inf))
        assert {*map(tuple, draw(jax.random.split(KEY, 50)).tolist())} == {(0, 1)}
        flat = jnp.zeros((20000,))
        kept, every = (sample(flat, KEY, **options) for options in (dict(top_p=1), dict()))
        assert kept == every

    def test_logits_of_64_bits_are_compared_in_64_bits(self, x64):
        rows = np.array([[1, 1 + 1e-12], [1, 1 - 1e-12]])
        assert sample(rows, KEY, temperature=0).tolist() == [1, 0]
        assert sample(rows, KEY, top_k=1).tolist() == [1, 0]

    @pytest.mark.parametrize("name", ["temperature", "top_p"])
    def test_a_number_is_one_of_any_kind_or_one_for_each_row(self, name, no_type_checks):
        rows = jnp.zeros((3, 3)) + self.logits[:3]
        want = sample(rows, KEY, **{name: 0.5})
        for number in (np.float32(0.5), np.float64(0.5), jnp.array(0.5), np.array(0.5, np.float16)):
            np.testing.assert_array_equal(sample(rows, KEY, **{name: number}), want)
            each = np.full(3, number)
            np.testing.assert_array_equal(sample(rows, KEY, **{name: each}), want)
        assert sample(rows, KEY, **{name: 1}).shape == (3,)
        for shape in [(3, 1), (1, 3), (1,), (2,), (3, 3), (1, 1)]:
            with pytest.raises(ValueError, match=rf"{name} must be a number or of shape \(3,\)"):
                sample(rows, KEY, **{name: np.full(shape, 0.5)})
            with pytest.raises(ValueError, match=rf"{name} must be a number or of shape \(3,\)"):
                jax.eval_shape(lambda x: sample(rows, KEY, **{name: x}), np.full(shape, 0.5))
        with pytest.raises(ValueError, match=rf"{name} must be a number or of shape \(\)"):
            sample(self.logits, KEY, **{name: np.full(4, 0.5)})

    @pytest.mark.parametrize(
        ("name", "wanted", "wrong"),
        [
            ("temperature", "at least 0", (-1, -1e-50, np.nan)),
            ("top_p", r"in \(0, 1\]", (-1, 0, 1.5, 1 + 1e-12, np.nan)),
        ],
    )
    def test_a_number_out_of_its_range_is_refused_where_it_is_known(
        self, name, wanted, wrong, no_type_checks
    ):
        for number in wrong:
            with pytest.raises(ValueError, match=f"{name} must be {wanted}, got"):
                jax.eval_shape(lambda key, n=number: sample(self.logits, key, **{name: n}), KEY)
            for kind in (float, np.float32, jnp.float32, lambda x: np.array([0.5, x])):
                if number not in (-1e-50, 1 + 1e-12) or kind is float:
                    with pytest.raises(ValueError, match=f"{name} must be {wanted}, got"):
                        sample(jnp.zeros((2, 4)), KEY, **{name: kind(number)})
        for other in ("warm", True, 1j):
            with pytest.raises(ValueError, match=f"{name} must be"):
                sample(self.logits, KEY, **{name: other})
        assert jax.jit(lambda x: sample(self.logits, KEY, **{name: x}))(-1.0).shape == ()

    def test_logits_are_checked(self, no_type_checks):
        for wrong, message in [
            (jnp.zeros(4, int), "logits must be floating"),
            (jnp.float32(1), r"logits must be \[\*B, V\] with V >= 1, got \(\)"),
            (jnp.zeros((2, 0)), r"logits must be \[\*B, V\] with V >= 1, got \(2, 0\)"),
        ]:
            with pytest.raises(ValueError, match=message):
                sample(wrong, KEY)


def naive_choice(logits, temperature, top_p):
    """The tokens that may be chosen."""
    if temperature == 0:
        return {int(logits.argmax())}
    p = np.exp(logits / temperature)
    kept, total = set(), 0.0
    for token in np.argsort(-p):
        if p[token] > 0 and total < top_p:
            kept.add(int(token))
        total += p[token] / p.sum()
    return kept


def test_each_row_is_continued_with_its_own_temperature_and_p():
    model, prompt = make(), random_tokens(3, 4)
    run = partial(generate, model, prompt, max_new_tokens=6)
    got = run(key=KEY, temperature=np.array([0, 3.0, 3]), top_p=jnp.array([1, 1, 1e-6]))
    free, greedy = run(key=KEY, temperature=3, top_p=1), run(temperature=np.zeros(3), top_p=1)
    assert (free[1] != greedy[1]).any()
    np.testing.assert_array_equal(got, jnp.stack([greedy[0], free[1], greedy[2]]))


CACHED = {
    "softmax": {},
    "flash": {},
    "mla": {},
    "sparse": dict(pattern=patterns.sliding_window(4)),
    "longformer": dict(window=4),
    "big_bird": {},
    "reformer": {},
}


@pytest.mark.parametrize(
    "mixer", ["softmax", *(pytest.param(m, marks=pytest.mark.slow) for m in [*CACHED][1:])]
)
def test_a_cache_has_room_for_what_is_not_padding(mixer):
    """Five real tokens of 40 and four new ones are 9; the last of these is not read."""
    model = make(mixer, max_length=8, **CACHED[mixer])
    prompt = random_tokens(2, 5)
    mask = np.zeros((2, 40), bool)
    mask[0, [3, 4, 20, 38, 39]] = mask[1, [0, 1, 2, 3, 30]] = True
    padded = np.full(mask.shape, -5)
    padded[mask] = prompt.ravel()
    want, got = call(model, prompt)[0], call(model, padded, None, mask)[0]
    assert rms_error(got[mask], want.reshape(-1, V)) < 1e-5
    options = dict(max_new_tokens=4, temperature=0)
    got = generate(model, padded, prompt_mask=mask, **options)
    np.testing.assert_array_equal(got, generate(model, prompt, **options))
    with pytest.raises(ValueError, match=r"5 \+ 5 tokens, more than the model's max_length=8"):
        generate(model, padded, prompt_mask=mask, max_new_tokens=5, temperature=0)

    def traced(mask):
        return generate(model, padded, prompt_mask=mask, **options)

    with pytest.raises(ValueError, match=r"40 \+ 4 tokens, more than"):
        jax.eval_shape(traced, mask)
    # A mask that is known inside jit counts as one that is known.
    assert jax.eval_shape(lambda: traced(mask)).shape == (2, 4)


def test_an_untied_head_and_a_mixer_of_ones_own():
    def mixer(**options):
        return nn.LinearAttention(feature_map=jnp.exp, **options)

    model = make(mixer, tied=False, num_kv_heads=1)
    logits, state = jax.eval_shape(model, random_tokens(1, 3))
    assert logits.shape == (1, 3, V)
    assert state[0].memory.kv.shape == (1, 1, 8, 8)
    assert model.head.kernel.shape == (16, V)


def hybrid():
    softmax = partial(nn.SoftmaxAttention, max_length=9)
    return make(["hla2", softmax, nn.LinearAttention], num_layers=3)


def test_blocks_may_have_different_mixers():
    model = hybrid()
    kinds = [type(block.mixer) for block in model.blocks]
    assert kinds == [nn.HLA2, nn.SoftmaxAttention, nn.LinearAttention]
    assert model.max_length == 9


@pytest.mark.slow
def test_different_mixers_step_as_they_read():
    model, tokens = hybrid(), random_tokens(2, 9)
    logits, _ = call(model, tokens)
    first, state = call(model, tokens[:, :5])
    second, _ = call(model, tokens[:, 5:], state)
    assert rms_error(jnp.concatenate([first, second], axis=1), logits) < 1e-5


def test_wrong_arguments_are_named(no_type_checks):
    with pytest.raises(ValueError, match="mixer must be one of"):
        make("hla4")
    with pytest.raises(ValueError, match="mixer must be one, or one for each of 1 layers, got 2"):
        make(["hla2", "hla2"])
    model, prompt = make("softmax", max_length=8), random_tokens(1, 4)
    for message, options in {
        r"4 \+ 6 tokens, more than the model's max_length=8": dict(max_new_tokens=6, temperature=0),
        "key must be given": dict(max_new_tokens=1),
        "max_new_tokens must be an integer at least 1": dict(max_new_tokens=0, temperature=0),
        "max_new_tokens must be an integer .* got 2.0": dict(max_new_tokens=2.0, temperature=0),
        r"top_k must be an integer in 1\.\.8, got 1.5": dict(max_new_tokens=1, top_k=1.5, key=KEY),
        r"top_k must be an integer in 1\.\.8, got 9": dict(max_new_tokens=1, top_k=9, key=KEY),
        r"stop_token must be .* 0\.\.7, got 8": dict(max_new_tokens=1, stop_token=8, key=KEY),
        "stop_token must be .* got 'a'": dict(max_new_tokens=1, stop_token="a", key=KEY),
        "key must be one PRNG key, .* got int32": dict(max_new_tokens=1, key=0),
        r"key must be one PRNG key, .* \(2,\)": dict(max_new_tokens=1, key=jax.random.split(KEY)),
        "temperature must be at least 0, got -1.0": dict(
            max_new_tokens=1, temperature=-1.0, key=KEY
        ),
        r"temperature must .* shape \(1,\), got": dict(
            max_new_tokens=1, temperature=np.ones(8), key=KEY
        ),
        "key must be given unless": dict(max_new_tokens=1, temperature=np.ones(1)),
        r"top_p must be in \(0, 1\], got 1.5": dict(max_new_tokens=1, top_p=1.5, key=KEY),
        r"top_p must be in \(0, 1\], got \[-1.\]": dict(
            max_new_tokens=1, top_p=-np.ones(1), key=KEY
        ),
        "prompt_mask must be bool": dict(prompt_mask=prompt > 9, max_new_tokens=1, temperature=0),
    }.items():
        if "prompt_mask" in options:
            options["prompt_mask"] = options["prompt_mask"][:, 1:]
        with pytest.raises(ValueError, match=message):
            generate(model, prompt, **options)
    with pytest.raises(ValueError, match="a row is all padding"):
        generate(model, prompt, prompt_mask=prompt > 9, max_new_tokens=1, temperature=0)
    for token in (-1, 8, 2**32 + 1):  # the last one is 1 in int32
        with pytest.raises(ValueError, match=rf"prompt must be in 0\.\.7 .*, got {token}"):
            generate(model, np.array([[1, token]]), max_new_tokens=1, temperature=0)
    with pytest.raises(ValueError, match="prompt must be"):
        generate(model, prompt[:, :0], max_new_tokens=1, temperature=0)
    with pytest.raises(ValueError, match="tokens must be integers"):
        model(prompt * 1.0)
    (state,) = model.init_state(1)
    for wrong, got in [
        (state, "MixerState"),
        ((), r"\(\)"),
        ((state, state), r"\(MixerState, MixerState\)"),
        ((state.memory,), r"\(KVCache\)"),
    ]:
        with pytest.raises(
            ValueError, match=f"state must be .* tuple of 1 MixerStates, got {got}$"
        ):
            model(prompt, wrong)
