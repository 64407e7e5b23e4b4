"""`muse fidelity`: the error of attentions in the layers of a model, by the measures of `muse_attention.fidelity`."""
