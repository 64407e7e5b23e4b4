"""The paper's decoder, as a model of transformers.

`configuration.py`: its sizes. `decoder.py`: the model. `sliding_window.py`: attention of its local layers.
`chunked_loss.py`: cross-entropy without all logits at once; `loss_kernel.py`: its Triton kernel.
`sequence_parts.py`: what a rank computes of sequences that several ranks share.
"""
