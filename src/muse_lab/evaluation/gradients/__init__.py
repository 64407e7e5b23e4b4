"""The part of the gradient of lookups that an attention keeps."""
