"""How near programs come to eager that compute the same by other calls.

Where the numbers of a product alone say how it rounds, they are equal to the last bit, and are held
to it. Where the layout of its arrays says it too, as on AMD's processors, a product of a transposed
copy, or one product in place of several, differs by rounding.
"""

from shardwright.runtime.verify import Rounding, rounding

BITS = 0.0 if rounding() == Rounding(by_alignment=False, by_layout=False) else 1e-6
"""What ``max|a - b|`` is to be at most, in parts of ``max|b|``."""
