"""Which rows differ most in what they would teach a model: greedy k-centre over gradients.

Gradients are not normalised: the length is the size of the error, and its sign a part of the direction. A row that the
model predicts well has a gradient near 0, so that one such row covers all others.

References
----------
O. Sener, S. Savarese: Active learning for convolutional neural networks: a core-set approach, 2018, algorithm 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats32 = NDArray[np.float32]


def k_centre(points: Floats32, count: int) -> NDArray[np.intp]:
    """Return `count` rows of a table, in the order picked.

    The first is the longest; each next one is farthest, in Euclidean distance, from its nearest picked row. The lower
    row wins a tie.

    >>> k_centre(np.array([[1.0], [2.0], [5.0], [9.0]], dtype=np.float32), 3).tolist()
    [3, 0, 2]
    """
    picked = np.empty(min(count, len(points)), dtype=np.intp)
    if not len(picked):
        return picked
    lengths = np.einsum("ij,ij->i", points, points)
    next_row = int(lengths.argmax())
    nearest = np.full(len(points), np.inf, dtype=np.float32)
    distances = np.empty_like(lengths)
    for number in range(len(picked)):
        picked[number] = next_row
        # |p - c|^2 = |p|^2 - 2 p.c + |c|^2: one product of a matrix and a vector per pick.
        np.matmul(points, points[next_row], out=distances)
        distances *= -2.0
        distances += lengths
        distances += lengths[next_row]
        np.minimum(nearest, distances, out=nearest)
        nearest[next_row] = -np.inf
        next_row = int(nearest.argmax())
    return picked
