"""Number formats: their ranges, their reference rounding and their scales.

``scale`` always multiplies the high-precision value before the cast; ``scale_inv`` multiplies the cast value back.
"""

from autoprec.formats.rounding import round_to
from autoprec.formats.table import FORMATS, Format, get_format

__all__ = ["FORMATS", "Format", "get_format", "round_to"]
