"""Parts that models share. Arrays carry their axes in their names.

    B batch     L length (queries)    S length (keys)     D width          F feed-forward width
    H heads     K head width          V vocabulary        N layers         P positions
    C choices   T tags                E examples         M masked positions Y segment types
    G gates of an LSTM

Logical axis names, mapped to mesh axes in one table (`jaxlm/distributed/mesh.py`):
`layers`, `vocabulary`, `positions`, `types`, `width`, `heads`, `head_width`, `feed_forward`, `classes`, `pooled`,
`transform`, `gates`, `biases` (of attention), `clusters` (of ids), `characters`, `window` and `filters` (of
convolutions); activations use `batch` and `length`. `whole_width` is a width that fsdp does not shard;
`head_width_in` and `feed_forward_in` are the inputs of a kernel whose output is the width, which fsdp shards.
"""
