"""The far-field stages in Triton: the same as in `backends/torch`, for CUDA, without a host synchronisation.

The paper's method is here, what a tolerance asks for in `blockwise`. `limits` says what the kernels serve, and is
imported without Triton.

Everything is laid out by head: `H` query heads of all sequences, `G` key heads, `R = H / G` query heads to each. Query
and key rows are sorted by (block, cluster), so that a segment of queries and a bucket of keys is a range of rows.
Kernels take lengths and counts at run time; head dimensions, the scale and the kind of numbers are compiled in.

Names in kernels are those of Triton's tutorials:

- `keys_ptr` is a pointer, nearly always an argument; `keys` is what was loaded from it. `d_keys` is its gradient.
- `offs_row` are indices of rows, `offs` those of all entries of a tile. A *place* counts rows in the order of their
  groups, a *row* in the order of the inputs.
- `mask_row` says which of `offs_row` exist, `mask` which entries of a tile do.
- `CAPITALS` are compiled in. `D` and `DV` are the head dimensions of keys and values; `padded` gives the powers of two
  that hold them.
- `# [ROWS, D]` is the shape of the tile in that line, or in the next; it is left out where the line itself says it. In
  shapes `D` stands for `padded(D)`: tiles are padded, with zeros where they were loaded.

A kernel's docstring has its grid, and the shapes behind its pointers. Launches are by keyword; a structure that kernels
take as a whole has `arguments`.
"""
