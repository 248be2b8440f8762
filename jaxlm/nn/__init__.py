"""Parts that models share. Arrays carry their axes in their names.

    B batch     L length (queries)    S length (keys)     D width          F feed-forward width
    H heads     K head width          V vocabulary        N layers         P positions
    C choices   T tags                E examples         M masked places  Y segment types
    G gates of an LSTM

Logical axis names, mapped to mesh axes in one table (`jaxlm/sharding.py`):
`layers`, `vocabulary`, `positions`, `types`, `width`, `heads`, `head_width`, `feed_forward`, `classes`, `pooled`,
`transform`, `gates`; activations use `batch` and `length`; `gathered` is a width that is whole on every device.
"""
