"""What the layers of the other attention variants promise beyond the common protocol."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import rms_error

from hla_jax import nn
from hla_jax.attention import patterns
from hla_jax.models import TransformerLM
from hla_jax.nn.mixer import random_key, wrapped_key

F, H, T = 12, 4, 6

ENCODERS = {
    "linear": (nn.LinearAttention, dict(decay=None)),
    "performer": (nn.Performer, dict(num_features=8)),
    "softmax": (nn.SoftmaxAttention, dict()),
    "flash": (nn.FlashAttention, dict()),
    "mla": (nn.MLA, dict(kv_rank=4, rotary_dim=2)),
    "window": (nn.SlidingWindowAttention, dict(window=T)),
    "fixed": (nn.SparseAttention, dict(pattern=patterns.fixed(2))),
    "longformer": (nn.Longformer, dict(window=2, global_positions=[0])),
    "big_bird": (nn.BigBird, dict(window=2, num_random=1, block_size=2)),
    "reformer": (nn.Reformer, dict(num_buckets=2, num_rounds=4)),
    "linformer": (nn.Linformer, dict(num_projected=4, max_length=9)),
}


def make(name, seed=0, **more):
    layer, options = ENCODERS[name]
    options = options if name == "linformer" else dict(causal=False) | options
    return layer(H, F, rngs=nnx.Rngs(seed), **options | more)


def features(B=2, T=T, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, T, F)), jnp.float32)


@nnx.jit
def call(layer, x, mask=None):
    return layer(x, None, mask)[0]


@pytest.mark.parametrize("name", ENCODERS)
class TestEncoders:
    def test_look_ahead_and_do_not_see_padding(self, name):
        """One compiled call: a row padded on the right, on the left and with holes, NaN in it."""
        layer, x = make(name), features(B=1)
        y = []
        for places in ([0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8], [0, 1, 3, 4, 5, 7]):
            mask = np.zeros((1, 9), bool)
            mask[0, places] = True
            padded = jnp.full((1, 9, F), jnp.nan).at[mask].set(x[0])
            out = call(layer, padded, mask)
            np.testing.assert_array_equal(out[~mask], 0)
            y.append(out[mask])
        assert rms_error(y[1], y[0]) < 1e-5
        assert rms_error(y[2], y[0]) < 1e-5
        other = jnp.zeros((1, 9, F)).at[0, :T].set(x[0].at[-1].add(1.0))
        moved = call(layer, other, jnp.arange(9)[None] < T)
        assert rms_error(moved[0, 0], y[0][0]) > 1e-4

    def test_have_no_state(self, name):
        layer = make(name)
        y, state = jax.eval_shape(layer, features())
        assert y.shape == (2, T, F)
        assert state == nn.MixerState(None, None)
        with pytest.raises(ValueError, match="state must be None where causal=False"):
            layer(features(), state)
        with pytest.raises(ValueError, match="causal=False has no state"):
            layer.init_state(2)


def test_without_holes_an_encoder_layer_needs_no_mask():
    layer, x = make("fixed"), features()
    assert rms_error(call(layer, x), call(layer, x, jnp.ones((2, T), bool))) < 1e-6


class TestMeanPooling:
    def test_of_equal_heads_keeps_our_layers_output(self):
        options = dict(head_dim=3, value_head_dim=2, rngs=nnx.Rngs(0))
        many = nn.HLA2(H, F, **options)
        for part in (many.key, many.value, many.decay):
            axis = -1 if part is many.decay else -2
            kernel = part.kernel[...]
            part.kernel[...] = jnp.repeat(jnp.take(kernel, np.array([0, 2]), axis), 2, axis)
        many.decay.bias[...] = jnp.array([-1.0, -1.0, -3.0, -3.0])
        few = nn.HLA2(H, F, num_kv_heads=2, **options)
        nnx.update(few, nn.mean_pool_kv_heads(nnx.state(many, nnx.Param), 2))
        assert rms_error(call(few, features()), call(many, features())) < 1e-6

    def test_of_equal_heads_keeps_the_output_of_flax(self):
        options = dict(decode=False, rngs=nnx.Rngs(0))
        many, few = (nnx.MultiHeadAttention(H, F, num_kv_heads=K, **options) for K in (None, 2))
        for part in (many.key, many.value):
            part.kernel[...] = jnp.repeat(part.kernel[...][:, ::2], 2, axis=1)
        pooled = nn.mean_pool_kv_heads(nnx.to_pure_dict(nnx.state(many, nnx.Param)), 2)
        nnx.update(few, pooled)
        assert few.key.kernel.shape == (F, 2, F // H)
        assert rms_error(few(features()), many(features())) < 1e-6

    def test_takes_the_mean_of_each_group_in_every_layer_of_a_model(self):
        model = TransformerLM(
            8, num_layers=2, num_heads=H, features=F, mixer="softmax", rngs=nnx.Rngs(0)
        )
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        pooled = nn.mean_pool_kv_heads(params, 2)
        before = np.asarray(params["blocks"][1]["mixer"]["value"]["kernel"])
        after = pooled["blocks"][1]["mixer"]["value"]["kernel"]
        wanted = np.stack([before[:, :2].mean(1), before[:, 2:].mean(1)], axis=1)
        assert rms_error(after, wanted) < 1e-6
        kept = pooled["blocks"][1]["mixer"]["query"]["kernel"]
        np.testing.assert_array_equal(kept, params["blocks"][1]["mixer"]["query"]["kernel"])

    @pytest.mark.parametrize(("groups", "message"), [(3, "divide the 4"), (0, "at least 1")])
    def test_refuses_other_numbers_of_groups(self, groups, message):
        params = nnx.state(make("softmax"), nnx.Param)
        with pytest.raises(ValueError, match=message):
            nn.mean_pool_kv_heads(params, groups)

    def test_refuses_parameters_without_kv_heads(self):
        with pytest.raises(ValueError, match="params must have"):
            nn.mean_pool_kv_heads(nnx.state(make("mla"), nnx.Param), 2)


def longformer_by_definition(layer, x):
    """Float64, one row and one query at a time, causal, without rotary positions and norms."""

    def heads(projection):
        return np.einsum("tf,fhd->thd", x, np.asarray(projection.kernel[...], np.float64))

    q, k, v = (heads(p) for p in (layer.query, layer.key, layer.value))
    gq, gk, gv = (heads(p) for p in (layer.global_query, layer.global_key, layer.global_value))
    out = np.zeros_like(v)
    few = layer.global_positions
    for t, h in np.ndindex(*out.shape[:2]):
        seen = [s for s in range(t + 1) if t in few or t - s < 2 or s in few]
        (a, b, c) = (gq, gk, gv) if t in few else (q, k, v)
        logits = b[seen, h] @ a[t, h] / np.sqrt(q.shape[-1])
        weights = np.exp(logits - logits.max())
        out[t, h] = weights / weights.sum() @ c[seen, h]
    return np.einsum("thd,hdf->tf", out, np.asarray(layer.out.kernel[...], np.float64))


def test_longformer_projects_global_tokens_anew():
    layer = nn.Longformer(
        H, F, window=2, global_positions=[1, 4], qk_norm=False, rotary=False, rngs=nnx.Rngs(0)
    )
    x = features(B=1, T=9)
    wanted = longformer_by_definition(layer, np.asarray(x[0], np.float64))
    assert rms_error(call(layer, x)[0], wanted) < 1e-5


def test_heads_are_rounded_to_bfloat16_by_no_layer_of_float32_parameters():
    layer = nn.MLA(H, F, kv_rank=5, rotary_dim=2, rngs=nnx.Rngs(0))
    x = features().astype(jnp.bfloat16)
    assert rms_error(call(layer, x), call(layer, x.astype(jnp.float32))) < 1e-6


class TestRandomParts:
    """They are drawn once, kept with the parameters, and differ from layer to layer."""

    @pytest.mark.parametrize("name", ["performer", "big_bird", "reformer"])
    def test_two_calls_agree_and_two_layers_do_not(self, name):
        layer, x = make(name), features(T=8)
        np.testing.assert_array_equal(call(layer, x), call(layer, x))
        other = make(name, seed=1)
        nnx.update(other, nnx.state(layer, nnx.Param))
        assert rms_error(call(other, x), call(layer, x)) > 1e-3
        nnx.update(other, nnx.state(layer))
        np.testing.assert_array_equal(call(other, x), call(layer, x))

    @pytest.mark.parametrize("name", ["big_bird", "reformer"])
    def test_gradients_leave_them_alone(self, name):
        def loss(layer, x):
            return (layer(x)[0] ** 2).sum()

        gradient = nnx.jit(nnx.grad(loss))(make(name), features())
        leaves = jax.tree.leaves(gradient)
        assert all(np.isfinite(a).all() and np.abs(a).max() > 0 for a in leaves)

    @pytest.mark.parametrize("name", ["big_bird", "reformer"])
    def test_are_drawn_from_keys_of_any_kind(self, name):
        layer, options = ENCODERS[name]
        layer(H, F, rngs=nnx.Rngs(jax.random.key(0, impl="rbg")), **options)

    def test_a_performer_draws_again_when_asked(self):
        layer, x = make("performer"), features()
        before = call(layer, x)
        layer.redraw(jax.random.key(7))
        after = call(layer, x)
        assert rms_error(after, before) > 1e-3
        layer.redraw(jax.random.key(7))
        np.testing.assert_array_equal(call(layer, x), after)


def test_a_rolling_cache_holds_the_window_alone_and_never_ends():
    layer = nn.SlidingWindowAttention(H, F, window=3, rngs=nnx.Rngs(0))
    x, state = features(T=40), layer.init_state(2)
    assert state.memory.k.shape == (2, 3, H, F // H)
    y = []
    step = nnx.jit(lambda layer, x, state: layer(x, state))
    for t in range(40):
        part, state = step(layer, x[:, t : t + 1], state)
        y.append(part)
    assert rms_error(jnp.concatenate(y, axis=1), call(layer, x)) < 1e-5


def test_latent_attention_keeps_one_small_vector_a_token():
    layer = nn.MLA(H, F, kv_rank=5, rotary_dim=2, max_length=7, rngs=nnx.Rngs(0))
    latent, rotated = layer.init_state(3).memory
    assert (latent.shape, rotated.shape) == ((3, 7, 5), (3, 7, 2))


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (nn.SlidingWindowAttention, dict(window=0), "window must be an integer at least 1, got 0"),
        (nn.SparseAttention, dict(pattern="strided"), "pattern must be .* got str"),
        (nn.Linformer, dict(num_projected=0), "num_projected must be an integer at least 1"),
        (nn.Linformer, dict(num_projected=2, projection="random"), "projection must be"),
        (nn.MLA, dict(kv_rank=0), "kv_rank must be an integer at least 1"),
        (nn.Reformer, dict(num_buckets=3), "num_buckets must be even, got 3"),
        (nn.Reformer, dict(chunk_size=0), "chunk_size must be"),
        (nn.Performer, dict(num_features=0), "num_features must be"),
        (nn.HLA2, dict(causal=False), "causal must be True: HLA2"),
        (nn.Linformer, dict(num_projected=2, causal=True), "causal must be False for Linformer"),
        (nn.FlashAttention, dict(implementation="fast"), "implementation must be"),
        (nn.Longformer, dict(window=2, global_positions=3), "global_positions must be a sequence"),
        (nn.BigBird, dict(global_positions=["a"]), "global_positions must be an integer"),
        (nn.Performer, dict(num_heads=0), "num_heads must be an integer at least 1"),
        (nn.LinearAttention, dict(causal=False), "decay must be None where causal=False"),
    ],
)
def test_a_wrong_option_is_named(layer, options, message, no_type_checks):
    with pytest.raises(ValueError, match=message):
        layer(**dict(num_heads=H, in_features=F, rngs=nnx.Rngs(0)) | options)


def test_a_row_longer_than_a_projection_is_refused(no_type_checks):
    with pytest.raises(ValueError, match="at most max_length=9"):
        jax.eval_shape(make("linformer"), features(T=10))


def test_a_language_model_refuses_layers_that_look_ahead():
    with pytest.raises(ValueError, match="layers with causal=True"):
        TransformerLM(
            8,
            num_layers=1,
            num_heads=2,
            features=8,
            mixer=nn.Linformer,
            num_projected=2,
            rngs=nnx.Rngs(0),
        )


@pytest.mark.parametrize("block_size", [2, 5, 40])
def test_big_bird_keeps_the_blocks_of_its_key(block_size):
    """Drawn once for the whole cache; tokens past it, which are padding, see none."""
    own = dict(num_random=2, block_size=block_size)
    layer = nn.BigBird(H, F, window=1, max_length=12, rngs=nnx.Rngs(0), **own)
    key = wrapped_key(random_key(nnx.Rngs(0)))
    drawn = patterns.big_bird(
        key, window=1, global_positions=[0], num_heads=H, num_random=2, block_size=block_size
    )
    for T in (1, 4, 12, 17):
        kept, wanted = (p.mask(T, causal=True) for p in (layer._pattern(), drawn))
        np.testing.assert_array_equal(kept[:, :12], wanted[:, :12])
    jaxpr = str(jax.make_jaxpr(lambda x: layer(x)[0])(features(B=1, T=1)))
    assert "random" not in jaxpr
