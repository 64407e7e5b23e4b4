"""The sizes of the decoder. `DecoderConfig.scale(S)` are those of the paper, for S = 3, 4, 5, 6 and 8.

S = 1 and 2 are not the paper's: they follow its rule, about 3 S layers, to models that train in minutes on a GPU.

| S | width | heads of 64 | feed-forward | layers | parameters |
| ---: | ---: | ---: | ---: | ---: | ---: |
| 1 | 256 | 4 | 1024 | 4 | 12M |
| 2 | 512 | 8 | 2048 | 6 | 36M |
| 3 | 768 | 12 | 3072 | 10 | 96M |
| 4 | 1024 | 16 | 4096 | 12 | 185M |
| 5 | 1280 | 20 | 5120 | 16 | 356M |
| 6 | 1536 | 24 | 6144 | 18 | 560M |
| 8 | 2048 | 32 | 8192 | 20 | 1.07B |

These counts follow from 12 width^2 weights in a layer (four projections of attention, two of the feed-forward network,
no biases) and an embedding of 32768 tokens that is also the output layer.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from muse_attention.registry import get_attention

LAYERS = {1: 4, 2: 6, 3: 10, 4: 12, 5: 16, 6: 18, 8: 20}
"""by scale; the paper's are those from 3 on"""
SLIDING, GLOBAL = "sliding_attention", "full_attention"
"""What transformers calls the two kinds of layers."""


class DecoderConfig(PreTrainedConfig):
    model_type = "muse-decoder"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - read by transformers

    vocab_size: int = 32768
    hidden_size: int = 768
    intermediate_size: int = None  # type: ignore[assignment]  # __post_init__ sets it
    """of the feed-forward network; 4 hidden_size if not given"""
    num_hidden_layers: int = 10
    head_dim: int = 64
    num_attention_heads: int = None  # type: ignore[assignment]
    """hidden_size / head_dim if not given"""
    layer_types: list[str] = None  # type: ignore[assignment]
    """"sliding_attention" or "full_attention" for each layer; alternating if not given"""
    sliding_window: int = 256
    """tokens that a token of a sliding layer sees, itself among them"""
    attention: str = "exact"
    """of the global layers, by a name for `get_attention`"""
    max_position_embeddings: int = 65536
    rope_theta: float = 1e5
    layer_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **others: Any) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "head_dim", "sliding_window"):
            _check_size(name, getattr(self, name))
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.num_attention_heads is None:
            self.num_attention_heads = self.hidden_size // self.head_dim
        if self.layer_types is None:
            if self.num_hidden_layers % 2:
                raise ValueError(
                    f"num_hidden_layers={self.num_hidden_layers} must be even: layers come in pairs of a sliding and a "
                    "global one; give layer_types for another order"
                )
            self.layer_types = [SLIDING, GLOBAL] * (self.num_hidden_layers // 2)
        self._check()
        super().__post_init__(**others)

    def _check(self) -> None:
        _check_size("intermediate_size", self.intermediate_size)
        _check_size("max_position_embeddings", self.max_position_embeddings)
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE turns pairs of numbers")
        if self.num_attention_heads * self.head_dim != self.hidden_size:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not {self.num_attention_heads} heads of head_dim={self.head_dim}; "
                "choose a multiple of head_dim"
            )
        if len(self.layer_types) != self.num_hidden_layers or not set(self.layer_types) <= {SLIDING, GLOBAL}:
            raise ValueError(
                f"layer_types={self.layer_types!r} must name {SLIDING!r} or {GLOBAL!r} for each of "
                f"{self.num_hidden_layers} layers"
            )
        if not self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings=False: the output layer is the embedding; leave it True")
        get_attention(self.attention)

    @classmethod
    def scale(cls, size: int, **changes: Any) -> DecoderConfig:
        """The model of scale S = `size`; `head_dim=128`, for example, halves its number of heads."""
        if size not in LAYERS:
            raise ValueError(
                f"there is no model of scale {size!r}: choose {', '.join(map(str, LAYERS))}, or DecoderConfig.tiny"
            )
        sizes = {"hidden_size": 256 * size, "intermediate_size": 1024 * size, "num_hidden_layers": LAYERS[size]}
        return cls(**{**sizes, **changes})

    @classmethod
    def tiny(cls, **changes: Any) -> DecoderConfig:
        """1.3M parameters: two heads of 64, two pairs of layers, 4096 tokens; it trains on a CPU."""
        sizes = {"vocab_size": 4096, "hidden_size": 128, "num_hidden_layers": 4}
        return cls(**{**sizes, **changes})


def _check_size(name: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{name}={size!r} must be an integer of at least 1")
