"""The one error class of the package.

Our own functions raise it before anything is launched or written. The raw op
raises RuntimeError, the replaced scaled_dot_product_attention whatever the
stock function raises.

SPDX-License-Identifier: BSD-3-Clause
"""


class FlashAttnError(ValueError):
    """Bad input or a missing part; names the argument, what was expected, what came."""
