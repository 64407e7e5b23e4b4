"""`attn_implementation="muse"` for the models of transformers that use its attention interface, Llama among them.

    from muse_attention import huggingface
    huggingface.register("QK32R2SP1B1k")
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="muse")

`model.set_attn_implementation("muse")` does the same to a loaded model. `model.config.muse = "QK64R4B2k"` gives a
model a configuration of its own, which `save_pretrained` keeps; in a model made of several it belongs in the config of
the one that attends. Without it, and without `register(config)`, it is `MuSeConfig.for_length` of each input.

MuSe attends where whole documents attend to themselves: training, and prefill. Packed documents, given by
`cu_seq_lens_q` or by `position_ids` that restart, never see each other, and padding is left out
(`documents/rows.py`, `masks.py`). Attention sinks are part of the softmax (`core/sinks.py`). In a `chunked_prefill`
block a prompt may come in chunks (`prefill.py`).

Everything else is attended to exactly, and an `ExactAttentionWarning` says so once for each reason: decoding with a KV
cache, inputs of one block, layers with a sliding window, attention dropout, a bias of the logits, and padding inside a
document.

A ValueError refuses the rest: masks that express more than padding and documents, models that do not use the attention
interface (Bloom, GPT-J), attention that is not a softmax over all keys (a softcap, selected keys), and packed documents
that would see each other, as in a continued KV cache.

If a whole model is compiled with `torch.compile`, padding masks and `position_ids` cannot be read: a padded batch is
attended to exactly, and packed documents are an error. Compile the layers, not the whole model.
"""

from __future__ import annotations

from muse_attention.core.extras import how_to_install

try:
    from muse_attention.huggingface.fallbacks import ExactAttentionWarning
    from muse_attention.huggingface.prefill import chunked_prefill
    from muse_attention.huggingface.registration import register, use_attention
except ImportError as error:
    raise ImportError(
        f"models of transformers need transformers 5.17 or newer: {how_to_install('huggingface')} "
        f"({' '.join(str(error).split())})"
    ) from None

__all__ = ["ExactAttentionWarning", "chunked_prefill", "register", "use_attention"]
