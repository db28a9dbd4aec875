"""Types of arrays, one name per type of element, and the length up to which a list is faster."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: A number per replica, row or request; NaN is unknown.
Floats = NDArray[np.float64]
#: Factors of models, a row per outcome or candidate.
Table = NDArray[np.float32]
#: Rows of candidates, or slots of the columns.
Rows = NDArray[np.intp]
Mask = NDArray[np.bool_]

#: Most elements for which a loop over Python numbers takes less time than numpy, whose calls cost the same for one as
#: for fifty.
FEW = 8
