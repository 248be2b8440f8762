"""BERT's masks stated in plain Python and NumPy: threefry, the original's loops over tokens, one pair at a time.

threefry: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011, with 20 rounds, and the
rule by which JAX folds a number into a key. The loops are google-research/bert's, create_pretraining_data.py:342-415,
where a sort by random numbers stands for the shuffle. Nothing of jaxlm is imported here.
"""

import numpy as np

M32 = 0xFFFFFFFF
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry2x32(key: tuple[int, int], count: tuple[int, int]) -> tuple[int, int]:
    """Twenty rounds of threefry on two 32-bit words."""
    schedule = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x = [(count[0] + schedule[0]) & M32, (count[1] + schedule[1]) & M32]
    for block in range(5):
        for turn in ROTATIONS[block % 2]:
            x[0] = (x[0] + x[1]) & M32
            x[1] = ((x[1] << turn) | (x[1] >> (32 - turn))) & M32
            x[1] ^= x[0]
        x[0] = (x[0] + schedule[(block + 1) % 3]) & M32
        x[1] = (x[1] + schedule[(block + 2) % 3] + block + 1) & M32
    return x[0], x[1]


def mask_pair(
    ids: np.ndarray,
    seeds: tuple[int, int],
    pair: int,
    *,
    specials: tuple[int, int, int],
    vocab_size: int,
    rate: float = 0.15,
    share_mask: float = 0.8,
    share_random: float = 0.1,
    continues: np.ndarray | None = None,
) -> tuple[np.ndarray, list[int]]:
    """What stands in a pair's n tokens after masking, and the places to be predicted in the order of choice.

    specials: the ids of CLS, SEP and MASK. pair: its number in its row, from 0. continues: for whole words.
    """
    cls, sep, mask = specials
    key = (seeds[0], (seeds[1] + pair) & M32)
    words: list[list[int]] = []
    for at, token in enumerate(ids):
        if token in (cls, sep):
            continue
        if continues is not None and words and continues[token]:
            words[-1].append(at)
        else:
            words.append([at])
    words.sort(key=lambda word: threefry2x32(key, (0, 2 * word[0]))[0])
    wanted = max(1, int(round(len(ids) * rate)))
    chosen: list[int] = []
    for word in words:
        if len(chosen) + len(word) <= wanted:
            chosen += word
    seen = ids.copy()
    for at in chosen:
        kind = threefry2x32(key, (0, 2 * at))[1] / 2**32
        if kind < share_mask:
            seen[at] = mask
        elif kind < share_mask + share_random:
            seen[at] = threefry2x32(key, (0, 2 * at + 1))[0] % vocab_size
    return seen, chosen
