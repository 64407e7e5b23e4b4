"""How much of the gradient of lookups an attention keeps."""
