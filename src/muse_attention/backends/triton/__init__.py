"""The far-field stages in Triton: the same as in `backends/torch`, for CUDA, without a host synchronisation.

This package has the paper's method, `blockwise` the method with a tolerance. `limits` has the limits of the kernels,
and can be imported without Triton.

Tensors have one axis for the heads of all sequences: `H` query heads, `G` key heads, `H / G` query heads for each. Rows
are sorted by cluster and block, so that a segment of queries or a bucket of keys is a range of rows. Lengths and counts
are arguments at run time; head dimensions, the scale and the dtype of sums are compiled in.

Names in kernels are those of Triton's tutorials:

- `keys_ptr` is a pointer, nearly always an argument; `keys` is what was loaded from it. `d_keys` is its gradient.
- `offs_row` are indices of rows, `offs` those of all entries of a tile. A *place* is an index in the order of groups, a
  *row* in the order of the inputs. `block_base` is the index of the first entry that belongs to a block.
- `mask_row` says which of `offs_row` exist, `mask` which entries of a tile do.
- `CAPITALS` are compiled in. `D` and `DV` are the head dimensions of keys and values; `padded` gives the powers of two
  that hold them.
- `# [ROWS, D]` is the shape of the tile in that line, or in the next; it is left out where the line itself shows it. In
  shapes `D` stands for `padded(D)`: tiles are padded, with zeros where they were loaded.

A kernel's docstring has its grid, and the shapes behind its pointers. Launches are by keyword; `arguments` of a
structure, or `arguments_of` it, are its tensors as keyword arguments.
"""
