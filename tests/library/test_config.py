"""The configuration: notation, defaults, the scaling rule, and errors that say what to do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muse_attention import MuSeConfig, defaults
from muse_attention.defaults import DEFAULTS, Default


def test_defaults_are_the_papers_operating_point() -> None:
    assert str(MuSeConfig()) == "Q128K128R8SP1B8k,clustering=lloyd"
    assert MuSeConfig.parse("Q128K128R8SP1B8k") == MuSeConfig()


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("QK32R2B1k", {"query_clusters": 32, "key_clusters": 32, "retrieved_clusters": 2, "block_size": 1024}),
        ("QK128R8B8k", {}),
        ("Q1K128B8k", {"query_clusters": 1}),
        ("B1000", {"block_size": 1000}),
        ("B1m", {"block_size": 2**20}),
        ("SP4,block_size=100", {"retrieved_blocks": 4, "block_size": 100}),
        ("QK4B32", {"query_clusters": 4, "key_clusters": 4, "retrieved_clusters": 4, "block_size": 32}),
        ("QK64T0.01B8k", {"query_clusters": 64, "key_clusters": 64, "tolerance": 0.01}),
        ("Q32K256T1e-05B8k", {"query_clusters": 32, "key_clusters": 256, "tolerance": 1e-5}),
        ("T0B8k,second_order=false", {"tolerance": 0.0, "second_order": False}),
        ("TinfB8k", {"tolerance": float("inf")}),
        ("T1e+16B8k", {"tolerance": 1e16}),
        ("T1234567890123456.0B8k", {"tolerance": 1234567890123456.0}),
        (
            "QK64T0.01B8k,caution=0,tile=8",
            {"query_clusters": 64, "key_clusters": 64, "tolerance": 0.01, "caution": 0.0, "tile": 8},
        ),
        ("QK32R2B1k,clustering=lloyd,seed=7", None),
        ("QK32R0B1k, dipole=shared", None),
        ("B8k,cap_factor=none,tilt=false", {"cap_factor": None, "tilt": False}),
    ],
)
def test_parse(text: str, fields: dict[str, object] | None) -> None:
    config = MuSeConfig.parse(text)
    if fields is not None:
        assert config == MuSeConfig(**fields)
    assert MuSeConfig.parse(str(config)) == config


@pytest.mark.parametrize("text", ["QK32R2", "QK32R2,clustering=streaming", "seed=1", "T0.1,seed=1", "paper"])
@pytest.mark.parametrize("length", [1, 4096, 65536, 100_000])
def test_a_block_size_that_is_left_out_follows_the_length(text: str, length: int) -> None:
    """So that nothing is exact by accident; everything else is as the text says."""
    found = MuSeConfig.named(text, length)
    if text == "paper":
        assert found == MuSeConfig.paper(length)
    else:
        block_size = min(MuSeConfig.for_length(length).block_size, MuSeConfig.paper(length).block_size)
        assert found == MuSeConfig.parse(f"{text},block_size={block_size}")
        assert MuSeConfig.named(f"{text},block_size=77", length).block_size == 77
    assert found.block_size <= max(256, length // 4)
    with pytest.raises(ValueError, match=r"depends on the length; use MuSeConfig.named\(text, length\)"):
        MuSeConfig.parse(text)


OF_BOTH = {
    "query_clusters": st.integers(1, 5000),
    "key_clusters": st.integers(1, 5000),
    "block_size": st.integers(1, 100_000),
    "differentiable_aggregation": st.booleans(),
    "seed": st.integers(0, 2**63),
}
OF_PAPER = st.builds(
    MuSeConfig,
    **OF_BOTH,
    retrieved_clusters=st.integers(0, 100),
    retrieved_blocks=st.integers(1, 100),
    tilt=st.booleans(),
    monopole=st.booleans(),
    clustering=st.sampled_from(["streaming", "lloyd"]),
    cap_factor=st.one_of(st.none(), st.floats(1, 1e6)),
    query_cap_factor=st.one_of(st.none(), st.floats(1, 1e6)),
    lloyd_iterations=st.integers(1, 10),
)
BLOCKWISE = st.builds(
    MuSeConfig,
    **OF_BOTH,
    tolerance=st.floats(0),  # whatever its exponent, and infinity
    caution=st.floats(0, 1e6),
    search=st.one_of(st.none(), st.floats(0, 1e6, exclude_min=True)),
    tile=st.sampled_from([1, 2, 16, 64, 128]),
    first_order=st.sampled_from([None, True, False]),
    second_order=st.sampled_from([None, True, False]),
)


@settings(max_examples=200)
@given(OF_PAPER | BLOCKWISE)
def test_text_round_trips(config: MuSeConfig) -> None:
    assert MuSeConfig.parse(str(config)) == config


def test_the_papers_method() -> None:
    assert str(MuSeConfig.paper(65536)) == "Q128K128R8SP1B8k,clustering=streaming,query_cap_factor=4.0"
    assert MuSeConfig.paper(16384).largest_query_cluster == 4 * 2048 // 64


def test_the_notation_with_a_tolerance_leaves_out_what_belongs_to_the_paper() -> None:
    assert str(MuSeConfig.parse("Q16K128T0.1B4k")) == "Q16K128T0.1B4k"
    assert (
        str(MuSeConfig.parse("Q16K128T0.1B4k,tile=8,second_order=false")) == "Q16K128T0.1B4k,tile=8,second_order=false"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"retrieved_clusters": 4},
        {"retrieved_blocks": 2},
        {"monopole": False},
        {"tilt": False},
        {"clustering": "streaming"},
        {"cap_factor": 2.0},
        {"query_cap_factor": 2.0},
        {"dipole": "tilted"},
    ],
    ids=str,
)
def test_what_a_tolerance_does_not_go_with(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="belongs to the paper's method"):
        MuSeConfig(tolerance=0.1, **change)


@pytest.mark.parametrize("order", ["first_order", "second_order"])
def test_a_higher_order_needs_a_tolerance(order: str) -> None:
    with pytest.raises(ValueError, match="needs a tolerance"):
        MuSeConfig(**{order: True})
    assert not getattr(MuSeConfig(**{order: False}), f"uses_{order}")


@pytest.mark.parametrize("tile", [0, 3, 256, 8.0, True])
def test_what_is_no_tile(tile: object) -> None:
    with pytest.raises(ValueError, match="tile="):
        MuSeConfig(tolerance=0.1, tile=tile)


@pytest.mark.parametrize("caution", [-1, float("nan"), float("inf"), True, None, "2"])
def test_what_is_no_caution(caution: object) -> None:
    with pytest.raises(ValueError, match="must be a number of at least 0"):
        MuSeConfig(caution=caution)


@pytest.mark.parametrize("search", [0, -1, float("nan"), float("inf"), True, "0.1"])
def test_what_is_no_search(search: object) -> None:
    with pytest.raises(ValueError, match="must be a number above 0, or None for no search"):
        MuSeConfig(tolerance=0.1, search=search)


def test_a_search_needs_a_tolerance() -> None:
    with pytest.raises(ValueError, match=r"search=0\.1 needs a tolerance"):
        MuSeConfig.parse("QK64R4B2k,search=0.1")


@pytest.mark.parametrize("tolerance", [-1, float("nan"), True, "0.1"])
def test_what_is_no_tolerance(tolerance: object) -> None:
    with pytest.raises(ValueError, match="must be a number of at least 0"):
        MuSeConfig(tolerance=tolerance)


@pytest.mark.parametrize(
    ("length", "text"),
    [
        # The paper's table of far-field scaling.
        (4096, "QK32R2B512"),
        (16384, "QK64R4B2k"),
        (65536, "QK128R8B8k"),
        (2048, "QK16R1B256"),
        (8192, "QK32R2B1k"),
        (32768, "QK64R4B4k"),
        (131072, "QK128R8B16k"),
        # Between and below.
        (60000, "QK128R8B8k"),
        (100, "QK16R1B256"),
        (1, "QK16R1B256"),
    ],
)
def test_the_papers_scaling_rule(length: int, text: str) -> None:
    expected = MuSeConfig.parse(text)
    assert MuSeConfig.paper_sizes(length) == expected
    assert MuSeConfig.paper(length) == expected.replace(clustering="streaming", query_cap_factor=4.0)


@pytest.mark.parametrize("length", [1, 300, 4096, 60_000, 65_536, 65_537, 1 << 20])
def test_the_default_is_that_of_the_table(length: int) -> None:
    row = next(row for row in DEFAULTS if row.longest is None or length <= row.longest)
    expected = MuSeConfig.named(row.text, length)
    if row.blocks is not None:
        wanted = length / row.blocks
        powers = [2**exponent for exponent in range(10, 32)]
        expected = expected.replace(block_size=min(powers, key=lambda power: abs(math.log(power / wanted))))
    assert MuSeConfig.for_length(length) == expected


def test_every_length_has_a_default() -> None:
    *others, last = [row.longest for row in DEFAULTS]
    assert last is None
    assert others == sorted(set(others))


def test_a_table_of_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kind of row: a configuration for short sequences, a number of blocks, and the paper's rule."""
    table = (Default(4096, "QK16T0.1B1k"), Default(65536, "Q32K256T0.01,seed=1", blocks=16), Default(None, "paper"))
    monkeypatch.setattr(defaults, "DEFAULTS", table)
    for length in (1, 4096):
        assert MuSeConfig.for_length(length) == MuSeConfig.parse("QK16T0.1B1k")
    for length, block in ((4097, "1k"), (6000, "1k"), (65536, "4k")):
        assert MuSeConfig.for_length(length) == MuSeConfig.parse(f"Q32K256T0.01B{block},seed=1")
    assert MuSeConfig.for_length(65537) == MuSeConfig.paper(65537)


def test_is_frozen_and_hashable() -> None:
    config = MuSeConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    assert len({config, MuSeConfig(), config.replace(seed=1)}) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query_clusters": 0}, ["query_clusters=0", "at least 1"]),
        ({"key_clusters": -3}, ["key_clusters=-3", "at least 1"]),
        ({"retrieved_clusters": -1}, ["retrieved_clusters=-1", "at least 0"]),
        ({"retrieved_blocks": 0}, ["retrieved_blocks=0", "at least 1"]),
        ({"block_size": 0}, ["block_size=0", "at least 1"]),
        ({"block_size": 8.0}, ["block_size=8.0", "integer"]),
        ({"seed": True}, ["seed=True", "integer"]),
        ({"tilt": 1}, ["tilt=1", "True or False"]),
        ({"clustering": "kmeans"}, ["clustering='kmeans'", "streaming", "lloyd"]),
        ({"dipole": "quadrupole", "retrieved_clusters": 0}, ["dipole='quadrupole'", "centred"]),
        ({"dipole": "tilted"}, ["dipole='tilted'", "retrieved_clusters=0"]),
        ({"cap_factor": 0.5}, ["cap_factor=0.5", "at least 1", "None"]),
        ({"cap_factor": float("nan")}, ["cap_factor=nan", "at least 1"]),
        ({"cap_factor": "4"}, ["cap_factor='4'", "number"]),
        ({"query_cap_factor": 0}, ["query_cap_factor=0", "at least 1", "None"]),
        ({"clusters": 4}, ["clusters", "query_clusters"]),
    ],
)
def test_bad_fields(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError, match="MuSeConfig") as error:
        MuSeConfig().replace(**changes)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (128, ["text=128 is not a string"]),
        ("Q16K128R8T0.1B4k", ["a tolerance replaces the budget R; leave R out"]),
        ("", ["Q128K128R8SP1B8k", "Q16K128T0.1B4k"]),
        ("fast", ["'fast'", "Q128K128R8SP1B8k"]),
        ("Q128K128R8SP1B8kX", ["'X'"]),
        ("q128", ["'q128'"]),
        ("Q128Q64", ["query_clusters", "twice"]),
        ("QK64K32", ["key_clusters", "twice"]),
        ("QK0", ["query_clusters=0", "at least 1"]),
        ("QK32,speed=11", ["'speed=11'", "clustering"]),
        ("QK32,clustering", ["'clustering'", "name=value"]),
        ("QK32,tilt=maybe", ["tilt='maybe'", "true or false"]),
        ("QK32,seed=x", ["seed='x'", "integer"]),
        ("QK32,clustering=fast", ["clustering='fast'", "lloyd"]),
    ],
)
def test_bad_text(text: object, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        MuSeConfig.parse(text)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_the_fields_are_explained_by_help() -> None:
    for field in dataclasses.fields(MuSeConfig):
        assert f"        {field.name}: " in str(MuSeConfig.__doc__)


def test_an_absurd_cap_is_no_cap() -> None:
    assert MuSeConfig.parse("QK4B32,cap_factor=1e308").largest_key_cluster == 32


@pytest.mark.parametrize("length", [0, -5, 2.5, True, "64k"])
@pytest.mark.parametrize("make", [MuSeConfig.for_length, MuSeConfig.paper, MuSeConfig.paper_sizes])
def test_bad_length(make: Callable[[object], MuSeConfig], length: object) -> None:
    with pytest.raises(ValueError, match=rf"MuSeConfig\.{make.__name__}: length="):
        make(length)
