"""CRC-32C (Castagnoli), TensorFlow's checksum of what a checkpoint holds, for large buffers in NumPy.

The checksum without its first and last complement is linear over GF(2): that of `a` followed by n bytes is that of `a`
times x**(8 n), and that of two buffers in a row is the sum (XOR) of the first one's so shifted and the second one's. A
buffer is therefore parted into lanes of one length, all lanes advance together, 32 bits at a time, and their checksums
are joined in pairs. Zeros in front change nothing, which makes every buffer a whole number of lanes.
"""

import functools

import numpy as np

_POLYNOMIAL = 0x82F63B78  # reflected: bit 31 is the coefficient of x**0
_WORDS = 256  # 32-bit words in a lane
_LANES = 4096  # that advance together: 4 MB


def crc32c(content: bytes) -> int:
    """Return the CRC-32C of `content`."""
    data = np.frombuffer(content, np.uint8)
    lane = 4 * _WORDS
    padding = -len(data) % lane
    head, rest = np.concatenate([np.zeros(padding, np.uint8), data[: lane - padding]]), data[lane - padding :]
    lanes = [_lanes(head.reshape(-1, lane))]
    for start in range(0, len(rest), lane * _LANES):
        lanes.append(_lanes(rest[start : start + lane * _LANES].reshape(-1, lane)))
    total = _joined(np.concatenate(lanes), lane)
    return int(total ^ _times(np.uint32(0xFFFFFFFF), _power(len(data)))) ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """Return the checksum as TensorFlow stores it (tensorflow/core/lib/hash/crc32c.h, `Mask`)."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _lanes(rows: np.ndarray) -> np.ndarray:
    """The linear checksums, uint32 (lanes,), of uint8 (lanes, 4 * _WORDS)."""
    low, high = _tables()
    words = np.ascontiguousarray(np.ascontiguousarray(rows).view("<u4").T)
    state = np.zeros(words.shape[1], np.uint32)
    for word in words:
        state ^= word
        state = low[state & 0xFFFF] ^ high[state >> 16]
    return state


def _joined(checksums: np.ndarray, size: int) -> np.uint32:
    """The linear checksum of buffers of `size` bytes each, in a row."""
    while len(checksums) > 1:
        if len(checksums) % 2:
            checksums = np.concatenate([np.zeros(1, np.uint32), checksums])
        checksums = _times(checksums[::2], _power(size)) ^ checksums[1::2]
        size *= 2
    return checksums[0] if len(checksums) else np.uint32(0)


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """What 32 bits of zeros after it make of the low and of the high half of a state: uint32 (65536,) each."""
    half = np.arange(1 << 16, dtype=np.uint32)
    states = np.stack([half, half << np.uint32(16)])
    for _ in range(32):
        states = states >> np.uint32(1) ^ np.where(states & np.uint32(1), np.uint32(_POLYNOMIAL), np.uint32(0))
    return states[0], states[1]


def _times(values: np.ndarray | np.uint32, factor: int) -> np.ndarray | np.uint32:
    """Products of polynomials modulo the checksum's."""
    product = values & np.uint32(0)
    for bit in range(31, -1, -1):
        product ^= np.where(values >> np.uint32(bit) & np.uint32(1), np.uint32(factor), np.uint32(0))
        factor = factor >> 1 ^ (_POLYNOMIAL if factor & 1 else 0)
    return product


@functools.cache
def _power(size: int) -> int:
    """x**(8 * size): what `size` bytes that follow multiply a checksum by."""
    power, square = 1 << 31, 1 << 23  # 1 and x**8
    while size:
        if size & 1:
            power = int(_times(np.uint32(power), square))
        square, size = int(_times(np.uint32(square), square)), size >> 1
    return power
