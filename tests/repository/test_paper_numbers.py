"""The paper's Appendix D in numbers: every size, its parameters, learning rate, tokens and attention."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("transformers")

from muse_attention.config import MuSeConfig
from muse_attention.registry import full_name
from muse_lab.pretraining.model.configuration import GLOBAL, SLIDING, DecoderConfig
from muse_lab.pretraining.model.decoder import DecoderForCausalLM
from muse_lab.pretraining.recipes import Recipe, get_recipe, override
from muse_lab.pretraining.schedule import learning_rate


class Size(NamedTuple):
    scale: int
    printed: float
    """parameters, as the paper rounds them"""
    layers: int
    tokens: float


SIZES = [
    Size(3, 96e6, 10, 2.0e9),
    Size(4, 185e6, 12, 4.0e9),
    Size(5, 350e6, 16, 7.5e9),
    Size(6, 560e6, 18, 12.9e9),
    Size(8, 1e9, 20, 23.6e9),
]
sizes = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"s{size.scale}")
names = pytest.mark.parametrize("name", ["s{}", "paper-s{}"])


def decoder(recipe: Recipe) -> DecoderForCausalLM:
    with torch.device("meta"):
        return DecoderForCausalLM(DecoderConfig.scale(recipe.scale, head_dim=recipe.head_dim))


@sizes
def test_models(size: Size) -> None:
    model = decoder(get_recipe(f"s{size.scale}"))
    config = model.config
    assert (config.hidden_size, config.intermediate_size) == (256 * size.scale, 1024 * size.scale)
    assert (config.num_attention_heads, config.head_dim) == (4 * size.scale, 64)
    assert config.layer_types == [SLIDING, GLOBAL] * (size.layers // 2)
    assert (config.sliding_window, config.vocab_size, config.rope_theta) == (256, 32768, 1e5)
    assert (config.layer_norm_eps, config.tie_word_embeddings) == (1e-6, True)
    assert config.max_position_embeddings == 65536
    width = config.hidden_size
    of_a_layer = 4 * width * width + 2 * width * config.intermediate_size + 2 * width  # attention, FFN, two norms
    assert model.num_parameters() == size.layers * of_a_layer + width + 32768 * width
    assert model.num_parameters() == pytest.approx(size.printed, rel=0.08)  # the paper rounds 1.07B to 1B


@sizes
@names
def test_recipes(size: Size, name: str) -> None:
    recipe = get_recipe(name.format(size.scale))
    assert recipe.scale == size.scale
    assert recipe.peak_rate == pytest.approx(3e-3 / size.scale**0.5, rel=1e-12)
    assert (recipe.batch, recipe.length, recipe.tokens_per_step) == (2, 65536, 131072)
    assert 0 <= recipe.steps * recipe.tokens_per_step - size.tokens < recipe.tokens_per_step
    assert (recipe.beta1, recipe.beta2, recipe.epsilon, recipe.weight_decay, recipe.clip) == (0.9, 0.95, 1e-6, 0.01, 1)
    assert (recipe.warmup, recipe.final_rate, recipe.precision) == (4000, 0.1, "bfloat16")
    schedule = {"steps": recipe.steps, "warmup": 4000, "peak": recipe.peak_rate, "final": 0.1}
    assert learning_rate(3999, **schedule) == recipe.peak_rate
    assert learning_rate(recipe.steps, **schedule) == pytest.approx(recipe.peak_rate / 10)
    config = MuSeConfig.named(recipe.attention.removeprefix("muse:"), recipe.length)
    assert (config.query_clusters, config.key_clusters, config.retrieved_clusters) == (128, 128, 8)
    assert (config.retrieved_blocks, config.block_size, config.cap_factor) == (1, 8192, 4)
    assert (config.tolerance, config.tilt, config.monopole, config.dipole) == (None, True, True, "none")
    assert config.differentiable_aggregation


@sizes
def test_the_paper_to_the_letter(size: Size) -> None:
    """What sets `paper-s3` apart from `s3`: streaming clustering, queries capped too, no exact attention at the end."""
    ours, paper = get_recipe(f"s{size.scale}"), get_recipe(f"paper-s{size.scale}")
    config = MuSeConfig.named(paper.attention.removeprefix("muse:"), paper.length)
    assert (config.clustering, config.query_cap_factor) == ("streaming", 4)
    assert full_name(paper.attention, paper.length) == "muse:Q128K128R8SP1B8k,clustering=streaming,query_cap_factor=4.0"
    assert paper.exact_tail == 0
    changes = [f"attention={ours.attention}", f"exact_tail={ours.exact_tail}"]
    assert override(paper, changes) == ours


def test_fine_tuning_of_the_largest_model() -> None:
    """Table 33: 26M and 210M tokens are 0.1% and 0.9% of the pretraining, 200 and 1600 updates."""
    recipe = get_recipe("paper-s8")
    trained = recipe.steps * recipe.tokens_per_step
    for updates, millions, percent in ((200, 26, 0.1), (1600, 210, 0.9)):
        tokens = updates * recipe.tokens_per_step
        assert round(tokens / 1e6) == millions
        assert round(100 * tokens / trained, 1) == percent


def test_head_dimension_128() -> None:
    """Table 8: the model of 185M parameters with half the heads."""
    narrow, wide = (decoder(override(get_recipe("s4"), [f"head_dim={size}"])) for size in (64, 128))
    assert (wide.config.head_dim, wide.config.num_attention_heads) == (128, 8)
    assert wide.num_parameters() == narrow.num_parameters()


@pytest.mark.parametrize(("scale", "layers"), [(1, 4), (2, 6)])
def test_smaller_sizes_follow_the_rule(scale: int, layers: int) -> None:
    """About 3 S layers in pairs, and 20 tokens for each parameter: not the paper's, and no recipe says so."""
    recipe = get_recipe(f"s{scale}")
    model = decoder(recipe)
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (layers, 256 * scale)
    assert recipe.steps * recipe.tokens_per_step / model.num_parameters() == pytest.approx(20, rel=0.01)
    assert recipe.warmup < recipe.steps
    assert recipe.peak_rate == pytest.approx(3e-3 / scale**0.5)
    with pytest.raises(ValueError, match="unknown recipe"):
        get_recipe(f"paper-s{scale}")
